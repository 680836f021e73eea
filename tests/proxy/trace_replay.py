"""Replays recorded requests of real harnesses over HTTP, through a real proxy in front of a scripted engine.

A trace line is a request or a response: {scenario, n, kind, path, headers, body} and {n, class, fault, sent, body}; `class`
names the agent. What the recorded model said is what the scripted engine samples, in Hermes syntax. Ids that the
recorded API gave out are replaced in later requests by those that the proxy gave out in their place.
"""

import gzip
import http.client
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from gyre_proxy.codec import Codec
from gyre_trajtree import Call, RunLogTail
from proxy_stage import DEADLINE_S, FakeEngine, Proxy, wait_until

TRACES = Path(__file__).parents[1] / "trajtree" / "traces"
CONTEXT = 32768
"""Tokens; every recorded prompt is far shorter in the vocabulary of these tests."""
OVERLONG = "long " * 100_000
"""More than fits, whatever its tokens are."""
CUT = ("drop", "trunc", "evterr")
"""Ways in which an answer ended early. A proxy knows one: the connection is reset."""
_ANSWERED = ("reasoning", "function_call", "custom_tool_call")
"""Items of Responses that are parts of an answer and name no role."""
_OWN_HEADERS = ("authorization", "connection", "content-length", "host", "accept-encoding")


def scenarios() -> dict[str, list[tuple[int, dict, dict]]]:
    """{scenario: [(n, request, response)]} of all harnesses, in the order in which requests were sent; model calls only."""
    found: dict[str, dict] = defaultdict(dict)
    for file in sorted(TRACES.glob("*.jsonl.gz")):
        for line in gzip.decompress(file.read_bytes()).splitlines():
            step = json.loads(line)
            found[step["scenario"]].setdefault(step["n"], {})[step["kind"]] = step
    return {
        name: [
            (n, pair["request"], pair.get("response", {}))
            for n, pair in sorted(steps.items())
            if pair["request"]["method"] == "POST"
        ]
        for name, steps in found.items()
    }


class TraceEngine(FakeEngine):
    """Says one text after another; with `dies` it breaks off where the text ends, also when asked to go on."""

    dies = False

    def _plan(self, given: dict) -> tuple[list[int], str]:
        self._cache.clear()  # nobody asks what it holds, and a thousand long prompts are slow to compare
        tokens, finish = super()._plan(given)
        self.die_after = len(tokens) if self.dies else None
        return tokens, finish


@dataclass
class Step:
    """One request of a replay and what became of it."""

    n: int
    agent: str
    recorded: dict
    """Its body as it was recorded."""
    body: dict
    """Its body as it was posted."""
    fault: str | None
    text: str | None
    """What the engine was to say; None where the request never reached it."""
    cut_short: bool
    """Whether the answer ended at its limit of tokens."""
    call: Call | None = None
    prompt: list[int] | None = None
    """The engine's input ids; None where the engine got nothing."""


