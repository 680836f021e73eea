#!/usr/bin/env python3
"""A small agent that works through a queue of items with tools, over OpenAI Chat Completions.

It needs Python's standard library, the base URL of a Chat Completions service, a key and a task. The model
sees one item of the queue at a time and acts with tools: `write` a file, `read` a note, give a file to a
sub-agent with `task`. Each action settles its item, well or badly; only a read that found its note leaves one
more action. A context that outgrows its budget is replaced by the model's own summary of it.

Exit status: 0 the queue was worked through or the model stopped, 1 the service gave no answer, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import time
from urllib.parse import urlsplit

DEFAULT_BUDGET = 4000
SUMMARY_LIMIT = 400
CALL_TIMEOUT_S = 300.0
ATTEMPTS = 7
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}

TOOLS = {
    "write": (("path", "content"), "Write one file."),
    "read": (("key",), "Read the note that is kept under a key."),
    "task": (("path", "content"), "Give one file to a sub-agent, which writes it."),
}
MAIN = ("build every file", ("write", "read", "task"))
SUB_AGENT = ("write one file", ("write",))
NOTHING_LEFT = "empty"


class ServiceError(Exception):
    """The model service refused a request, or did not answer in any of the attempts."""


class TaskError(Exception):
    """The task, or the address of the service, cannot be read."""


class Client:
    """One kept-alive connection to a Chat Completions service."""

    def __init__(self, base_url: str, key: str, model: str):
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise TaskError(f"the base URL {base_url!r} is not an http address")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(url.hostname, url.port, timeout=CALL_TIMEOUT_S)
        path = url.path.rstrip("/")
        self.path = (path if path.endswith("/v1") else path + "/v1") + "/chat/completions"
        self.headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self.model = model

    def chat(self, messages: list, tools: list) -> tuple[dict, bool, int]:
        """Ask for the next message: (message, whether it was cut off, tokens of the context so far)."""
        answer = self._post(json.dumps({"model": self.model, "messages": messages, "tools": tools}))
        try:
            choice = answer["choices"][0]
            used = int((answer.get("usage") or {}).get("total_tokens") or 0)
            return choice["message"], choice.get("finish_reason") == "length", used
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServiceError(f"not a chat completion: {json.dumps(answer)[:200]}") from None

    def _post(self, body: str) -> dict:
        fault = ""
        for attempt in range(ATTEMPTS):
            wait = None
            try:
                self.connection.request("POST", self.path, body, self.headers)
                response = self.connection.getresponse()
                content = response.read()
                if response.status == 200:
                    return json.loads(content)
                fault = f"{response.status} {content[:200].decode(errors='replace')}"
                if response.status not in TRANSIENT:
                    break
                wait = response.getheader("Retry-After")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.connection.close()
                fault = f"{type(error).__name__}: {error}"
            if attempt + 1 < ATTEMPTS:
                time.sleep(back_off(attempt, wait))
        raise ServiceError(f"no answer from the model service: {fault}")


def back_off(attempt: int, retry_after: str | None) -> float:
    """Seconds before the next attempt: what the service asked for, else doubling from 0.2 s with jitter."""
    if retry_after and retry_after.isdigit():
        return min(int(retry_after), 30)
    return min(0.2 * 2**attempt, 10) * random.uniform(0.75, 1.25)


class Workspace:
    """The files that tools may touch: everything below one folder, notes in its folder `notes`."""

    def __init__(self, folder: str):
        self.folder = os.path.realpath(folder)
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise TaskError(f"cannot make the workspace {folder}: {error}") from None

    def locate(self, path: str) -> str | None:
        """The one relative name of `path`, or None where it would leave the workspace."""
        if not path or "\0" in path or os.path.isabs(path):
            return None
        target = os.path.realpath(os.path.join(self.folder, path))
        return os.path.relpath(target, self.folder) if target.startswith(self.folder + os.sep) else None

    def write(self, path: str, content: str) -> bool:
        name = self.locate(path)
        if name is None:
            return False
        target = os.path.join(self.folder, name)
        try:
            if os.sep in name:
                os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w", encoding="utf-8", errors="replace") as file:
                file.write(content)
        except OSError:
            return False
        return True

    def note(self, key: str) -> str | None:
        name = self.locate(os.path.join("notes", key))
        if name is None or os.path.dirname(name) != "notes":
            return None
        try:
            with open(os.path.join(self.folder, name), encoding="utf-8", errors="replace") as file:
                return file.read(SUMMARY_LIMIT).strip()
        except OSError:
            return None


class Queue:
    """Pending items, the first of which is shown."""

    def __init__(self, items: list[str]):
        self.items = list(items)

    @property
    def shown(self) -> str:
        return self.items[0] if self.items else NOTHING_LEFT

    def settle(self) -> None:
        del self.items[:1]

    def put(self, item: str) -> None:
        self.items[:1] = [item]


class Agent:
    """One role (system prompt and tools) working on one queue, in one context at a time."""

    def __init__(self, client: Client, workspace: Workspace, role: tuple, items: list[str], budget: int):
        self.client, self.workspace, self.budget = client, workspace, budget
        self.system, self.allowed = role
        self.tools = [tool_schema(name) for name in self.allowed]
        self.queue = Queue(items)
        self.turns = 2 * len(items)
        delegated = (item[5:].partition("=")[0] for item in items if item.startswith("task "))
        self.delegated = {workspace.locate(path) for path in delegated}

    def run(self) -> None:
        """Work until the queue is empty, the model stops calling tools, or every item had its two turns."""
        messages = self.opening(self.queue.shown)
        for _ in range(self.turns):
            reply, cut, used = self.client.chat(messages, self.tools)
            calls = reply.get("tool_calls") or []
            if cut or (not calls and looks_like_a_call(reply)):
                self.take_back(messages)
            elif not calls:
                return
            else:
                messages.append({"role": "assistant", "content": reply.get("content"), "tool_calls": calls})
                messages += [self.answer(call) for call in calls]
            if not self.queue.items:
                return
            if used > self.budget:
                messages = self.compact(messages)

    def opening(self, text: str) -> list:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": text}]

    def take_back(self, messages: list) -> None:
        """Forget a reply that cannot be used and settle its item: the last message now shows the next."""
        self.queue.settle()
        last = messages[-1]
        result, line_break, _ = last["content"].rpartition("\n")
        messages[-1] = {**last, "content": result + line_break + self.queue.shown}

    def compact(self, messages: list) -> list:
        """Start a new context that holds nothing but the model's summary of the old one."""
        reply, _, _ = self.client.chat([*messages, {"role": "user", "content": "summary"}], self.tools)
        return self.opening((reply.get("content") or "").strip()[:SUMMARY_LIMIT] or NOTHING_LEFT)

    def answer(self, call: dict) -> dict:
        """Carry out one tool call; the result's second line shows the item that is now first."""
        name, arguments = decode(call, self.allowed)
        word = self.act(name, arguments)
        print(f"{name or 'unusable call'} {next(iter(arguments.values()), '')}: {word}", flush=True)
        return {"role": "tool", "tool_call_id": call.get("id"), "content": f"{word}\n{self.queue.shown}"}

    def act(self, name: str | None, arguments: dict) -> str:
        note = self.workspace.note(arguments["key"]) if name == "read" else None
        if note:
            self.queue.put(note)
            return "ok"
        self.queue.settle()
        if name == "read":
            return "none"
        if name == "task":
            item = f"write {arguments['path']}={arguments['content']}"
            Agent(self.client, self.workspace, SUB_AGENT, [item], self.budget).run()
            return "ok"
        if name == "write":
            path = arguments["path"]
            allowed = self.workspace.locate(path) not in self.delegated
            return "ok" if allowed and self.workspace.write(path, arguments["content"]) else "denied"
        return "error"


