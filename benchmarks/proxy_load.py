"""What the proxy's benchmarks share: a scripted engine, proxies under test, a client, meters of processor time and memory.

A proxy under test is Gyre's, started here in front of the engine, or another with an OpenAI-compatible URL. The engine
speaks SGLang's /generate and Chat Completions, so that others find their upstream and a benchmark can call it with
nothing in between.
"""

import argparse
import asyncio
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import orjson
import psutil
from tokenizers import Tokenizer

START_S = 120
"""Longest wait for a proxy to listen, and for it to end."""
ANSWER_S = 120
"""Longest wait for an answer."""

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -la", "timeout": 60}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "shell", "description": "Run it.", "parameters": PARAMETERS}}


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every proxy benchmark."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face tokenizer directory")
    options.add_argument(
        "--repeats", type=int, default=3, help="measurements of each load; medians are printed"
    )
    options.add_argument("--engine-port", type=int, default=0, help="port of the scripted engine; 0: any")
    options.add_argument("--flush", default="process", help="as of gyre-proxy")
    options.add_argument(
        "--text", choices=("code", "words"), default="code", help="what contexts are made of"
    )
    options.add_argument(
        "--profile", type=Path, help="profile the processor time of Gyre's proxy into this file"
    )
    peer = options.add_argument_group("another proxy, measured in the same run in front of the same engine")
    peer.add_argument("--url", help="its OpenAI-compatible URL without /v1; its upstream must be the engine")
    peer.add_argument("--model", default="m", help="model that requests to it name")
    peer.add_argument("--pid", type=int, help="its process, for processor time and memory")
    peer.add_argument(
        "--command", help="starts it here; {port} and {engine} (a URL without /v1) are filled in"
    )
    return options


# --- the engine


