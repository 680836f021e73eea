"""An HTTP server for the tests of evaluation: it answers as it is told and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HELD_S = 60.0


class Server:
    """Answers the n-th POST with the n-th of `answers`, and each one after these with the last.

    An answer is an object to send as JSON, or a function of the request's handler that does what it likes.
    """

    def __init__(self, url: str):
        self.url = url
        self.answers: list = [{"score": 1}]
        self.found = 200
        """Status of every GET."""
        self.asked: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.release = threading.Event()
        """Set it to let go what `held` holds."""

    def answer(self, handler: Handler) -> None:
        number = len(self.asked)
        self.asked.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        self.headers.append(dict(handler.headers))
        self.paths.append(handler.path)
        answer = self.answers[min(number, len(self.answers) - 1)]
        if callable(answer):
            answer(handler)
        else:
            reply(answer)(handler)

    def held(self, answer: object) -> Callable[[Handler], None]:
        """An answer that is given when the test says so."""

        def wait(handler: Handler) -> None:
            self.release.wait(HELD_S)
            reply(answer)(handler)

        return wait


class Handler(BaseHTTPRequestHandler):
    server: EvaluationServer

    def do_GET(self) -> None:
        reply({}, self.server.told.found)(self)

    def do_POST(self) -> None:
        self.server.told.answer(self)

    def log_message(self, *words: object) -> None:
        pass


class EvaluationServer(ThreadingHTTPServer):
    daemon_threads = True
    told: Server

    def handle_error(self, *who: object) -> None:
        """A client that hung up is no error here."""


@contextmanager
def serving():
    """A server on a free port."""
    with EvaluationServer(("127.0.0.1", 0), Handler) as server:
        server.told = Server(f"http://127.0.0.1:{server.server_port}/score")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server.told
        finally:
            server.told.release.set()
            server.shutdown()


def reply(answer: object, status: int = 200, **headers: str) -> Callable[[Handler], None]:
    """Send an answer: bytes as they are, anything else as JSON."""

    def send(handler: Handler) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return send


def dies(handler: Handler) -> None:
    """Break off in the middle of an answer that would have been a score."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"score": 1}')
    handler.close_connection = True


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True


def endless(handler: Handler) -> None:
    """A body without end."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65_536)
