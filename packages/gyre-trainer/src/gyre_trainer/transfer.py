"""Weight movement: one cell exposes buffers, others pull them while it goes on training (paper section 4.4).

`Transfer` is the seam; `TcpTransfer` needs nothing but sockets. Invariants:
- what is exposed does not change until `withdraw` returned, and `withdraw` returns only when no reader is
  left;
- a pull verifies version, names, sizes and checksums. A pull that raises leaves its destination dirty.
No torch here: a buffer is a contiguous numpy array that shares memory with the weights.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from gyre_trainer.errors import PeerRefused, TransferError, VersionError
from gyre_trainer.wire import Channel

Address = tuple[str, int]
_ACKNOWLEDGED = b"\x06"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One manifest entry."""

    name: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    version: int
    checksum: int
    """CRC-32 of the bytes."""


class Transfer(Protocol):
    """One end of the weight movement."""

    address: Address
    """Where other ends reach what is exposed here."""

    def expose(self, version: int, buffers: Mapping[str, np.ndarray]) -> None:
        """Let others read the buffers, which are at `version` and stay fixed until `withdraw`."""

    def withdraw(self) -> None:
        """Refuse new readers and wait for the present ones. Readers that make no progress are cut off."""

    def pull(
        self,
        address: Address,
        version: int,
        buffers: Mapping[str, np.ndarray],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill the buffers from what is exposed at `address`, calling `progress` for every piece that came.

        Raises TransferError or VersionError.
        """

    def close(self) -> None: ...


class TcpTransfer:
    """Over plain TCP, authenticated by the run's key. One thread accepts, one more for each reader."""

    def __init__(self, key: bytes, host: str = "127.0.0.1", timeout_s: float = 30.0):
        """`timeout_s`: how long an end waits for the other without progress, also `withdraw` for readers."""
        self._key = key
        self._timeout_s = timeout_s
        self._change = threading.Condition()
        self._version: int | None = None
        self._buffers: list[tuple[Buffer, memoryview]] = []
        self._readers: set[socket.socket] = set()
        self._sent = 0
        """Pieces sent to readers: what shows that one goes on reading."""
        self._server = socket.create_server((host, 0))
        self.address: Address = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, name="weights", daemon=True).start()

    def expose(self, version: int, buffers: Mapping[str, np.ndarray]) -> None:
        entries = []
        for name, array in buffers.items():
            view = _bytes(name, array)
            checksum = zlib.crc32(view)
            entries.append((Buffer(name, len(view), str(array.dtype), array.shape, version, checksum), view))
        with self._change:
            self._version, self._buffers = version, entries

    def withdraw(self) -> None:
        with self._change:
            self._version, self._buffers = None, []
            while self._readers:
                sent = self._sent
                moved = self._change.wait_for(
                    lambda sent=sent: not self._readers or self._sent != sent, self._timeout_s
                )
                for reader in () if moved else self._readers:
                    with contextlib.suppress(OSError):  # it is going already
                        reader.shutdown(socket.SHUT_RDWR)

    def pull(
        self,
        address: Address,
        version: int,
        buffers: Mapping[str, np.ndarray],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            with socket.create_connection(address, self._timeout_s) as connection:
                channel = Channel(connection)
                channel.call(self._key)
                answer = json.loads(_receive_text(channel))
                if "refused" in answer:
                    raise TransferError(f"weights at {address[0]}:{address[1]}: {answer['refused']}")
                manifest = [
                    Buffer(**{**entry, "shape": tuple(entry["shape"])}) for entry in answer["buffers"]
                ]
                _check(manifest, version, buffers)
                for entry in manifest:
                    view = _bytes(entry.name, buffers[entry.name])
                    channel.receive_into(view, progress)
                    if zlib.crc32(view) != entry.checksum:
                        raise TransferError(f"weight {entry.name} arrived damaged; pull again")
                connection.sendall(_ACKNOWLEDGED)
        except (OSError, EOFError, PeerRefused) as error:
            raise TransferError(f"weights at {address[0]}:{address[1]}: {error}") from None

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self._timeout_s)
            try:
                channel = Channel(connection)
                channel.answer(self._key)
                with self._change:
                    version, entries = self._version, list(self._buffers)
                    if version is not None:
                        self._readers.add(connection)
                if version is None:
                    _send_text(connection, {"refused": "nothing is exposed now"})
                    return
                _send_text(connection, {"buffers": [asdict(entry) for entry, _ in entries]})
                for _, view in entries:
                    channel.send_bytes(view, self._count_piece)
                channel.receive_bytes(len(_ACKNOWLEDGED))
            except (OSError, EOFError, PeerRefused):
                return  # the reader is gone or no reader of ours; it knows, and pulls again
            finally:
                with self._change:
                    self._readers.discard(connection)
                    self._change.notify_all()

    def _count_piece(self) -> None:
        with self._change:
            self._sent += 1
            self._change.notify_all()


def _check(manifest: list[Buffer], version: int, buffers: Mapping[str, np.ndarray]) -> None:
    for entry in manifest:
        if entry.version != version:
            raise VersionError(f"weights are at version {entry.version}, not at {version}")
    theirs = {entry.name: (entry.dtype, entry.shape) for entry in manifest}
    ours = {name: (str(array.dtype), array.shape) for name, array in buffers.items()}
    if theirs != ours:
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        raise TransferError(f"weights differ in name, shape or dtype: {', '.join(differing[:5])}")


def _bytes(name: str, array: np.ndarray) -> memoryview:
    if not array.flags.c_contiguous:
        raise TransferError(f"weight {name} is not contiguous")
    return memoryview(array.reshape(-1).view(np.uint8))


def _send_text(connection: socket.socket, message: dict) -> None:
    body = json.dumps(message).encode()
    connection.sendall(len(body).to_bytes(8, "big") + body)


def _receive_text(channel: Channel) -> bytes:
    return bytes(channel.receive_bytes(int.from_bytes(channel.receive_bytes(8), "big")))
