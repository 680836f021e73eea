"""Replays recorded requests of real harnesses as call records, through the proxy's own parsing and matching.

A trace line is a request or a response: {scenario, n, kind, path, headers, body} and {n, class, fault, sent}.
Long texts in a trace are placeholders that keep equality only. Tokens are made of words, so equal texts have
equal tokens.
"""

import copy
import gzip
import json
import re
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
from gyre_proxy import dialects
from gyre_proxy.conversation import Message, ToolCall
from gyre_proxy.evidence import evidence, hints
from gyre_proxy.sessions import Node, Session
from gyre_trajtree import Call

TRACES = Path(__file__).parent / "traces"
_REMINDER = re.compile(r"system-reminder:(text-[0-9a-f]+-\d+)")


def scenarios():
    """{scenario: [(n, request, response)]} of all harnesses, in the order in which requests were sent."""
    found = defaultdict(dict)
    for file in sorted(TRACES.glob("*.jsonl.gz")):
        for line in gzip.decompress(file.read_bytes()).splitlines():
            step = json.loads(_REMINDER.sub(r"<system-reminder>\1</system-reminder>", line.decode()))
            found[step["scenario"]].setdefault(step["n"], {})[step["kind"]] = step
    return {
        name: [(n, pair["request"], pair.get("response", {})) for n, pair in sorted(steps.items())]
        for name, steps in found.items()
    }


class Replay:
    """Calls of one execution, as the proxy would record them. Call ids are the numbers of the requests."""

    def __init__(self):
        self.calls = []
        self._session = Session("x")

    def play(self, steps, prefix="", with_hints=True, change=lambda body: body):
        """Record the model calls of a scenario; `prefix` keeps ids of several scenarios apart."""
        for n, request, response in steps:
            dialect = next(
                (dialects.BY_PATH[p] for p in dialects.BY_PATH if f"/v1/{p}" in (request["path"] or "")), None
            )
            if dialect is None:
                continue  # a probe without a model call
            body = change(_accepted(copy.deepcopy(request["body"])))
            headers = {k.lower().encode(): v.encode("latin-1", "replace") for k, v in request["headers"]}
            self._call(f"{prefix}{n}", dialect, body, hints(headers) if with_hints else {}, response)
        return self.calls

    def _call(self, name, dialect, body, given, response):
        request = dialect.parse(body)
        match = self._session.match(request.conversation)
        parent, known = match.node, match.known
        new = _ids(*(_words(message) for message in match.messages[known:]))
        if parent is None:
            new = np.concatenate((_ids(json.dumps(request.conversation.tools)), new))
        answer = _answer(response.get("sent") or [], dialect.TOOL_ID_PREFIX)
        fault = response.get("fault")
        refused = bool(fault) and fault["f"] in ("http", "toolong")
        output = np.empty(0, np.int32) if refused else _ids(_words(answer), "<end>")
        echoes = self._session.echoes(match.messages[known:])
        self.calls.append(
            Call(
                id=name,
                execution="x",
                parent=parent.id if parent else None,
                input_ids=new,
                output_ids=output,
                logprobs=np.full(len(output), -0.5, np.float32),
                versions=[[0, 0, len(output)]],
                finish="error" if refused else "abort" if fault else "stop",
                hints=given,
                evidence=evidence(
                    match,
                    parent.id if parent else None,
                    echoes,
                    answer.text,
                    answer.tool_calls,
                    given.get("kind"),
                ),
                attempt_of=self._session.failed_attempt(match.digest),
            )
        )
        node = None
        if not fault:
            length = len(new) + len(output) + (parent.length if parent else 0)
            ids = tuple(call.id for call in answer.tool_calls)
            node = Node(name, parent, np.concatenate((new, output)), b"", length, ids, answer.reasoning)
        context = self._session.context(match, answer)
        self._session.remember(name, match.digest, context, node, answer.tool_calls, failed=bool(fault))


def _answer(sent, prefix):
    def joined(kind):
        return "".join(part["t"] for part in sent if part["k"] == kind)

    prefix += "01" if prefix == "toolu_" else ""
    calls = tuple(
        ToolCall(prefix + part["id"], part["name"], part["raw"]) for part in sent if part["k"] == "tool"
    )
    return Message("assistant", joined("text"), joined("think"), calls)


def _words(message):
    calls = "".join(f" <call> {call.name} {call.arguments}" for call in message.tool_calls)
    return f"<{message.role}> {message.reasoning} {message.text}{calls}"


def _ids(*texts):
    return np.array([zlib.crc32(word.encode()) >> 1 for text in texts for word in text.split()], np.int32)


def _type(value):
    return value.get("type") if isinstance(value, dict) else None


def _accepted(value):
    """The proxy takes no images and no tools inside the input: their place is kept, what they are is not."""
    if isinstance(value, dict):
        if value.get("type") in ("image", "image_url", "input_image"):
            kind = "input_text" if value["type"] == "input_image" else "text"
            return {"type": kind, "text": "an image"}
        return {key: _accepted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_accepted(inner) for inner in value if _type(inner) != "additional_tools"]
    return value
