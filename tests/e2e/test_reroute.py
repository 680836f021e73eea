"""A call in flight changes engines: real engines, a real proxy, and a client that notices nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from gyre_cli.quickstart import model_path
from gyre_trajtree import Call, Tree, read_run_log
from transformers import AutoConfig, AutoModelForCausalLM

TOKEN = "an-admin-token"


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[str]:
    """A server process of ours that says {"url"} when it is ready; ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments, "--exit-with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "ADMIN": TOKEN},
    )
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.stdin.close()
        process.wait(30)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory) -> Path:
    """A model of random weights: it hardly ever ends its turn, so a call is in flight for a while."""
    folder = tmp_path_factory.mktemp("model") / "random"
    shutil.copytree(model_path(), folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(
        folder
    )
    return folder


def test_a_streaming_call_continues_on_another_engine(talkative, tmp_path):
    log = tmp_path / "run.jsonl"
    with ExitStack() as stack:
        engine = (
            "gyre_trainer.engine_server",
            "--model",
            str(talkative),
            "--weight-version",
            "0",
            "--seed",
            "1",
        )
        source, target = (stack.enter_context(serving(*engine)) for _ in range(2))
        proxy = stack.enter_context(
            serving(
                "gyre_proxy",
                "--tokenizer",
                str(talkative),
                "--record",
                str(log),
                "--admin-token-env",
                "ADMIN",
                "--strict",
            )
        )
        admin = httpx.Client(base_url=proxy, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        table = [{"url": url, "admitting": True, "version": 0} for url in (source, target)]
        for execution in ("first", "second", "third", "fourth", "fifth"):
            # a call that ended before it could move says nothing; then another
            admin.put("/admin/engines", json={"engines": table}).raise_for_status()
            opened = admin.post("/admin/executions", json={"id": execution, "engine": source})
            address = opened.raise_for_status().json()
            client = openai.OpenAI(
                base_url=address["base_url"] + "/v1", api_key=address["key"], max_retries=0
            )
            stream = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], max_tokens=700, stream=True
            )
            chunks = [next(stream) for _ in range(6)]
            body = {"source": source, "moves": {execution: target}, "deadline_s": 30}
            moved = admin.post("/admin/reroute", json=body).raise_for_status().json()
            if moved["continued"]:
                break
            list(stream)
        assert moved == {"moved": 1, "continued": 1}
        assert admin.get("/admin/status").json()["engines"][source]["in_flight"] == 0
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    calls = [record for record in read_run_log(log) if isinstance(record, Call)]
    (call,) = [call for call in calls if call.execution == execution]
    assert call.finish in ("stop", "length") and len(call.output_ids) > 6
    assert call.versions[0][1] == 0 and call.versions[-1][2] == len(call.output_ids)
    tree = Tree.from_calls([call])
    ids = torch.tensor(tree.path_tokens(tree.nodes[0]), dtype=torch.long)[None]
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(talkative, dtype=torch.float32)(ids).logits[0]
    expected = torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    assert np.abs(expected[len(call.input_ids) - 1 :] - call.logprobs).max() < 1e-3
