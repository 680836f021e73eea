"""Which engine serves which execution: the driver's picture of the proxy's engine table (paper section 4.3).

Invariant: an engine admits calls only while its cell is in rollout and serves a verified weight version.
"""

from __future__ import annotations

import asyncio

from gyre_cli.proxy import ProxyProcess


class Routes:
    """The engine table of a run. Destinations are cell indices; a cell that comes back has an engine of its own."""

    def __init__(self, proxy: ProxyProcess, drain_s: float) -> None:
        """`drain_s` bounds the time in which a leaving cell's calls must have continued elsewhere."""
        self._proxy = proxy
        self._drain_s = drain_s
        self._urls: dict[int, str] = {}
        self._dead: dict[int, str] = {}
        self._versions: dict[str, int] = {}
        self._admitting: set[str] = set()
        self._writing = asyncio.Lock()  # a table written before an engine left must not arrive after it
        self.continued = 0
        """Calls that were in flight on a leaving engine and went on elsewhere."""

    def url(self, cell: int) -> str:
        return self._urls[cell]

    async def admit(self, engines: dict[int, str], version: int) -> None:
        """These cells' engines serve `version` and take calls."""
        async with self._writing:
            for cell, url in engines.items():
                self._urls[cell], self._versions[url] = url, version
                self._admitting.add(url)
            await self._put_table()

    async def leave(self, cell: int, moves: dict[str, int]) -> int:
        """Empty a cell's engine: its executions move, calls in flight continue there. Returns how many did."""
        return await self._empty(self._urls[cell], moves)

    def lose(self, cell: int) -> None:
        """The cell died with its engine."""
        self._dead[cell] = self._urls[cell]
        self._admitting.discard(self._urls[cell])

    async def flee(self, cell: int, moves: dict[str, int]) -> None:
        """Move the executions of the engine that a lost cell had."""
        await self._empty(self._dead[cell], moves)

    async def _empty(self, source: str, moves: dict[str, int]) -> int:
        async with self._writing:
            self._admitting.discard(source)
        targets = {execution: self._urls[target] for execution, target in moves.items()}
        answer = await self._proxy.reroute(source, targets, self._drain_s)
        self.continued += answer["continued"]
        return answer["continued"]

    async def _put_table(self) -> None:
        await self._proxy.set_engines(
            [
                {"url": url, "admitting": url in self._admitting, "version": version}
                for url, version in self._versions.items()
                if url in self._urls.values() or url in self._dead.values()
            ]
        )
