"""Owns what the head of a request may cost: time and size, before anybody knows who sends it.

Invariant: a connection that sends no whole head is closed at a deadline, also one that sends nothing.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT = 2**17
"""Bytes of a head; capabilities and harnesses' hints take some kilobytes."""


class Heads(HttpToolsProtocol):
    """uvicorn's protocol with bounds on the time and size of heads, and on the size of trailers, which are not looked at."""

    def __init__(self, *, head_timeout_s: float, **given: object) -> None:
        super().__init__(**given)
        self._head_timeout_s = head_timeout_s
        self._heads = 0
        self._head_size: int | None = None
        """Bytes of the head that is arriving, behind those that came with its first; None between heads."""
        self._trailers = 0
        """Bytes of what follows the body, which is read over."""
        self._deadline: asyncio.TimerHandle | None = None
        """Of the head that is arriving, or at first of a connection that sends nothing: as long as one may rest later."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.timeout_keep_alive, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads = self._heads
        super().data_received(data)
        if self._head_size is not None and heads == self._heads:
            self._head_size += len(data)
        if max(self._head_size or 0, self._trailers) > HEAD_LIMIT:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._head_size is None:  # most heads come whole
            self._rest_on()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._head_timeout_s, self._late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_ends()
        self._heads += 1
        self._head_size = self._trailers = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer must not pass for a header: it comes after the key was looked at, and could be another."""
        if self._head_size is None:
            self._trailers += len(name) + len(value)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_ends()
        super().on_headers_complete()

    def _rest_on(self) -> None:
        """Blank lines alone are no head, but stop the clock of a connection that rests."""
        resting = self.cycle is None or self.cycle.response_complete
        if resting and self._deadline is None and self.timeout_keep_alive_task is None:
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _late(self) -> None:
        if self.flow.read_paused:  # the rest may be here: uvicorn does not read while requests queue
            self._deadline = self.loop.call_later(self._head_timeout_s, self._late)
        else:
            self._refuse(b"408 Request Timeout")

    def _head_ends(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._head_size = None

    def _refuse(self, status: bytes) -> None:
        """End a connection in HTTP's words; no dialect is known yet. One that still answers an earlier request is cut."""
        self._head_ends()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(
                    b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status
                )
            self.transport.close()
