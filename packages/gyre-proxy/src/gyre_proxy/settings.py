"""Owns the proxy's settings: values, defaults, and their checks at start-up."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre_proxy.errors import SettingsError
from gyre_proxy.parsers import TOOL_PARSERS


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
    tool_parser: str = "hermes"
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """Extra variables of the chat template, such as enable_thinking."""
    call_deadline_s: float = 1800.0
    """Longest time a call may take, waits for engines and reroutes included."""
    keepalive_s: float = 10.0
    """Silence after which a streaming client gets a sign of life."""

    def __post_init__(self) -> None:
        if self.tool_parser not in TOOL_PARSERS:
            known = ", ".join(TOOL_PARSERS)
            raise SettingsError(f"unknown tool parser {self.tool_parser!r}; choose one of: {known}")
        if self.strict and not self.admin_token:
            raise SettingsError("strict mode needs an admin token to issue keys; set one")
        for url in self.engines:
            if not url.startswith(("http://", "https://")):
                raise SettingsError(f"engine {url!r} must be a URL such as http://127.0.0.1:30000")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise SettingsError("temperature must be >= 0 and top_p in (0, 1]")
        if self.call_deadline_s <= 0 or self.keepalive_s <= 0:
            raise SettingsError("call_deadline_s and keepalive_s must be positive")

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
