"""Frames between the driver and its cells, and the proof that both know the run's key. No torch here.

Invariant: not one byte of a frame is interpreted before the peer has proved the key, because frames are
pickles. A frame is eight bytes of length (big endian) and a pickle. The handshake goes both ways with a fresh
nonce each:

    listener -> caller   nonce
    caller -> listener   proof(nonce, "caller") + nonce'
    listener -> caller   proof(nonce', "listener")
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from gyre_trainer.errors import PeerRefused

NONCE = 32
PIECE = 2**22
"""Bytes given to one `send`."""
_LENGTH = struct.Struct(">Q")


def proof(key: bytes, nonce: bytes, side: str) -> bytes:
    """Shows knowledge of `key`; `side` keeps an answer from being reflected. 32 bytes."""
    return hmac.digest(key, side.encode() + nonce, hashlib.sha256)


def frame(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Channel:
    """The blocking side of a connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        data = frame(message)
        with self._sending:
            self.socket.sendall(data)

    def receive(self) -> Any:
        """The next message. Raises EOFError when the peer is gone."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        return pickle.loads(self.receive_bytes(length))

    def receive_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, view: memoryview, progress: Callable[[], None] = lambda: None) -> None:
        """Fill `view`, calling `progress` for every piece.

        Raises EOFError when the peer is gone, TimeoutError when nothing came for the socket's timeout.
        """
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError("the peer closed the connection")
            view = view[count:]
            progress()

    def send_bytes(self, view: memoryview, progress: Callable[[], None]) -> None:
        """Send `view`, calling `progress` for every piece. The socket's timeout bounds each piece, where that
        of `sendall` would bound the whole. Raises TimeoutError.
        """
        while view:
            view = view[self.socket.send(view[:PIECE]) :]
            progress()

    def call(self, key: bytes) -> None:
        """Handshake of the side that connected. Raises PeerRefused."""
        try:
            nonce, own = bytes(self.receive_bytes(NONCE)), secrets.token_bytes(NONCE)
            self.socket.sendall(proof(key, nonce, "caller") + own)
            if not hmac.compare_digest(self.receive_bytes(32), proof(key, own, "listener")):
                raise PeerRefused("the listener does not know the run's key")
        except (EOFError, OSError) as error:
            raise PeerRefused(f"the handshake failed: {error}") from None

    def answer(self, key: bytes) -> None:
        """Handshake of the side that listens. Raises PeerRefused."""
        try:
            nonce = secrets.token_bytes(NONCE)
            self.socket.sendall(nonce)
            reply = bytes(self.receive_bytes(32 + NONCE))
            if not hmac.compare_digest(reply[:32], proof(key, nonce, "caller")):
                raise PeerRefused("the caller does not know the run's key")
            self.socket.sendall(proof(key, reply[32:], "listener"))
        except (EOFError, OSError) as error:
            raise PeerRefused(f"the handshake failed: {error}") from None


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> bool:
    """Handshake of an asyncio listener; False when the caller does not know the key."""
    nonce = secrets.token_bytes(NONCE)
    writer.write(nonce)
    try:
        reply = await reader.readexactly(32 + NONCE)
    except (asyncio.IncompleteReadError, OSError):
        return False
    if not hmac.compare_digest(reply[:32], proof(key, nonce, "caller")):
        return False
    writer.write(proof(key, reply[32:], "listener"))
    return True


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError when the peer is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        raise EOFError("the peer closed the connection") from None
