"""Owns the life of the server process: socket, event loop, signals, the ready line, the parent's death."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import orjson
import uvicorn
import uvloop
from gyre_trajtree import RunLogCorrupt, RunLogIndex, RunLogWriter, TrajtreeError

from gyre_proxy.codec import Codec
from gyre_proxy.errors import SettingsError
from gyre_proxy.gateway import Gateway
from gyre_proxy.heads import Heads
from gyre_proxy.server import Application
from gyre_proxy.settings import Settings

_LOG = logging.getLogger("gyre_proxy")

PARENT_GRACE_S = 12.0
"""Seconds to record the calls in flight once the parent is gone; then the process ends whatever its loop does."""

SWITCH_S = 0.0001
"""Longest time that the loop keeps a thread waiting which comes back from encoding; Python's own is 50 times that."""

KEEP_ALIVE_S = 600
"""Harnesses reuse connections after long tool runs; closing early would race with their next request."""


def serve(
    settings: Settings, exit_with_parent: bool = False, ready: Callable[[dict], None] | None = None
) -> None:
    """Run a proxy until SIGINT or SIGTERM (or end of standard input with `exit_with_parent`).

    `ready` is called once with {"url", "mode", "mode_reason", "tool_parser", "notices", "context_length"}; by default
    this is printed as one JSON line. Raises SettingsError, TokenizerError.
    """

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if exit_with_parent:
            _watch_parent(stop, ended)
        await run(settings, ready or _print_ready, stop)

    # Calls are encoded side by side, each in a thread: another pool of threads below costs each a hand-over.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(SWITCH_S)
    ended = threading.Event()
    try:
        uvloop.run(main())
    finally:
        ended.set()


async def run(settings: Settings, ready: Callable[[dict], None], stop: asyncio.Event) -> None:
    """The same inside a running event loop, until `stop` is set."""
    codec = Codec(settings.tokenizer, settings.template_arguments, settings.tool_parser)
    meta = {"writer": "gyre-proxy", "model": settings.model, "tokenizer": codec.digest}
    try:
        log = RunLogWriter(settings.record, meta=meta)
        corrupt: list[RunLogCorrupt] = []
        recorded = RunLogIndex(settings.record, corrupt)
    except TrajtreeError as error:
        raise SettingsError(str(error)) from error
    known = recorded.header.meta.get("tokenizer") if recorded.header else None
    if known not in (None, codec.digest):
        raise SettingsError(
            f"{settings.record} was recorded with another tokenizer; give that one, or a new file to record into"
        )
    for error in corrupt:
        _LOG.warning("%s; its call is left out", error)
    gateway = Gateway(settings, codec, log, recorded, corrupt)
    gateway.start()
    listener = _listen(settings.host, settings.port)
    url = f"http://{_reachable(settings.host)}:{listener.getsockname()[1]}"
    secret = settings.admin_token.encode() if settings.admin_token else secrets.token_bytes(32)
    server = _server(Application(gateway, secret, url), settings.body_timeout_s)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.002)
    facts = {"url": url, "mode": codec.mode, "mode_reason": codec.mode_reason}
    facts |= {"tool_parser": codec.tool_parser, "notices": list(codec.notices)}
    ready({**facts, "context_length": gateway.context_length})
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await gateway.close()
        server.should_exit = True
        await running
    finally:
        listener.close()
        recorded.close()


class _Server(uvicorn.Server):
    """A server that leaves signals alone: calls in flight must be recorded before the process ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(application: Application, head_timeout_s: float) -> uvicorn.Server:
    config = uvicorn.Config(
        application,
        interface="asgi3",
        http=partial(Heads, head_timeout_s=head_timeout_s),
        ws="none",
        proxy_headers=False,
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
    )
    logging.getLogger("uvicorn.error").addFilter(_not_a_reset)
    return _Server(config)


def _not_a_reset(record: logging.LogRecord) -> bool:
    """An unfinished response is how this application resets a connection; it is no news."""
    return "without completing response" not in record.getMessage()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from error
    return listener


def _reachable(host: str) -> str:
    """The host to name in a URL; the address that stands for all addresses is none that a client can use."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def _watch_parent(stop: asyncio.Event, ended: threading.Event) -> None:
    """Stop when standard input ends: whoever started this process holds the other end.

    A loop that is blocked stops nothing, so without `ended` in PARENT_GRACE_S the process is ended from here.
    """
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(stop.set)
        if not ended.wait(PARENT_GRACE_S):
            os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def _print_ready(facts: dict) -> None:
    sys.stdout.write(orjson.dumps(facts).decode() + "\n")
    sys.stdout.flush()
