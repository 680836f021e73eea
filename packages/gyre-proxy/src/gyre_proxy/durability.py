"""Owns when an appended line counts as durable.

Invariant: `durable()` returns only after every line appended before it survives what the policy names: "process"
(the death of every process; a write is enough) or "disk" (loss of power: one fdatasync for all lines that wait).
"""

import asyncio

from gyre_trajtree import RunLogWriter


class GroupCommit:
    """Flushes a run log for many calls at once; a line waits for two flushes at most."""

    def __init__(self, log: RunLogWriter, flush: str) -> None:
        self._log, self._to_disk = log, flush == "disk"
        self._waiting: list[asyncio.Future] = []
        self._flushing: asyncio.Task | None = None

    async def durable(self) -> None:
        """Wait until all that is appended is durable. Raises RunLogError when the disk refuses."""
        if not self._to_disk:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await waiter

    async def _flush(self) -> None:
        """Beside the loop: a disk can take its time, and other calls go on meanwhile."""
        try:
            while self._waiting:
                waiters, self._waiting = self._waiting, []
                failure: Exception | None = None
                try:
                    await asyncio.to_thread(self._log.sync)
                except Exception as error:  # whatever it is, nobody may be told that the line is safe
                    failure = error
                for waiter in waiters:
                    if waiter.done():
                        continue
                    if failure is None:
                        waiter.set_result(None)
                    else:
                        waiter.set_exception(failure)
        finally:
            self._flushing = None
