"""Speed of the embedded engine over HTTP, with a tiny random Qwen3 (2 layers, hidden 64, vocabulary 640).

    python benchmarks/engine.py [--model DIR] [--concurrency 16] [--threads 1] [--calls 2000]

Two loads: `decode` (every client asks for 256 tokens after a short prompt) and `sessions` (the default
run's load: prompts of 100 to 250 tokens that extend the turn before, about 9 new tokens). `cpu_ms_per_call`
is processor time of the engine process. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 640, 64, 2, 4, 2, 16, 192


def write_model(directory: Path) -> None:
    """A tied random Qwen3 as a Hugging Face directory."""
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for index in range(LAYERS):
        shapes |= {
            f"model.layers.{index}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    weights = {n: torch.ones(s) if "norm" in n else torch.randn(s) * 0.1 for n, s in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))


class Client:
    """One kept-alive connection; a small client, so that the engine is what is measured."""

    @classmethod
    async def open(cls, host: str, port: int) -> "Client":
        client = cls()
        client.reader, client.writer = await asyncio.open_connection(host, port)
        return client

    async def generate(self, input_ids: list[int], new: int) -> list[int]:
        sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
        body = json.dumps(
            {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        ).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        content = json.loads(await self.reader.readexactly(length))
        if " 200 " not in answer.split(b"\r\n")[0].decode():
            raise SystemExit(f"the engine answered {content}")
        return content["output_ids"]


async def decode(address: tuple[str, int], concurrency: int, new: int = 256) -> dict:
    clients = [await Client.open(*address) for _ in range(concurrency)]
    prompts = [[random.randrange(3, VOCAB) for _ in range(32)] for _ in clients]
    started = time.perf_counter()
    await asyncio.gather(*(c.generate(p, new) for c, p in zip(clients, prompts, strict=True)))
    return {"tokens_per_s": round(concurrency * new / (time.perf_counter() - started))}


async def sessions(address: tuple[str, int], concurrency: int, calls: int, process: psutil.Process) -> dict:
    latencies: list[float] = []

    async def session(client: Client) -> None:
        prompt: list[int] = []
        while len(latencies) < calls:
            if not 0 < len(prompt) < 250:
                prompt = [random.randrange(3, VOCAB) for _ in range(100)]
            started = time.perf_counter()
            output = await client.generate(prompt, random.randrange(5, 14))
            latencies.append(time.perf_counter() - started)
            prompt = prompt + output + [random.randrange(3, VOCAB) for _ in range(20)]

    clients = [await Client.open(*address) for _ in range(concurrency)]
    before, started = sum(process.cpu_times()[:2]), time.perf_counter()
    await asyncio.gather(*(session(c) for c in clients))
    took, used = time.perf_counter() - started, sum(process.cpu_times()[:2]) - before
    latencies.sort()
    return {
        "calls_per_s": round(len(latencies) / took),
        "cpu_ms_per_call": round(used / len(latencies) * 1e3, 3),
        "p50_ms": round(latencies[len(latencies) // 2] * 1e3, 2),
        "p99_ms": round(latencies[len(latencies) * 99 // 100] * 1e3, 2),
    }


async def measure(url: str, options: argparse.Namespace, process: psutil.Process) -> dict:
    host, port = url.removeprefix("http://").split(":")
    address = host, int(port)
    random.seed(0)
    await decode(address, options.concurrency, 16)  # warm up
    return {
        "concurrency": options.concurrency,
        "decode": await decode(address, options.concurrency),
        "sessions": await sessions(address, options.concurrency, options.calls, process),
        "rss_mb": round(process.memory_info().rss / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Qwen3 directory; default: a tiny random one")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder)
        if not options.model:
            write_model(model)
        command = [sys.executable, "-m", "gyre_trainer.engine_server", "--model", str(model)]
        command += ["--threads", str(options.threads), "--exit-with-parent"]
        started = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            line = engine.stdout.readline()
            if not line:
                raise SystemExit("the engine did not start")
            result = {"start_s": round(time.perf_counter() - started, 2)}
            result |= asyncio.run(measure(json.loads(line)["url"], options, psutil.Process(engine.pid)))
            engine.stdin.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
