"""Processor time of the proxy process, in front of an engine that answers at once, with a tool call.

    python benchmarks/proxy.py --tokenizer DIR [--calls 1000] [--turns 200] [--turn-bytes 1900]

Two loads: `small` (a new conversation each call) and `growing` (one Chat Completions session of tool calls, whose
request grows by `turn-bytes` a turn: 400 KB after 200 turns by default). `cpu_ms` is processor time of the proxy
process for each call; `quarters` are the four quarters of the growing session. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import httptools
import psutil
from tokenizers import Tokenizer

ANSWER = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -la", "timeout": 60}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run it.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Engine(asyncio.Protocol):
    """SGLang's /generate with fixed ids; it looks at nothing but the length of a request."""

    def __init__(self, ids: list[int]) -> None:
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0"}
        meta["output_token_logprobs"] = [[-0.5, i, None] for i in ids]
        body = json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()
        self._answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._transport.write(self._answer)


class Client:
    """One kept-alive connection."""

    @classmethod
    async def open(cls, url: str) -> "Client":
        client = cls()
        host, port = url.removeprefix("http://").split(":")
        client.reader, client.writer = await asyncio.open_connection(host, int(port))
        return client

    async def ask(self, execution: str, body: dict) -> dict:
        content = json.dumps(body).encode()
        head = f"POST /x/{execution}/v1/chat/completions HTTP/1.1\r\nhost: p\r\ncontent-length: {len(content)}\r\n\r\n"
        self.writer.write(head.encode() + content)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        content = json.loads(await self.reader.readexactly(length))
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise SystemExit(f"the proxy answered {content}")
        return content


def words(tokenizer: Tokenizer, size: int) -> str:
    """Random text of about `size` characters from tokens of 4 to 6 letters, so that tokens are as long as usual."""
    vocabulary = (tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size()))
    known = sorted(w for w in vocabulary if 4 <= len(w) <= 6 and w.strip().isalpha())
    return "".join(random.choices(known, k=size // 5))


async def small(client: Client, calls: int) -> None:
    for number in range(calls):
        await client.ask(
            f"small{number}", {"model": "m", "messages": [{"role": "user", "content": "look around"}]}
        )


async def growing(client: Client, turns: int, text: str, cpu: "Processor") -> dict:
    """Processor time a turn in ms, by quarter too, and the size of the last request."""
    messages: list[dict] = [{"role": "user", "content": "Mend the failing test."}]
    quarters = []
    for turn in range(turns):
        answer = await client.ask("growing", {"model": "m", "messages": messages, "tools": [TOOL]})
        message = answer["choices"][0]["message"]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{turn}:{text}"}
            for call in message["tool_calls"]
        ]
        if (turn + 1) % (turns // 4) == 0:
            quarters.append(round(cpu.spent() / (turns // 4) * 1e3, 3))
    return {
        "turns": turns,
        "bytes": len(json.dumps(messages)),
        "tokens": answer["usage"]["prompt_tokens"],
        "cpu_ms": round(sum(quarters) / 4, 3),
        "quarters": quarters,
    }


class Processor:
    """Processor time that a process spent since the last look, in seconds."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = 0.0
        self.spent()

    def spent(self) -> float:
        now = sum(self._process.cpu_times()[:2])
        spent, self._before = now - self._before, now
        return spent


async def measure(options: argparse.Namespace, folder: str) -> dict:
    random.seed(0)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    text = words(tokenizer, options.turn_bytes)
    ids = tokenizer.encode(ANSWER).ids
    engine = await asyncio.get_running_loop().create_server(lambda: Engine(ids), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    command = [sys.executable, "-m", "gyre_proxy", "--tokenizer", str(options.tokenizer), "--engine", url]
    command += ["--record", f"{folder}/run.jsonl", "--context-length", "10000000", "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        line = proxy.stdout.readline()
        if not line:
            raise SystemExit("the proxy did not start")
        client = await Client.open(json.loads(line)["url"])
        cpu = Processor(proxy.pid)
        await small(client, 100)  # warm up
        cpu.spent()
        await small(client, options.calls)
        small_ms = round(cpu.spent() / options.calls * 1e3, 3)
        growing_ms = await growing(client, options.turns, text, cpu)
        client.writer.close()
        proxy.stdin.close()
    return {"small": {"calls": options.calls, "cpu_ms": small_ms}, "growing": growing_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face tokenizer directory")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--turn-bytes", type=int, default=1900)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(options, folder))))


if __name__ == "__main__":
    main()