@dataclass
class Replay:
    """One scenario as one execution."""

    proxy: Proxy
    engine: TraceEngine
    codec: Codec
    log: RunLogTail
    client: httpx.Client
    execution: str
    change: Callable[[int, str, dict], dict]
    """(n, path, body) -> body: what a harness might do to its request."""
    steps: list[Step] = field(default_factory=list)
    ids: dict[str, list[str]] = field(default_factory=dict)
    """Id of the recorded API -> ids that the proxy gave out in its place."""

    def play(self, recorded: list[tuple[int, dict, dict]]) -> list[Step]:
        for position, (n, request, response) in enumerate(recorded):
            fault = (response.get("fault") or {}).get("f") if response else "left"
            cut = fault in CUT or fault == "left"
            said = (
                next(r["sent"] for _, _, r in recorded[position + 1 :] if r.get("sent"))
                if cut
                else response["sent"]
            )
            self._step(n, request, response, fault, said)
        return self.steps

    def _step(self, n: int, request: dict, response: dict, fault: str | None, said: list | None) -> None:
        body = renamed(request["body"], self.ids)
        body = self.change(n, request["path"], body)
        text = spoken(said, whole=fault not in CUT) if said is not None else None
        step = Step(
            n, response.get("class", "main"), request["body"], body, fault, text, _cut_short(response)
        )
        self.steps.append(step)
        headers = {k: v for k, v in request["headers"] if k.lower() not in _OWN_HEADERS}
        path = f"/x/{self.execution}{request['path']}"
        before = len(self.engine.requests)
        if fault == "toolong":
            return self._too_long(path, headers, body)
        self._script(text, response, fault)
        if fault == "left":
            self._leave(path, headers, body)
        elif fault in CUT:
            self._cut(path, headers, body)
        elif fault == "http":
            self._refused(path, headers, body, response["fault"]["status"])
        else:
            answer = self.client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, f"{n}: {answer.text}"
            self._learn(n, response, whole_answer(answer))
        step.call = self._recorded()
        if len(self.engine.requests) > before:
            step.prompt = self.engine.requests[before]["input_ids"]
        self.engine.refuse, self.engine.dies, self.engine.hold_after = None, False, None
        if fault:  # what failed rests; the next request is not about that
            self.proxy.admin(
                "PUT", "engines", {"engines": [{"url": self.engine.url, "admitting": True, "version": 0}]}
            )

    def _script(self, text: str | None, response: dict, fault: str | None) -> None:
        self.engine.script = [(text, "length") if fault in CUT or _cut_short(response) else text]
        self.engine.dies = fault in CUT
        self.engine.hold_after = 0 if fault == "left" else None
        if fault == "http":
            status = response["fault"]["status"]
            self.engine.refuse = status if status == 400 else 503

    def _too_long(self, path: str, headers: dict, body: dict) -> None:
        """The prompt does not fit: its last text is made as long as it takes. Nothing is sampled, nothing recorded."""
        answer = self.client.post(path, json=overlong(body), headers=headers)
        if "/responses" in path:
            assert answer.status_code == 200 and "event: response.failed" in answer.text
        else:
            assert answer.status_code == 400, answer.text
        words = "prompt is too long" if "/messages" in path else "context_length_exceeded"
        assert words in answer.text
        assert self.log.poll() == []

    def _leave(self, path: str, headers: dict, body: dict) -> None:
        """The client goes away before the first byte."""
        host = self.proxy.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        self.engine.wait_held()
        connection.close()

    def _cut(self, path: str, headers: dict, body: dict) -> None:
        """The engine dies in the middle: all that it said arrives, then the connection is reset."""
        arrived = b""
        try:
            with self.client.stream("POST", path, json=body, headers=headers) as answer:
                assert answer.status_code == 200
                for piece in answer.iter_raw():
                    arrived += piece
        except httpx.TransportError:
            assert shown_text(arrived.decode()) == self.steps[-1].text
        else:
            raise AssertionError(f"the stream ended cleanly: {arrived!r}")

    def _refused(self, path: str, headers: dict, body: dict, status: int) -> None:
        """The engine refuses: for good where the recorded API did, else a client may try again."""
        answer = self.client.post(path, json=body, headers=headers)
        assert answer.status_code == (400 if status == 400 else 503), answer.text
        assert "error" in answer.json() and ("retry-after" in answer.headers) == (status != 400)

    def _recorded(self) -> Call:
        """The one call that the request left in the log."""
        found: list[Call] = []

        def arrived() -> bool:
            found.extend(self.log.poll())
            return bool(found)

        wait_until(arrived)
        (call,) = found
        assert call.execution == self.execution
        return call

    def _learn(self, n: int, response: dict, answer: dict) -> None:
        """Pair the ids that the recorded API gave out with the proxy's, in order for each kind of id."""
        old, new = minted(response["body"]), minted(answer)
        for kind, ids in old.items():
            for given, other in zip(ids, new.get(kind, []), strict=False):
                self.ids.setdefault(given, []).append(other)
        good = [part for part in response["sent"] if part["k"] == "tool" and hermes(part) is not None]
        assert len(new.get("call", [])) == (0 if _cut_short(response) else len(good)), f"{n}: {answer}"


def _cut_short(response: dict) -> bool:
    """Whether a recorded answer ended at its limit of tokens."""
    body = response.get("body") or {}
    finish = (body.get("choices") or [{}])[0].get("finish_reason")
    return (body.get("stop_reason") or finish or body.get("status")) in ("max_tokens", "length", "incomplete")


def hermes(part: dict) -> str | None:
    """A recorded tool call as Hermes models write it; None when its arguments are no JSON object, so that it is none."""
    try:
        arguments = json.loads(part["raw"] or "{}")
    except ValueError:
        return None
    given = f', "arguments": {part["raw"]}' if part["raw"] else ""
    call = f'<tool_call>\n{{"name": "{part["name"]}"{given}}}\n</tool_call>'
    return call if isinstance(arguments, dict) else None


