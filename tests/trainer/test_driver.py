"""What the driver imports, and how it talks to a cell's process."""

import asyncio
import subprocess
import sys

import pytest
from gyre_trainer import wire


def test_the_drivers_modules_import_no_torch():
    modules = "cells, pool, rows, stream, settings, statistics, errors, engines, transfer, checkpoint"
    code = f"from gyre_trainer import {modules}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def connect(port: int, key: bytes):
    import socket

    channel = wire.Channel(socket.create_connection(("127.0.0.1", port), 5.0))
    channel.call(key)
    return channel


async def listen(key: bytes, caller_key: bytes):
    """A listener and a caller on a thread; the caller's channel and the listener's streams."""
    arrived = asyncio.get_running_loop().create_future()

    async def accept(reader, writer):
        arrived.set_result((await wire.answer(reader, writer, key), reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    calling = asyncio.create_task(asyncio.to_thread(connect, port, caller_key))
    known, reader, writer = await asyncio.wait_for(arrived, 10)
    if not known:
        writer.close()
    return server, calling, known, reader, writer


def test_frames_pass_both_ways_once_the_key_is_proved():
    async def run():
        server, calling, known, reader, writer = await listen(b"k" * 32, b"k" * 32)
        channel = await calling
        assert known
        message = ("answer", 3, {"x": list(range(100_000))})
        await asyncio.to_thread(channel.send, message)
        assert await wire.receive(reader) == message
        writer.write(wire.frame((1, "train", {})))
        assert await asyncio.to_thread(channel.receive) == (1, "train", {})
        writer.close()
        with pytest.raises(EOFError):
            await asyncio.to_thread(channel.receive)
        channel.socket.close()
        server.close()

    asyncio.run(run())


def test_a_caller_with_another_key_is_refused_before_any_pickle():
    async def run():
        server, calling, known, _, _ = await listen(b"k" * 32, b"x" * 32)
        assert not known
        with pytest.raises(wire.PeerRefused):
            await calling
        server.close()

    asyncio.run(run())


def test_an_answer_cannot_be_reflected():
    nonce = b"n" * wire.NONCE
    assert wire.proof(b"k", nonce, "caller") != wire.proof(b"k", nonce, "listener")
