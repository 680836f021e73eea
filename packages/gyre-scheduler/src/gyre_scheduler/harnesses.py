"""Presets: how each known harness is started without a terminal, and what it needs to talk to an execution's address alone.

Each works on one prompt to its end, with all permissions, without telemetry, updates and a user's settings, and compacts
before the model's window is full. Nothing here confines a harness: `Harness.prefix` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .executions import Harness


@dataclass(frozen=True)
class Model:
    """What a harness is told of the model."""

    name: str = "gyre"
    """One that no harness knows: of names that they know they believe more than they are told."""
    window: int = 131_072
    """Context length in tokens."""
    output: int = 8192
    """Tokens that are reserved for an answer."""


@dataclass(frozen=True)
class KnownHarness:
    """A harness before it is told of a model."""

    program: tuple[str, ...]
    """What starts it, without arguments."""
    arguments: tuple[str, ...]
    env: Callable[[Model], Mapping[str, str]] = field(default=lambda model: {})
    files: Callable[[Model], Mapping[str, str]] = field(default=lambda model: {})

    def harness(self, model: Model, program: Sequence[str] = (), **options: Any) -> Harness:
        """`program`: what starts it here, where that is not its usual name on PATH. `options`: other fields of a harness;
        `env` and `files` are added to the preset's, `command` replaces the preset's."""
        return Harness(
            **{
                "command": (*(program or self.program), *self.arguments),
                **options,
                "env": {**self.env(model), **options.get("env", {})},
                "files": {**self.files(model), **options.get("files", {})},
                "placeholders": {"model": model.name, **options.get("placeholders", {})},
            }
        )


def _claude_code_env(model: Model) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": "{base_url}",
        "ANTHROPIC_AUTH_TOKEN": "{key}",
        "ANTHROPIC_MODEL": "{model}",
        "CLAUDE_CONFIG_DIR": "{home}/.claude",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(model.window),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",  # it refuses to skip permissions as root elsewhere
    }


def _codex_config(model: Model) -> dict[str, str]:
    text = f"""\
model = {json.dumps(model.name)}
model_provider = "gyre"
model_context_window = {model.window}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.gyre]
name = "gyre"
base_url = "{{base_url}}/v1"
env_key = "GYRE_API_KEY"
wire_api = "responses"
"""
    return {".codex/config.toml": text}


def _qwen_code_settings(model: Model) -> dict[str, str]:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
        "security": {"auth": {"selectedType": "openai"}},
        "tools": {"shell": {"enableInteractiveShell": False}},
        "model": {"generationConfig": {"contextWindowSize": model.window, "modalities": {"image": True}}},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def _opencode_config(model: Model, package: str = "@ai-sdk/openai-compatible") -> dict[str, str]:
    """`package`: one of those that it carries with it; it decides which protocol is spoken."""
    described = {
        "name": model.name,
        "attachment": True,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": model.window, "output": model.output},
        "modalities": {"input": ["text", "image"], "output": ["text"]},
    }
    provider = {
        "npm": package,
        "name": "gyre",
        "options": {"baseURL": "{base_url}/v1", "apiKey": "{key}"},
        "models": {model.name: described},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"gyre/{model.name}",
        "provider": {"gyre": provider},
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


def _pi_config(model: Model) -> dict[str, str]:
    described = {
        "id": model.name,
        "name": model.name,
        "reasoning": True,
        "input": ["text", "image"],
        "contextWindow": model.window,
        "maxTokens": model.output,
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    }
    provider = {
        "baseUrl": "{base_url}/v1",
        "api": "openai-completions",
        "apiKey": "{key}",
        "models": [described],
    }
    # What it would reserve and keep by itself is more than a small window has.
    compaction = {
        "enabled": True,
        "reserveTokens": min(16_384, model.window // 6),
        "keepRecentTokens": min(20_000, model.window // 20),
    }
    return {
        ".pi/agent/models.json": json.dumps({"providers": {"gyre": provider}}),
        ".pi/agent/settings.json": json.dumps({"compaction": compaction}),
    }


def opencode(package: str) -> KnownHarness:
    """opencode with one of the packages that it carries: "@ai-sdk/anthropic" speaks Messages, "@ai-sdk/openai" Responses."""
    return KnownHarness(
        ("opencode",),
        ("run", "--format", "json", "--print-logs", "--", "{prompt}"),
        lambda model: dict.fromkeys(
            ("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD"),
            "1",
        ),
        lambda model: _opencode_config(model, package),
    )


HARNESSES: dict[str, KnownHarness] = {
    "claude-code": KnownHarness(
        ("claude",),
        (
            *("--print", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"),
            *("--", "{prompt}"),
        ),
        _claude_code_env,
    ),
    "codex": KnownHarness(
        ("codex",),
        (
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
            *("--", "{prompt}"),
        ),
        lambda model: {"CODEX_HOME": "{home}/.codex"},
        _codex_config,
    ),
    "qwen-code": KnownHarness(
        ("qwen",),
        ("--prompt={prompt}", "--yolo", "--output-format", "stream-json"),
        lambda model: {
            "OPENAI_BASE_URL": "{base_url}/v1",
            "OPENAI_API_KEY": "{key}",
            "OPENAI_MODEL": "{model}",
            "QWEN_TELEMETRY_ENABLED": "false",
        },
        _qwen_code_settings,
    ),
    "opencode": opencode("@ai-sdk/openai-compatible"),
    "pi": KnownHarness(
        ("pi",),
        (
            "--print",
            "--mode",
            "json",
            "--provider",
            "gyre",
            "--model",
            "{model}",
            "\n{prompt}",  # it takes "-" and "@" at the beginning for options and files
        ),
        lambda model: {
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_CODING_AGENT_DIR": "{home}/.pi/agent",
        },
        _pi_config,
    ),
    "mini-swe-agent": KnownHarness(
        ("mini",),
        (
            *("--model", "openai/{model}", "--yolo", "--exit-immediately"),
            *("--output", "{home}/trajectory.json", "--task={prompt}"),
        ),
        lambda model: {
            "OPENAI_API_BASE": "{base_url}/v1",
            "OPENAI_API_KEY": "{key}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}/.config/mini",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
}
