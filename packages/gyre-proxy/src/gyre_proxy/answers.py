"""Owns how the model of a chat template writes its answers, found by rendering probes.

Invariant: a parser is chosen only when it reads back the very call that the template wrote.
"""

import json
from collections.abc import Iterator

from gyre_proxy.conversation import Message, ToolCall
from gyre_proxy.errors import BadRequest
from gyre_proxy.parsers import (
    REASONINGS,
    TOOL_PARSERS,
    AnswerFormat,
    Reasoning,
    ToolFormat,
    parse,
    tool_types,
)
from gyre_proxy.template import ChatTemplate

_QUESTION, _THOUGHT, _TEXT = "probequestion", "probethought", "probetext"
_NAME = "probe"
_ARGUMENTS = {
    "text": " two\nlines ",
    "count": 3,
    "ratio": 0.5,
    "flag": True,
    "items": [1, "x"],
    "map": {"k": "v"},
}
_KINDS = ("string", "integer", "number", "boolean", "array", "object")
_PROPERTIES = {name: {"type": kind} for name, kind in zip(_ARGUMENTS, _KINDS, strict=True)}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "parameters": {"type": "object", "properties": _PROPERTIES}},
}


def reasoning_of(template: ChatTemplate) -> Reasoning | None:
    """The tags of the template's model, None when the template knows of none."""
    return next((tags for tags in REASONINGS if tags.closing in template.source), None)


def tools_of(template: ChatTemplate) -> ToolFormat | None:
    """The first format that reads the template's own tool call, None when none does."""
    types = tool_types((_TOOL,))
    for written in _written_calls(template):
        for form in TOOL_PARSERS.values():
            calls = parse(written, AnswerFormat(tools=form), types).calls
            if [(name, json.loads(arguments)) for name, arguments in calls] == [(_NAME, _ARGUMENTS)]:
                return form
    return None


def _written_calls(template: ChatTemplate) -> Iterator[str]:
    """An answer that is nothing but a call as the template writes it: with what precedes it, then alone."""
    call = ToolCall("callprob0", _NAME, json.dumps(_ARGUMENTS))
    question, follow = Message("user", _QUESTION), Message("user", _TEXT)
    try:
        prompt = template.render((question,))
        whole = template.render((question, Message("assistant", tool_calls=(call,)), follow))
        suffix = template.suffix((follow,))
    except BadRequest:
        return
    whole = whole.removesuffix(suffix)
    yield whole.rpartition(_QUESTION)[2]
    same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    yield whole[same:]


def closing_of(template: ChatTemplate, reasoning: Reasoning) -> str:
    """What the template writes between thinking and text."""
    said = Message("assistant", _TEXT, _THOUGHT)
    try:
        text = template.render((Message("user", _QUESTION), said), generation=False)
    except BadRequest:
        text = ""
    between, found, _ = text.partition(_THOUGHT)[2].partition(_TEXT)
    return between if found and reasoning.closing in between else f"\n{reasoning.closing}\n\n"


def notices_of(template: ChatTemplate, tools: ToolFormat | None) -> Iterator[str]:
    """Lines for whoever starts the proxy: what of tools the model will not see, or nobody will read."""
    if not template.form.shows_tools:
        yield "the chat template does not show the model which tools are on offer"
    if tools is None:
        cause = "no parser reads its own" if template.form.shows_calls else "it writes none"
        known = ", ".join(TOOL_PARSERS)
        yield f"tool calls stay text, for the chat template names no format ({cause}); --tool-parser may: {known}"
