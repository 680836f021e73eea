"""The harness as the process that a run starts, against a real HTTP server."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from gyre_cli.quickstart import harness_path


class Service(ThreadingHTTPServer):
    """A model service: `answers` holds (status, body) in turn; requests and connections are kept."""

    daemon_threads = True

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.requests, self.connections = iter(answers), [], set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        self.server.connections.add(self.client_address)
        status, answer = next(self.server.answers)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve():
    services = []

    def start(answers):
        service = Service(answers)
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}).start()
        services.append(service)
        return service

    yield start
    for service in services:
        service.shutdown()
        service.server_close()


def completion(message, finish="stop"):
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": {"total_tokens": 40}}


def run(*options, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-I", "-S", str(harness_path()), *options],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_task_is_worked_through_over_one_connection(serve, tmp_path, tool_call):
    service = serve(
        [
            (200, completion(tool_call("write", path="api", content="teal"), "tool_calls")),
            (200, completion(tool_call("write", path="cli", content="gold"), "tool_calls")),
        ]
    )
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"prompt": "write api=teal\nwrite cli=gold"}))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    done = run(
        *("--base-url", f"{service.url}/x/g1-0", "--task-file", str(task), "--workspace", str(workspace)),
        cwd=tmp_path,
        GYRE_API_KEY="secret",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "write api: ok\nwrite cli: ok\n"
    assert (workspace / "cli").read_text() == "gold"
    assert {(path, key) for path, key, _ in service.requests} == {
        ("/x/g1-0/v1/chat/completions", "Bearer secret")
    }
    assert len(service.connections) == 1


def test_everything_can_come_from_the_environment(serve, tmp_path, text):
    service = serve([(200, completion(text("done")))])
    (tmp_path / "task.txt").write_text("write api=teal\n")
    environment = {"GYRE_BASE_URL": f"{service.url}/x/g1-0/v1", "GYRE_TASK_FILE": "task.txt"}
    done = run(cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert service.requests[0][0] == "/x/g1-0/v1/chat/completions"


def test_transient_failures_are_retried(serve, tmp_path, text):
    service = serve([(429, {}), (503, {}), (200, completion(text("done")))])
    (tmp_path / "task.txt").write_text("write api=teal")
    done = run("--base-url", service.url, "--task-file", "task.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(service.requests) == 3


@pytest.mark.parametrize("answer", [(410, {"error": {"message": "closed"}}), (200, {"no": "choices"})])
def test_a_refusal_ends_the_run_with_one_line(serve, tmp_path, answer):
    service = serve([answer])
    (tmp_path / "task.txt").write_text("write api=teal")
    done = run("--base-url", service.url, "--task-file", "task.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("harness: ") and done.stderr.count("\n") == 1


def test_a_service_that_stays_away_is_given_up(harness, monkeypatch):
    waits = []
    monkeypatch.setattr(harness.time, "sleep", waits.append)
    client = harness.Client("http://127.0.0.1:1", "", "default")
    with pytest.raises(harness.ServiceError, match="no answer"):
        client.chat([], [])
    assert len(waits) == harness.ATTEMPTS - 1
    assert waits == sorted(waits) and sum(waits) < 30


@pytest.mark.parametrize("options", [(), ("--base-url", "ftp://x", "--task-file", "."), ("--base-url", "x")])
def test_wrong_usage_has_its_own_exit_status(tmp_path, options):
    done = run(*options, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
