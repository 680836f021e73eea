"""The server as a process: what it prints, how it ends, and that no client can hurt it."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gyre_trainer.engine_server import main

WAIT_S = 30


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


def post(client: httpx.Client, path: str, **body) -> httpx.Response:
    return client.post(path, json=body)


def test_it_ends_when_standard_input_ends(models, start_server):
    server = start_server(models["1"])
    server.process.stdin.close()
    assert server.process.wait(WAIT_S) == 0


def test_sigterm_answers_what_is_running_with_its_partial_output(models, start_server):
    server = start_server(models["1"])
    body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    with (
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
        client.stream("POST", "/generate", json=body) as stream,
    ):
        lines = stream.iter_lines()
        data = [next(lines)]
        assert post(client, "/pause_generation", mode="in_place").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        data += [line for line in lines if line.startswith("data: {")]
    final = json.loads(data[-1][6:])
    assert final["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(final["output_ids"]) < 4000
    assert server.process.wait(WAIT_S) == -signal.SIGTERM


@pytest.mark.parametrize("name", ["nowhere", "llama"])
def test_a_model_it_cannot_serve_is_one_line_and_exit_1(tmp_path, capsys, name):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    assert main(["--model", str(tmp_path / name)]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: ") and error.count("\n") == 1


def test_a_taken_port_is_one_line_and_exit_1(models, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--model", str(models["1"]), "--port", str(taken.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot listen on 127.0.0.1:") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--threads", "0"), "threads"),
        (("--device", "foo"), "device 'foo'"),
        (("--device", "meta"), "device 'meta'"),
        (("--max-running", "-1"), "max_running"),
        (("--max-running", "100000000"), "max_running"),
        (("--port", "99999"), "port"),
        (("--port", "-1"), "port"),
        (("--seed", "-1"), "seed"),
        (("--host", "x" * 70), "host"),
        (("--context-length", "1"), "context_length"),
        (("--context-length", "4097"), "context length"),
    ],
)
def test_an_option_it_cannot_have_is_one_line_and_exit_2(models, capsys, options, says):
    assert main(["--model", str(models["1"]), *options]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"error: {says}") and error.count("\n") == 1


def test_it_imports_neither_transformers_nor_megatron():
    code = "import sys, gyre_trainer.engine_server; print({'transformers', 'megatron'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert ended.stdout == "set()\n"


def test_spans_and_logprobs_over_an_update_in_the_middle_of_a_request(client, models, references):
    prompt = [5, 6, 7, 8]
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = {"input_ids": prompt, "rid": "long", "return_logprob": True, "sampling_params": sampling}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/generate", json=body)
        until(client, lambda state: state["running"] == 1)
        assert post(client, "/pause_generation", mode="retract").status_code == 200
        update(client, models["2"], "2")
        assert client.get("/get_model_info").json()["weight_version"] == "2"
        assert post(client, "/continue_generation").status_code == 200
        until(client, lambda state: state["running"] == 1)
        assert post(client, "/abort_request", rid="long").status_code == 200
        final = answer.result(WAIT_S).json()
    update(client, models["1"], "1")
    meta, ids = final["meta_info"], final["output_ids"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    for span, (start, end) in zip(meta["weight_versions"], spans(meta), strict=True):
        truth = (
            references[span["version"]].logprobs(prompt + ids[:start], ids[start:end]) if end > start else []
        )
        assert logprobs[start:end] == pytest.approx(truth, abs=2e-5)
    assert [span["version"] for span in meta["weight_versions"]][:1] == ["1"]
    assert spans(meta)[0][1] > 0 and spans(meta)[-1][1] == len(ids) < 4000


def update(client: httpx.Client, model: Path, version: str) -> None:
    body = {"model_path": str(model), "weight_version": version, "flush_cache": True}
    assert client.post("/update_weights_from_disk", json=body).json()["success"]


def spans(meta: dict) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in meta["weight_versions"]]


@pytest.mark.parametrize("stream", [False, True])
def test_released_memory_sends_requests_elsewhere_until_resumed(client, stream):
    released = post(client, "/release_memory_occupation")
    assert (released.status_code, released.json()) == (200, None)
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    refused = post(client, "/generate", input_ids=[5], stream=stream)
    assert refused.status_code == 503 and "released" in refused.json()["error"]["message"]
    assert post(client, "/resume_memory_occupation").status_code == 200
    assert post(client, "/generate", input_ids=[5], sampling_params={"max_new_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_aborts_its_request(server, client, stream):
    host, port = server.url.removeprefix("http://").split(":")
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = json.dumps({"input_ids": [5, 6], "stream": stream, "sampling_params": sampling}).encode()
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(client, lambda state: state["running"] == 1)
    until(client, lambda state: state["running"] == 0)


def test_a_request_held_by_a_pause_is_dropped_with_its_client_and_sent_elsewhere_by_a_release(client):
    assert post(client, "/pause_generation", mode="retract").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json={"input_ids": [5], "rid": "held"}, timeout=0.3)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(client.post, "/generate", json={"input_ids": [5], "rid": "other"})
        assert post(client, "/release_memory_occupation").status_code == 200
        answer = held.result(WAIT_S)
    assert answer.status_code == 503 and "released" in answer.json()["error"]["message"]
    assert post(client, "/resume_memory_occupation").status_code == 200
    assert post(client, "/continue_generation").status_code == 200
    assert (
        post(
            client, "/generate", input_ids=[5], rid="held", sampling_params={"max_new_tokens": 1}
        ).status_code
        == 200
    )


def until(client: httpx.Client, reached) -> None:
    """Ask for the server's state until `reached`, at most 2,000 times."""
    states = (client.get("/server_info").json()["internal_states"][0] for _ in range(2000))
    assert any(reached(state) for state in states)


NONSENSE = [
    *(b"", b"{bad", b"[1]", b'"x"', b"null", b"\xff\xfe"),
    *(b'{"input_ids": [1e400]}', b'{"input_ids": {}}'),
]


@pytest.mark.parametrize("raw", NONSENSE)
def test_nonsense_is_a_400_and_the_server_lives(client, raw):
    answer = client.post("/generate", content=raw)
    assert answer.status_code == 400 and answer.json()["message"]
    assert client.get("/health").status_code == 200


def test_unknown_paths_and_methods(client):
    assert client.get("/nowhere").status_code == 404
    assert client.get("/generate").status_code == 405
    assert client.post("/get_model_info").status_code == 405


def test_a_wrong_update_is_a_400_and_changes_nothing(client, tmp_path):
    before = client.get("/get_model_info").json()
    answer = post(client, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="9")
    assert answer.status_code == 400
    assert answer.json()["success"] is False and "config.json" in answer.json()["message"]
    assert post(client, "/update_weights_from_disk").status_code == 400
    assert post(client, "/pause_generation", mode="gently").status_code == 400
    assert post(client, "/weights_checker", action="snapshot").status_code == 400
    assert client.get("/get_model_info").json() == before


def test_the_standard_library_is_client_enough(server):
    body = json.dumps({"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}})
    request = urllib.request.Request(server.url + "/generate", body.encode())
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert len(json.load(answer)["output_ids"]) == 3