def tool_schema(name: str) -> dict:
    parameters, description = TOOLS[name]
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"} for parameter in parameters},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def decode(call: dict, allowed: tuple) -> tuple[str | None, dict]:
    """Name and arguments of a tool call; (None, {}) where they are not what was offered."""
    try:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError):
        return None, {}
    if name not in allowed or not isinstance(arguments, dict):
        return None, {}
    complete = set(arguments) == set(TOOLS[name][0])
    return (name, arguments) if complete and all(map(is_text, arguments.values())) else (None, {})


def is_text(value: object) -> bool:
    return isinstance(value, str)


def looks_like_a_call(reply: dict) -> bool:
    text = (reply.get("content") or "").strip()
    return text.startswith("{") or "tool_call>" in text


def load_task(path: str) -> dict:
    """A task file: JSON {"prompt", "context_budget"?}, or plain text, which is the prompt."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read the task file {path}: {error}") from None
    try:
        task = json.loads(text)
    except ValueError:
        task = {"prompt": text}
    if not isinstance(task, dict) or not isinstance(task.get("prompt"), str):
        raise TaskError(f"the task file {path} has no prompt")
    return task


def work(client: Client, workspace: Workspace, task: dict) -> None:
    """Work through the task's prompt, one item a line."""
    items = [line.strip() for line in task["prompt"].splitlines() if line.strip()]
    Agent(client, workspace, MAIN, items, task.get("context_budget", DEFAULT_BUDGET)).run()


def main() -> int:
    parser = argparse.ArgumentParser(description="Work through a queue of items with a chat model and tools.")
    parser.add_argument("--base-url", default=os.environ.get("GYRE_BASE_URL"), help="or $GYRE_BASE_URL")
    parser.add_argument("--api-key-env", default="GYRE_API_KEY", help="variable that holds the key")
    parser.add_argument("--model", default="default")
    parser.add_argument("--task-file", default=os.environ.get("GYRE_TASK_FILE"), help="or $GYRE_TASK_FILE")
    parser.add_argument("--workspace", default=".", help="default: the current folder")
    options = parser.parse_args()
    if not options.base_url or not options.task_file:
        parser.error("give --base-url and --task-file")
    try:
        client = Client(options.base_url, os.environ.get(options.api_key_env, ""), options.model)
        work(client, Workspace(options.workspace), load_task(options.task_file))
    except TaskError as error:
        print(f"harness: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:
        print(f"harness: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
