"""Which engine serves which execution: the driver's picture of the proxy's engine table (paper section 4.3).

Invariant: an engine admits calls only while its cell is in rollout and serves a verified weight version.
"""

from __future__ import annotations

import asyncio

from gyre_cli.proxy import ProxyProcess


class Routes:
    """The engine table of a run. Destinations are cell indices."""

    def __init__(self, proxy: ProxyProcess, drain_s: float) -> None:
        """`drain_s` bounds the time in which a leaving cell's calls must have continued elsewhere."""
        self._proxy = proxy
        self._drain_s = drain_s
        self._urls: dict[int, str] = {}
        self._versions: dict[int, int] = {}
        self._admitting: set[int] = set()
        self._turn = asyncio.Lock()  # a table written before a cell left must not arrive after it
        self.continued = 0
        """Calls that were in flight on a leaving engine and went on elsewhere."""

    def url(self, cell: int) -> str:
        return self._urls[cell]

    async def admit(self, engines: dict[int, str], version: int) -> None:
        """These cells' engines serve `version` and take calls."""
        async with self._turn:
            for cell, url in engines.items():
                self._urls[cell], self._versions[cell] = url, version
                self._admitting.add(cell)
            await self._put_table()

    async def leave(self, cell: int, moves: dict[str, int]) -> int:
        """Empty a cell's engine: its executions move, calls in flight continue there. Returns how many did."""
        self._admitting.discard(cell)
        answer = await self._proxy.reroute(
            self.url(cell),
            {execution: self.url(target) for execution, target in moves.items()},
            self._drain_s,
        )
        self.continued += answer["continued"]
        return answer["continued"]

    async def _put_table(self) -> None:
        await self._proxy.set_engines(
            [
                {"url": url, "admitting": cell in self._admitting, "version": self._versions[cell]}
                for cell, url in self._urls.items()
            ]
        )
