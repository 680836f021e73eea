"""Owns the chat template: rendering with Hugging Face's conventions, and the proof that suffixes are stable.

A template is suffix-stable when the text of new messages does not depend on what came before. Then a growing
conversation needs only its new messages rendered; the recorded tokens of the past stay as they are (paper
5.1). Invariant: `suffix` is offered only after `prove` compared it with full renderings on probe
conversations.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import product

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gyre_proxy.conversation import Message, ToolCall
from gyre_proxy.errors import BadRequest, TokenizerError

# A noncharacter: no text of a chat holds it, so the place after it is found without doubt.
_PRIOR = "\ufdd1prior\ufdd1"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class _GenerationBlock(Extension):
    """Templates may mark what the model wrote with {% generation %}; for rendering the mark means nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, **options: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled chat template with its fixed arguments (special tokens, enable_thinking, ...)."""

    def __init__(self, source: str, arguments: Mapping[str, object]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._arguments = dict(arguments)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error
        self._late_system_role = "system"
        self._late_system_role = self._prove_late_system()

    def render(self, messages: Sequence[Message], tools: Sequence[dict] = ()) -> str:
        """The whole prompt as text. Raises BadRequest with the template's own words when it refuses."""
        rendered = [self._message(m, i) for i, m in enumerate(messages)]
        try:
            return self._template.render(
                messages=rendered,
                tools=list(tools) or None,
                add_generation_prompt=True,
                **self._arguments,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error

    def suffix(self, messages: Sequence[Message]) -> str:
        """The text between an assistant's last sampled character and the next answer, turn end included."""
        prelude = (Message("user", "q"), Message("assistant", _PRIOR))
        return self.render((*prelude, *messages)).rpartition(_PRIOR)[2]

    def prove(self) -> str | None:
        """None when suffixes are stable on every probe, else one line naming the first difference."""
        for (history_name, history), (new_name, new), tools in product(
            _HISTORIES.items(), _SUFFIXES.items(), ((), (_PROBE_TOOL,))
        ):
            try:
                suffix, full = self.suffix(new), self.render((*history, *new), tools)
            except BadRequest as error:
                return f"{new_name} after {history_name}: {error}"
            if not suffix or not full.endswith(suffix):
                tail = full[-len(suffix) - 20 :]
                return f"{new_name} after {history_name}: {tail!r} does not end with {suffix!r}"
        return None

    def _message(self, message: Message, index: int) -> dict:
        if message.role == "system" and index > 0:
            return {"role": self._late_system_role, "content": message.text}
        out: dict = {"role": message.role, "content": message.text}
        if message.role == "tool":
            out["tool_call_id"] = message.call_id
        if message.reasoning:
            out["reasoning_content"] = message.reasoning
        if message.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.parsed()}}
                for c in message.tool_calls
            ]
        return out

    def _prove_late_system(self) -> str:
        """Harnesses put system messages in mid-conversation.

        A template that refuses them gets them as user's.
        """
        probe = (
            Message("system", "s"),
            Message("user", "q"),
            Message("assistant", "a"),
            Message("system", _PRIOR),
        )
        try:
            return "system" if _PRIOR in self.render(probe) else "user"
        except BadRequest:
            return "user"


def _call(name: str) -> Message:
    return Message("assistant", "t", tool_calls=(ToolCall("callprobe", name, '{"k": 1}'),))


_USER = Message("user", "hello\n")
_RESULT = Message("tool", "result", call_id="callprobe")
_HISTORIES = {
    "one turn": (_USER, Message("assistant", "a")),
    "a system prompt and a tool call": (Message("system", "s"), _USER, _call("probe")),
    "three turns with thinking": (
        _USER,
        Message("assistant", "a", "thought"),
        _USER,
        _call("probe"),
        _RESULT,
        Message("assistant", "b", "thought"),
    ),
}
_SUFFIXES = {
    "a user message": (_USER,),
    "a tool result": (_RESULT,),
    "two tool results and a user message": (_RESULT, _RESULT, _USER),
    "a system message": (Message("system", "late"),),
    "a foreign turn": (_USER, Message("assistant", "other"), _USER),
}
