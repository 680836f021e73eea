"""Agents that talk to a proxy through its deaths: what they were answered is what a log must hold."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

DEADLINE_S = 20
TURNS = 8
"""Answers of a conversation, after which the agent begins another."""


@dataclass
class Talker:
    """One agent in its own execution. `protocol`: "chat", "messages" or "responses"."""

    name: str
    protocol: str
    stream: bool
    conversations: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    """(call id, text) of each whole answer, by conversation."""
    said: list[dict] = field(default_factory=list)
    """Messages of the conversation that goes on."""
    begun: int = 0
    """Answers whose first bytes arrived."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=DEADLINE_S))

    @property
    def answered(self) -> int:
        return sum(map(len, self.conversations))

    def talk(self, url: str, turns: int | None = None) -> None:
        """Ask until the proxy dies, or `turns` times. A request that was not answered is asked again in the next life."""
        asked = 0
        while asked != turns:
            if len(self.conversations[-1]) == TURNS:
                self.conversations.append([])
                self.said = []
            if len(self.said) == 2 * len(self.conversations[-1]):
                words = f"{self.name} {len(self.conversations)} turn {len(self.conversations[-1])}"
                self.said.append({"role": "user", "content": words})
            try:
                call, text = self._ask(f"{url}/x/{self.name}/v1")
            except httpx.TransportError:
                assert turns is None, "the proxy was to live"
                return
            self.conversations[-1].append((call, text))
            self.said.append({"role": "assistant", "content": text})
            asked += 1

    def _ask(self, url: str) -> tuple[str, str]:
        """(call id, text) of a whole answer. Raises httpx.TransportError for one that was cut."""
        if self.protocol == "responses":
            path, body = "responses", {"input": self.said}
        else:
            path, body = (
                ("chat/completions" if self.protocol == "chat" else "messages"),
                {"messages": self.said},
            )
        body |= {"model": "m", "stream": self.stream}
        if self.protocol == "messages":
            body["max_tokens"] = 100
        with self.client.stream("POST", f"{url}/{path}", json=body) as answer:
            if not self.stream or answer.status_code != 200:
                answer.read()
                assert answer.status_code == 200, answer.text
                return self._whole(answer.json())
            return self._streamed(self._events(answer))

    def _events(self, answer: httpx.Response) -> Iterator[dict]:
        """The events of a stream; it must not end cleanly before its last."""
        first = True
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                self.begun += first
                first = False
                event = json.loads(line.removeprefix("data: "))
                yield event
                if event.get("type") in ("message_stop", "response.completed"):
                    return
        raise AssertionError(f"a {self.protocol} stream ended without its last event")

    def _whole(self, body: dict) -> tuple[str, str]:
        if self.protocol == "chat":
            return _call(body["id"]), body["choices"][0]["message"]["content"]
        texts = body["content"] if self.protocol == "messages" else body["output"][0]["content"]
        return _call(body["id"]), texts[0]["text"]

    def _streamed(self, events: Iterator[dict]) -> tuple[str, str]:
        call, text = "", ""
        for event in events:
            answer = event.get("message") or event.get("response") or event
            call = call or answer.get("id", "")
            delta = event.get("delta", "")
            text += delta if isinstance(delta, str) else delta.get("text", "")
            text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
        return _call(call), text


def _call(id: str) -> str:
    """The call's own id in that of a message."""
    return id.rsplit("-" if "-" in id else "_", 1)[1]
