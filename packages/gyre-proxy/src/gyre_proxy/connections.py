"""Owns the HTTP/1.1 connections to engines: kept alive, one exchange at a time each, cheap.

A general client spends over a millisecond on each exchange and scans its whole pool; here an exchange costs
a tenth of that whatever the number of connections. Invariants: a connection is in the pool only while it is
idle and open, so engines that are gone leave nothing behind; a cancelled or failed exchange closes its
connection, which tells the engine that nobody listens.
"""

import asyncio
import re
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0


class ConnectionFailed(Exception):
    """The exchange did not reach its end; the message says where it broke, `sent` whether the request had left."""

    def __init__(self, message: str, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


def check_origin(url: str) -> None:
    """Raises ValueError, in one line, for a URL that no connection could be made to."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        fine = False
    if not fine or not re.fullmatch(r"[!-~]+", url) or re.search(r"[?#@]", url):
        raise ValueError(f"engine {url!r} must be a URL such as http://127.0.0.1:30000")


class Connections:
    """Pool of connections by origin (http://host:port)."""

    def __init__(self) -> None:
        self._idle: dict[str, dict[_Connection, None]] = {}

    async def post(
        self, origin: str, path: str, body: bytes, on_data: Callable[[bytes], None] | None = None
    ) -> tuple[int, bytes]:
        """(status, body) of one POST. With `on_data` a 200's body goes there as it comes and b"" is returned.

        Raises ConnectionFailed.
        """
        return await self._exchange("POST", origin, path, body, on_data)

    async def get(self, origin: str, path: str) -> tuple[int, bytes]:
        """(status, body) of one GET. Raises ConnectionFailed."""
        return await self._exchange("GET", origin, path, b"", None)

    async def _exchange(
        self, method: str, origin: str, path: str, body: bytes, on_data: Callable[[bytes], None] | None
    ) -> tuple[int, bytes]:
        connection = self._reuse(origin) or await self._connect(origin)
        try:
            result = await connection.exchange(method, path, body, on_data)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.setdefault(origin, {})[connection] = None
        else:
            connection.close()
        return result

    def close(self) -> None:
        """Close all idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _reuse(self, origin: str) -> "_Connection | None":
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.open:
                return connection
        return None

    def _discard(self, origin: str, connection: "_Connection") -> None:
        idle = self._idle.get(origin, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(origin, None)

    async def _connect(self, origin: str) -> "_Connection":
        parts = urlsplit(origin)
        secure = parts.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(
                        parts.netloc, parts.path.rstrip("/"), lambda c: self._discard(origin, c)
                    ),
                    parts.hostname,
                    parts.port or (443 if secure else 80),
                    ssl=secure or None,
                )
        except TimeoutError as error:
            raise ConnectionFailed(f"no connection within {CONNECT_S:g} s") from error
        except OSError as error:
            raise ConnectionFailed(f"cannot connect: {error.strerror or error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; httptools calls the on_* methods while data is fed."""

    def __init__(self, host: str, prefix: str, lost: Callable[["_Connection"], None]) -> None:
        self._host, self._prefix, self._on_lost = host.encode(), prefix, lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._chunks: list[bytes] = []
        self._complete = False
        self._lost: str | None = None
        self._waiter: asyncio.Future | None = None
        self.reusable = False

    @property
    def open(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    def close(self) -> None:
        self._transport.abort()

    async def exchange(
        self, method: str, path: str, body: bytes, on_data: Callable[[bytes], None] | None
    ) -> tuple[int, bytes]:
        """One request and its response; see `Connections.post`."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._complete, self.reusable = [], False, False
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode() + b"host: " + self._host
        head += b"\r\ncontent-type: application/json\r\ncontent-length: " + str(len(body)).encode()
        self._transport.writelines((head + b"\r\n\r\n", body))
        while True:
            streaming = on_data is not None and self._chunks and self._parser.get_status_code() == 200
            if streaming:
                data, self._chunks = b"".join(self._chunks), []
                on_data(data)
            if self._complete:
                return self._parser.get_status_code(), b"".join(self._chunks)
            if self._lost is not None:
                raise ConnectionFailed(self._lost, sent=True)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._complete:
            self._fail("the engine sent data nobody asked for")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
        if self._complete or self._chunks:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._lost is None:
            self._lost = f"the connection broke: {error}" if error else "the engine closed the connection"
        self._on_lost(self)
        self._wake()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        self._complete = True
        self.reusable = self._parser.should_keep_alive()

    def _fail(self, reason: str) -> None:
        self._lost = reason
        self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
