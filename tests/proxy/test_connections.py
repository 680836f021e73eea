"""Connections to engines: reused while open, gone with their engine; waits that end leave nothing behind."""

import asyncio

from gyre_proxy.connections import Connections
from gyre_proxy.flights import Signal

DEADLINE_S = 20


async def _answer(reader, writer):
    await reader.readuntil(b"{}")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


async def _until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_engines_that_are_gone_leave_no_connection_behind():
    async def scene():
        pool = Connections()
        for _ in range(5):  # engines come back on other ports
            writers = []

            async def serve(reader, writer, writers=writers):
                writers.append(writer)
                await _answer(reader, writer)

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            assert await pool.post(origin, "/x", b"{}") == (200, b"{}")
            assert list(pool._idle) == [origin]
            writers[0].close()
            server.close()
            await _until(lambda: not pool._idle)

    asyncio.run(scene())


def test_a_wait_that_times_out_or_is_cancelled_is_forgotten():
    async def scene():
        signal = Signal()
        for _ in range(10):
            assert not await signal.wait(0.001)
        task = asyncio.create_task(signal.wait())
        await _until(lambda: signal._waiters)
        task.cancel()
        await asyncio.wait((task,))
        assert signal._waiters == []
        waits = [asyncio.create_task(signal.wait(DEADLINE_S)) for _ in range(3)]
        await _until(lambda: len(signal._waiters) == 3)
        signal.fire()
        assert await asyncio.gather(*waits) == [True] * 3

    asyncio.run(scene())
