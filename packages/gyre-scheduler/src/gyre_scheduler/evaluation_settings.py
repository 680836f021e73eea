"""What names an evaluator: "module:function", a command, the URL of a service, or a model as judge.

No client and no process here, so that a configuration is read without them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

OWNED = ("model", "messages", "tools", "tool_choice", "stream", "n")
"""Members of a judge's request that are not options."""


def is_url(spec: str) -> bool:
    return spec.lower().startswith(("http://", "https://"))


def checked_url(url: str) -> str:
    """The URL; ValueError with one line if no service can be there."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("a URL with a user or password would be written to logs; leave them out")
    try:
        parts = urlsplit(url)
        usable = is_url(url) and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not url.isascii() or any(character.isspace() for character in url):
        raise ValueError(f"{url!r} is not a URL of the form http://host:port/path")
    return url


def _options(options: dict[str, Any]) -> dict[str, Any]:
    if taken := [name for name in OWNED if name in options]:
        raise ValueError(f"{', '.join(taken)} cannot be given as an option of the judge")
    json.dumps(options, allow_nan=False)
    return options


class JudgeSettings(BaseModel):
    """A model as judge, behind any endpoint that speaks OpenAI's Chat Completions with tools."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: Annotated[str, AfterValidator(checked_url)]
    """Base URL, as clients of OpenAI take it: "https://host/v1"."""
    model: str = Field(min_length=1)
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key; None for an endpoint without keys."""
    rubric: str | None = None
    """What earns how much, as text. A task's own `rubric` takes its place."""
    turns: int = Field(default=20, ge=1, le=1000)
    """Model calls of one attempt."""
    options: Annotated[dict[str, Any], AfterValidator(_options)] = {}
    """Further members of every request, `temperature` or `reasoning_effort` for example."""


EvaluatorSpec = str | Sequence[str] | JudgeSettings