class Engine:
    """Answers every request with the same tokens, `delay_s` seconds after it came, streamed in `chunks` over that time."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.ids, self.text = tokenizer.encode(text).ids, text
        self.delay_s = 0.0
        self.chunks = 1
        self.first_chunk = self.last_chunk = 0.0
        """time.perf_counter() when the first and the last piece of the newest stream were written."""
        self.url = ""

    def generated(self, count: int, finish: str | None) -> bytes:
        """/generate's answer with the first `count` tokens."""
        meta = {"finish_reason": finish and {"type": finish}, "weight_version": "0"}
        meta["output_token_logprobs"] = [[-0.5, i, None] for i in self.ids[:count]]
        return orjson.dumps({"text": "", "output_ids": self.ids[:count], "meta_info": meta})

    def completion(self) -> bytes:
        """The answer of Chat Completions."""
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": len(self.ids), "total_tokens": 1 + len(self.ids)}
        head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "m"}
        return orjson.dumps({**head, "choices": [choice], "usage": usage})

    def delta(self, start: int, end: int) -> bytes:
        """A chunk of a Chat Completions stream: characters `start` to `end`."""
        last = end == len(self.text)
        delta = {"role": "assistant", "content": self.text[start:end]}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop" if last else None}
        head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        return orjson.dumps({**head, "choices": [choice]})

    def event(self, path: bytes, step: int) -> bytes:
        """The event of a stream after `step` of its chunks."""
        if path == b"/generate":
            count = len(self.ids) * step // self.chunks
            data = self.generated(count, "stop" if step == self.chunks else None)
        else:
            data = self.delta(*(len(self.text) * s // self.chunks for s in (step - 1, step)))
        return b"data: " + data + b"\n\n" + (b"data: [DONE]\n\n" if step == self.chunks else b"")

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator["Engine"]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _EngineConnection(self), "127.0.0.1", port, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()


class _EngineConnection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine, self._parser = engine, httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._streams, self._tail = b"", False, b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        around = self._tail + body
        self._streams = self._streams or b'"stream":true' in around or b'"stream": true' in around
        self._tail = body[-16:]

    def on_message_complete(self) -> None:
        engine, path, loop = self._engine, self._path, asyncio.get_running_loop()
        if self._streams:
            self._transport.write(
                _HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            for step in range(1, engine.chunks + 1):
                loop.call_later(engine.delay_s * step / engine.chunks, self._stream, path, step)
        else:
            known = {b"/generate": lambda: engine.generated(len(engine.ids), "stop")}
            known[b"/v1/chat/completions"] = engine.completion
            body = known.get(path, lambda: b'{"weight_version": "0"}')()
            answer = (
                _HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            if engine.delay_s and path in known:
                loop.call_later(engine.delay_s, self._transport.write, answer)
            else:
                self._transport.write(answer)

    def _stream(self, path: bytes, step: int) -> None:
        engine, event = self._engine, self._engine.event(path, step)
        last = b"0\r\n\r\n" if step == engine.chunks else b""
        engine.last_chunk = time.perf_counter()
        if step == 1:
            engine.first_chunk = engine.last_chunk
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(event), event, last))


_HEAD = b"HTTP/1.1 200 OK\r\n"


# --- proxies under test


@dataclass
class Target:
    """Something that answers Chat Completions. `pid` None: nobody knows its process."""

    name: str
    url: str
    model: str = "m"
    pid: int | None = None
    record: Path | None = None
    """Gyre's run log; Gyre's proxy tells executions by their path, others by the key."""

    def path(self, execution: str) -> str:
        prefix = f"/x/{execution}" if self.record else urlsplit(self.url).path.rstrip("/")
        return f"{prefix}/v1/chat/completions"


@asynccontextmanager
async def stage(
    options: argparse.Namespace, answer: str, direct: bool = False
) -> AsyncIterator[tuple[Engine, list[Target], Tokenizer]]:
    """The engine, and what is measured in front of it: Gyre's proxy and the peer that the options name.

    `direct`: the engine itself is the first target.
    """
    random.seed(0)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(Engine(tokenizer, answer).serving(options.engine_port))
        targets = [Target("direct", engine.url)] if direct else []
        targets.append(stack.enter_context(_gyre(options, engine.url, folder / "run.jsonl")))
        if options.command or options.url:
            targets.append(await stack.enter_async_context(_peer(options, engine.url)))
        yield engine, targets, tokenizer


_PROFILED = """
import cProfile, sys, time
from gyre_proxy.__main__ import main
profile = cProfile.Profile(time.process_time)
profile.runcall(main, sys.argv[2:])
profile.dump_stats(sys.argv[1])
"""
"""The proxy under a profiler that counts processor time, so that a shared machine does not blur it."""


@contextmanager
def _gyre(options: argparse.Namespace, engine: str, record: Path) -> Iterator[Target]:
    program = ["-c", _PROFILED, str(options.profile)] if options.profile else ["-m", "gyre_proxy"]
    command = [sys.executable, *program, "--tokenizer", str(options.tokenizer)]
    command += ["--engine", engine, "--record", str(record), "--context-length", "10000000"]
    command += ["--flush", options.flush, "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("Gyre's proxy did not start; standard error says why")
            yield Target("gyre", orjson.loads(line)["url"], pid=process.pid, record=record)
        finally:
            process.stdin.close()
            _end(process)


@asynccontextmanager
async def _peer(options: argparse.Namespace, engine: str) -> AsyncIterator[Target]:
    if not options.command:
        yield Target("peer", options.url.removesuffix("/v1"), options.model, options.pid)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shlex.split(options.command.replace("{port}", str(port)).replace("{engine}", engine))
    with subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=sys.stderr
    ) as process:
        try:
            await _listening(port, process)
            url = options.url or f"http://127.0.0.1:{port}"
            yield Target("peer", url.removesuffix("/v1"), options.model, process.pid)
        finally:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            _end(process)


async def _listening(port: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            return writer.close()
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(
                    f"the peer does not listen on port {port}; does --command name {{port}}?"
                ) from None
            await asyncio.sleep(0.1)


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        process.kill()


# --- meters


class Meter:
    """Processor time and memory of a process and its children. None where the process is not known."""

    def __init__(self, pid: int | None) -> None:
        self._process = psutil.Process(pid) if pid else None
        self._before = 0.0
        self.spent()

    def spent(self) -> float | None:
        """Seconds of processor time since the last look."""
        if self._process is None:
            return None
        now = sum(_processor_time(process) for process in self._all())
        spent, self._before = now - self._before, now
        return spent

    def memory(self) -> float | None:
        """Resident megabytes."""
        return self._process and sum(process.memory_info().rss for process in self._all()) / 1e6

    def _all(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def _processor_time(process: psutil.Process) -> float:
    """Seconds. Linux tells another process's time to the nanosecond through the clock that belongs to its pid."""
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | 2)
    return sum(process.cpu_times()[:2])


def milliseconds(seconds: float | None, calls: int = 1) -> float | None:
    """Of one call, for printing."""
    return None if seconds is None else round(seconds / calls * 1e3, 3)


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- the client


@dataclass
class Answer:
    status: int = 0
    body: bytes = b""
    end: float = 0.0
    """time.perf_counter() when the answer was whole."""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """The body as it came, with the times."""


class Connection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    @classmethod
    async def open(cls, url: str) -> "Connection":
        parts = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port)
        return connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport, self._waiting = transport, None

    def connection_lost(self, error: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionError("the connection ended before the answer did"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        answer = self._answer
        answer.status, answer.end = self._parser.get_status_code(), time.perf_counter()
        answer.body = b"".join(piece for _, piece in answer.pieces)
        if not self._waiting.done():
            self._waiting.set_result(answer)

    async def request(self, method: str, path: str, content: bytes = b"", key: str = "any") -> Answer:
        head = f"{method} {path} HTTP/1.1\r\nhost: proxy\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._parser, self._answer = httptools.HttpResponseParser(self), Answer()
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + content)
        async with asyncio.timeout(ANSWER_S):
            return await self._waiting

    async def chat(self, target: Target, execution: str, body: dict) -> Answer:
        """A Chat Completions call. Ends the benchmark when it is not answered."""
        content = orjson.dumps({"model": target.model, **body})
        answer = await self.request("POST", target.path(execution), content, execution)
        if answer.status != 200:
            raise SystemExit(f"{target.name} answered {answer.status}: {answer.body[:500]!r}")
        return answer

    def close(self) -> None:
        self._transport.close()


def first_content(answer: Answer) -> float:
    """time.perf_counter() when the first text of a streamed answer was there."""
    seen = b""
    for when, piece in answer.pieces:
        seen += piece
        for line in seen.split(b"\n")[:-1]:
            if line.startswith(b"data: {") and _content(orjson.loads(line.removeprefix(b"data: "))):
                return when
    raise SystemExit("a stream brought no text")


def _content(event: dict) -> bool:
    deltas = [choice["delta"] for choice in event.get("choices", [])]
    return any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)


class Texts:
    """What agents read: source code, as most tool results are, or words in random order, which no tokenizer has seen."""

    def __init__(self, kind: str, tokenizer: Tokenizer) -> None:
        if kind == "words":
            vocabulary = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
            fit = (w for w in vocabulary if 4 <= len(w) <= 6 and w.isascii() and w.strip().isalpha())
            known = sorted(fit)
            self._source = "".join(random.choices(known, k=10**6))
        else:
            files = sorted(Path(os.__file__).parent.glob("*.py"))
            self._source = "".join(file.read_text(errors="ignore") for file in files)

    def text(self, size: int) -> str:
        """A piece of `size` characters, from anywhere."""
        size = min(max(1, size), len(self._source))
        start = random.randrange(len(self._source) - size + 1)
        return self._source[start : start + size]


def report(result: dict) -> None:
    """The one JSON object that a benchmark prints last."""
    print(orjson.dumps(result).decode())