def spoken(sent: list[dict], whole: bool = True) -> str:
    """The recorded answer as a model samples it; without `whole` only its text, as of an answer that was cut there."""
    out = []
    for part in sent:
        if part["k"] == "think":
            out.append(f"<think>\n{part['t']}\n</think>\n\n")
        elif part["k"] == "text":
            out.append(part["t"])
        elif whole:
            broken = f'<tool_call>\n{{"name": "{part["name"]}", "arguments": {part["raw"]}'
            out.append(hermes(part) or broken)
    return "".join(out)


def renamed(body: dict, ids: dict[str, list[str]]) -> dict:
    """A copy of a request with other ids.

    The recorded API gave some ids out again after a restart: the second answer that holds one gets the second new id.
    """
    answers: Counter[str] = Counter()

    def change(value: object, answered: bool) -> object:
        if isinstance(value, dict):
            answered = answered or value.get("role") == "assistant" or value.get("type") in _ANSWERED
            return {key: change(inner, answered) for key, inner in value.items()}
        if isinstance(value, list):
            return [change(inner, answered) for inner in value]
        if not isinstance(value, str) or value not in ids:
            return value
        answers[value] += answered
        return ids[value][max(0, min(answers[value], len(ids[value])) - 1)]

    return change(body, False)


def overlong(body: dict) -> dict:
    """The body with a last message that does not fit."""
    message = {"role": "user", "content": OVERLONG}
    name = "input" if "input" in body else "messages"
    return body | {name: [*body[name], message]}


def whole_answer(answer: httpx.Response) -> dict:
    """The body of an answer, put together from its events where it came as a stream."""
    if "event-stream" not in answer.headers["content-type"]:
        return answer.json()
    content: list[dict] = []
    calls: list[dict] = []
    for event in events(answer.text):
        kind = event.get("type")
        if kind == "response.completed" or kind == "response.incomplete":
            return event["response"]
        if kind == "content_block_start":
            content.append(dict(event["content_block"]))
        elif kind == "content_block_delta" and event["delta"]["type"] == "signature_delta":
            content[event["index"]]["signature"] = event["delta"]["signature"]
        for choice in event.get("choices", []):
            calls += [call for call in choice["delta"].get("tool_calls", []) if call.get("id")]
    return {"content": content, "choices": [{"message": {"tool_calls": calls}}]}


def events(stream: str) -> Iterator[dict]:
    for line in stream.split("\n"):  # answers hold other line ends as text
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def shown_text(stream: str) -> str:
    """What a client saw of a stream, as text."""
    out = ""
    for event in events(stream):
        delta = event.get("delta", "")
        out += delta if isinstance(delta, str) else delta.get("text", "")
        out += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
    return out


def minted(body: dict) -> dict[str, list[str]]:
    """Ids that an answer gave out, by kind, in order."""
    out: dict[str, list[str]] = defaultdict(list)
    for block in body.get("content", []):
        if block["type"] == "tool_use":
            out["call"].append(block["id"])
        elif block.get("signature"):
            out["signature"].append(block["signature"])
    for choice in body.get("choices", []):
        out["call"] += [call["id"] for call in choice["message"].get("tool_calls") or []]
    for item in body.get("output", []):
        out[item["type"]].append(item["id"])
        if "call_id" in item:
            out["call"].append(item["call_id"])
        if item.get("encrypted_content"):
            out["encrypted"].append(item["encrypted_content"])
    return out


def given_texts(body: dict) -> Iterator[str]:
    """Every text of a request that is no part of an answer; Claude Code's billing line is none that a model should see."""
    messages = body.get("messages") or body.get("input")
    for holder in [{"content": body.get("system")}, *messages]:
        if holder.get("role") != "assistant":
            yield from _texts(holder)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for key in ("text", "content", "output"):
            yield from _texts(value.get(key))
    elif isinstance(value, str) and not value.startswith("x-anthropic-billing-header"):
        yield value


def path_tokens(call: Call, calls: dict[str, Call]) -> np.ndarray:
    """int32: every token from the root to the end of the call's output, by the log alone."""
    own = np.concatenate((call.input_ids, call.output_ids))
    return own if call.parent is None else np.concatenate((path_tokens(calls[call.parent], calls), own))
