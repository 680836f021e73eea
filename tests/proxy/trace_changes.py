"""What harnesses do to the past between two turns without meaning anything by it. Pure: (random, request body) -> None.

Each change is made to a body in place, at places that chance picks, in whichever of the three protocols it is.
"""

import json
import random
from collections.abc import Iterator

ANTHROPIC, CHAT, RESPONSES = "anthropic", "chat", "responses"
_PARTS = ("text", "input_text", "output_text")


def protocol(path: str) -> str:
    return RESPONSES if "/responses" in path else CHAT if "/chat/" in path else ANTHROPIC


def move_cache_marks(chance: random.Random, body: dict, kind: str) -> None:
    """All marks go, three others come."""
    if kind != ANTHROPIC:
        return
    for block in _objects(body):
        block.pop("cache_control", None)
    blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
    for block in chance.sample(blocks, min(3, len(blocks))):
        if block["type"] != "thinking":
            block["cache_control"] = {"type": "ephemeral"}


def reshape_texts(chance: random.Random, body: dict, kind: str) -> None:
    """A text becomes a list of one text, a list of one text becomes a text."""
    for message in _messages(body):
        for holder, key in _contents(message):
            if chance.random() < 0.5:
                role = message.get("role")
                name = "text" if kind != RESPONSES else "output_text" if role == "assistant" else "input_text"
                holder[key] = _reshaped(holder[key], name)


def _contents(message: dict) -> Iterator[tuple[dict, str]]:
    """Places that hold content: of messages, of tool results inside them, of outputs of calls."""
    for key in ("content", "output"):
        if key in message:
            yield message, key
    if isinstance(message.get("content"), list):
        yield from (
            (b, "content") for b in message["content"] if b["type"] == "tool_result" and "content" in b
        )


def _reshaped(content: object, name: str) -> object:
    if isinstance(content, str) and content:
        return [{"type": name, "text": content}]
    if (
        isinstance(content, list)
        and len(content) == 1
        and content[0].get("type") in _PARTS
        and content[0]["text"]
    ):
        return content[0]["text"]
    return content


def rewrite_arguments(chance: random.Random, body: dict, kind: str) -> None:
    """Tool arguments with their keys in another order and other white space."""
    for value in _objects(_messages(body)):
        if value.get("type") == "tool_use":
            value["input"] = _shuffled(chance, value["input"])
        elif isinstance(value.get("arguments"), str):
            try:
                arguments = json.loads(value["arguments"])
            except ValueError:
                continue
            ascii_only, spaces = chance.random() < 0.5, chance.choice([(",", ":"), (" , ", " : "), None])
            shuffled = _shuffled(chance, arguments)
            value["arguments"] = json.dumps(shuffled, ensure_ascii=ascii_only, separators=spaces)


def _shuffled(chance: random.Random, value: object) -> object:
    if isinstance(value, dict):
        keys = chance.sample(list(value), len(value))
        return {key: _shuffled(chance, value[key]) for key in keys}
    return [_shuffled(chance, inner) for inner in value] if isinstance(value, list) else value


def trim_answers(chance: random.Random, body: dict, kind: str) -> None:
    """White space around what the assistant said goes; a text that was nothing else goes with it."""
    for run in _answers(body):
        texts = [(holder, key) for message in run for holder, key in _texts(message)]
        if texts and chance.random() < 0.7:
            (first, key), (last, end) = texts[0], texts[-1]
            first[key] = first[key].lstrip()
            last[end] = last[end].rstrip()
    for message in _messages(body):
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, list):
            said = [block for block in content if block["type"] not in _PARTS or block["text"]]
            message["content"] = said or content


def _answers(body: dict) -> Iterator[list[dict]]:
    """The messages of each assistant turn: Responses has an item for each part of it."""
    run: list[dict] = []
    for message in [*_messages(body), {}]:
        if message.get("role") == "assistant" or message.get("type") in ("reasoning", "function_call"):
            run.append(message)
        elif run:
            yield run
            run = []


def _texts(message: dict) -> Iterator[tuple[dict, str]]:
    content = message.get("content")
    if isinstance(content, str):
        yield message, "content"
    elif isinstance(content, list):
        yield from ((block, "text") for block in content if block["type"] in _PARTS)


def drop_thinking(chance: random.Random, body: dict, kind: str) -> None:
    """Thinking of some earlier turns is not sent back."""
    for message in _messages(body):
        if chance.random() < 0.7:
            message.pop("reasoning_content", None)
            if isinstance(message.get("content"), list):
                kept = [block for block in message["content"] if block["type"] != "thinking"]
                message["content"] = kept or message["content"]
    if kind == RESPONSES:
        body["input"] = [i for i in body["input"] if i.get("type") != "reasoning" or chance.random() < 0.3]


CHANGES = (move_cache_marks, reshape_texts, rewrite_arguments, trim_answers, drop_thinking)


def _messages(body: dict) -> list[dict]:
    return body["messages"] if "messages" in body else body["input"]


def _objects(value: object) -> Iterator[dict]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)
