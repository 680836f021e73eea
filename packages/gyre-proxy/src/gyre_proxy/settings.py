"""Owns the proxy's settings: values, defaults, and their checks at start-up."""

import ipaddress
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre_proxy.connections import check_origin
from gyre_proxy.errors import SettingsError
from gyre_proxy.parsers import TOOL_PARSERS

FLUSHES = ("process", "disk")
IMAGES = ("text", "refuse")

LARGEST = 2**31 - 1

_POSITIVE = (
    "call_deadline_s",
    "keepalive_s",
    "context_length",
    "max_new_tokens",
    "engine_capacity",
    "engine_wait_s",
    "silence_s",
    "max_calls",
    "max_executions",
    "body_timeout_s",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How one proxy runs. Raises SettingsError for values that cannot work."""

    tokenizer: Path
    """Hugging Face tokenizer directory (tokenizer.json, chat template, config.json)."""
    record: Path
    """run.jsonl, created or appended to."""
    engines: tuple[str, ...] = ()
    """Base URLs of engines; more can come through the admin API."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs `strict`."""
    port: int = 0
    """0 takes a free port."""
    admin_token: str | None = None
    """Opens the admin API; also signs the executions' keys, so they outlive a restart."""
    strict: bool = False
    """Serve only keys issued through the admin API."""
    model: str = "gyre"
    """Name under which /v1/models lists the model."""
    context_length: int | None = None
    """Tokens; None takes the tokenizer directory's."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int | None = None
    """Limit of an answer when the client names none; None is what the context leaves."""
    tool_parser: str = "auto"
    """How tool calls are read; "auto" takes what reads the chat template's own."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """Extra variables of the chat template, such as enable_thinking."""
    call_deadline_s: float = 1800.0
    """Longest time a call may take, waits for engines and reroutes included."""
    keepalive_s: float = 10.0
    """Silence after which a streaming client gets a sign of life."""
    flush: str = "process"
    """What an answered call survives: the death of every process, or with "disk" loss of power too."""
    engine_capacity: int | None = None
    """Calls that an engine named here may hold at a time; None for no limit."""
    engine_wait_s: float = 300.0
    """Longest time a call waits for an engine that takes it."""
    silence_s: float = 15.0
    """Silence of an engine after which it is asked for a sign of life."""
    max_calls: int = 4096
    """Calls under way, waiting ones included; more are refused with a retryable error."""
    max_executions: int = 100_000
    """Open executions."""
    body_timeout_s: float = 60.0
    """Longest time for the head of a request and for its body to arrive, and for a client to take a piece of its answer."""
    images: str = "text"
    """What becomes of images: a line of text in the place of each, or with "refuse" a 400."""
    grace_s: float = 0.0
    """Time that calls under way get to end when the proxy stops; then they are aborted and recorded as such."""

    def __post_init__(self) -> None:
        for name in ("tokenizer", "record"):
            object.__setattr__(self, name, Path(getattr(self, name)))
        if self.tool_parser not in ("auto", *TOOL_PARSERS):
            known = ", ".join(("auto", *TOOL_PARSERS))
            raise SettingsError(f"unknown tool parser {self.tool_parser!r}; choose one of: {known}")
        if self.strict and not self.admin_token:
            raise SettingsError(
                "strict mode needs an admin token to issue keys; give --admin-token-stdin or --admin-token-env"
            )
        if not self.engines and not self.admin_token:
            raise SettingsError(
                "no engine: name one with --engine, or open the admin API, through which they can come"
            )
        if not self.strict and not _loopback(self.host):
            raise SettingsError(
                f"{self.host} can be reached by others, and without strict mode every execution is open to them: "
                "add --strict, or listen on 127.0.0.1"
            )
        for url in self.engines:
            try:
                check_origin(url)
            except ValueError as error:
                raise SettingsError(str(error)) from error
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port must be from 0 (any free one) to 65535, not {self.port}")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise SettingsError("temperature must be a number >= 0 and top_p in (0, 1]")
        if self.context_length == 1:
            raise SettingsError("context_length must leave room for a prompt and an answer")
        if self.admin_token is not None and not re.fullmatch(r"[!-~]+", self.admin_token):
            raise SettingsError("the admin token must be of visible ASCII characters, without blanks")
        if self.record.exists() and not self.record.is_file():
            raise SettingsError(f"{self.record} is no regular file; give the path of a run log")
        if self.top_k != -1 and not 1 <= self.top_k <= LARGEST:
            raise SettingsError("top_k must be at least 1, or -1 for no limit")
        if self.flush not in FLUSHES:
            raise SettingsError(f"flush must be one of {', '.join(FLUSHES)}, not {self.flush!r}")
        if self.images not in IMAGES:
            raise SettingsError(f"images must be one of {', '.join(IMAGES)}, not {self.images!r}")
        if not 0 <= self.grace_s < math.inf:
            raise SettingsError(f"grace_s must be a number >= 0, not {self.grace_s}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST:
                raise SettingsError(f"{name} must be a positive number, not {value}")

    def sampling(self) -> dict:
        """The sampling parameters of every call, as SGLang names them."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


def token_from_environment(name: str | None) -> str | None:
    """The admin token of environment variable `name`. Raises SettingsError when it is empty."""
    if name is None:
        return None
    token = os.environ.get(name)
    if not token:
        raise SettingsError(f"environment variable {name} is empty; put the admin token there")
    return token


def token_from_input() -> str:
    """The admin token from the first line of standard input; the rest is left to the parent watch.

    No other process of the same user can read it, as it could an environment. Raises SettingsError when the line is
    empty.
    """
    token = sys.stdin.buffer.readline().decode(errors="replace").strip()
    if not token:
        raise SettingsError("the first line of standard input is empty; write the admin token there")
    return token


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
