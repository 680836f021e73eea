"""Owns getting calls off an engine: abort, abort again, and at the last cut the connection.

Aborts are repeated because an engine forgets one that overtakes its request. Invariant: when `evict` returns,
each call has left the engine it was on, or the deadline has passed.
"""

import asyncio
import time
from collections.abc import Sequence

from gyre_proxy.engine_client import EngineClient
from gyre_proxy.flights import Flight, Signal

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_CUT_SHARE, _CUT_LONGEST_S = 0.2, 1.0
"""The last part of the time is for calls whose engine does not react: their connections are cut."""


async def evict(flights: Sequence[Flight], deadline: float, client: EngineClient, changed: Signal) -> None:
    """Get `flights` off the engines they are on now; `changed` fires whenever a call leaves an engine."""
    legs = [(flight, flight.rid) for flight in flights if flight.engine is not None]
    cut_at = deadline - min(_CUT_LONGEST_S, _CUT_SHARE * (deadline - time.monotonic()))
    pause = _FIRST_PAUSE_S
    while (staying := _staying(legs)) and (left := cut_at - time.monotonic()) > 0:
        await _abort(staying, client, left)
        await changed.wait(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    for flight in staying:
        flight.drop("reroute")
    while _staying(legs) and (left := deadline - time.monotonic()) > 0:
        await changed.wait(left)


def _staying(legs: Sequence[tuple[Flight, str]]) -> list[Flight]:
    return [flight for flight, rid in legs if flight.engine is not None and flight.rid == rid]


async def _abort(flights: Sequence[Flight], client: EngineClient, timeout: float) -> None:
    """Ask the engines once; one that cannot be asked shows by the call that does not leave it."""
    tasks = [asyncio.ensure_future(client.abort(f.engine.url, f.rid)) for f in flights]
    _, late = await asyncio.wait(tasks, timeout=timeout)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
