"""Connections to engines: reused while open, gone with their engine; waits that end leave nothing behind."""

import asyncio

import httpx
import pytest
from gyre_proxy.connections import Connections, check_origin
from gyre_proxy.flights import Signal
from proxy_stage import ADMIN, DEADLINE_S


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


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "https://engine.example/prefix", "http://[::1]:30000/"]
)
def test_an_address_that_can_be_connected_to_passes(url):
    check_origin(url)


BROKEN = (
    "",
    "http://",
    "http://[::1",
    "http://x:99999",
    "http://x:0",
    "http://x:y",
    "ftp://x:1",
    "x:1",
    "http://a b:1",
    "http://x:1/\r\nevil: 1",
    "http://me:secret@x:1",
    "http://x:1?q",
    "http://a..b:1",
    f"http://{'a' * 64}:1",
    "\0",
)


@pytest.mark.parametrize("url", BROKEN)
def test_an_address_that_cannot_be_connected_to_is_refused(url):
    with pytest.raises(ValueError, match="must be a URL such as"):
        check_origin(url)


def test_an_engine_table_with_a_broken_address_is_refused_whole(scene):
    proxy, engine = scene(["Hello."])
    for url in BROKEN:
        body = {"engines": [{"url": url}]}
        answer = httpx.put(f"{proxy.url}/admin/engines", json=body, headers=ADMIN, timeout=DEADLINE_S)
        assert answer.status_code == 400 and "must be a URL" in answer.text
    assert list(proxy.admin("GET", "status")["engines"]) == [engine.url]
