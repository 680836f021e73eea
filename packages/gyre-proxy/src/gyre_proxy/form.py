"""Owns the form in which a chat template takes its messages.

Templates differ in what they accept: content as text or as a list of parts, a call's arguments as an object or as
JSON text, where thinking is read from, system messages in mid-conversation, two user messages in a row. The form is
found by rendering probes, never by a model's name. Invariant: what a form changes is the shape of a message, never
its text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gyre_proxy.conversation import Message, Role, ToolCall
from gyre_proxy.errors import BadRequest

Render = Callable[[list[dict], list[dict]], str]
"""(messages, tools) in the template's own shape -> text. Raises BadRequest when the template refuses."""

_WORD = "seventhprobe"
_LATER = "ninthprobe"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": _WORD,
        "parameters": {"type": "object", "properties": {"k": {"type": "string", "description": "d"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Form:
    """How a template wants its messages, and what of them it shows."""

    parts: bool = False
    """Content is [{"type": "text", "text": ...}] instead of text."""
    arguments_text: bool = False
    """A call's arguments are JSON text instead of an object."""
    reasoning_key: str = "reasoning_content"
    one_voice: bool = False
    """A message with calls may have thinking or text, not both: the text is put after the thinking."""
    single_calls: bool = False
    """A message may have one call: several are written as a message each, each before its result."""
    first_system: Role = "system"
    late_system: Role = "system"
    join_users: bool = False
    """User messages in a row are refused: they are joined by a blank line."""
    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True

    def messages(self, messages: Sequence[Message]) -> list[dict]:
        """The messages as the template takes them. Raises BadRequest for results that it would leave out."""
        if not self.shows_results and any(m.role == "tool" for m in messages):
            raise BadRequest(
                "the model's chat template does not show tool results; serve a template that does"
            )
        spoken = [
            replace(m, role=self._system(i)) if m.role == "system" else m for i, m in enumerate(messages)
        ]
        if self.join_users:
            spoken = _joined(spoken)
        if self.single_calls:
            spoken = _one_by_one(spoken)
        return [self._message(m) for m in spoken]

    def _system(self, index: int) -> Role:
        return self.late_system if index else self.first_system

    def _message(self, message: Message) -> dict:
        text, reasoning = message.text, message.reasoning
        if self.one_voice and message.tool_calls and text and reasoning:
            text, reasoning = "", f"{reasoning}\n\n{text}"
        out: dict = {
            "role": message.role,
            "content": [{"type": "text", "text": text}] if self.parts else text,
        }
        if message.role == "tool":
            out["tool_call_id"] = message.call_id
        if reasoning:
            out[self.reasoning_key] = reasoning
        if message.tool_calls:
            out["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return out

    def _call(self, call: ToolCall) -> dict:
        arguments = (call.arguments or "{}") if self.arguments_text else call.parsed()
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _joined(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if out and message.role == out[-1].role == "user":
            out[-1] = replace(message, text=f"{out[-1].text}\n\n{message.text}")
        else:
            out.append(message)
    return out


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Each call as a message of its own, its result right behind it. Results without a call stay in their place."""
    out: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        results: list[Message] = []
        while index < len(messages) and messages[index].role == "tool":
            results.append(messages[index])
            index += 1
        for position, call in enumerate(message.tool_calls):
            said = (message.text, message.reasoning) if position == 0 else ("", "")
            out.append(Message("assistant", *said, tool_calls=(call,)))
            out += [result for result in results if result.call_id == call.id]
        known = {call.id for call in message.tool_calls}
        out += [result for result in results if result.call_id not in known]
    return out


def find_form(render: Render) -> Form:
    """The form of a template. Each question is put with what was found before."""
    form = Form(parts=_parts(render))
    form = replace(form, first_system=_first_system(render, form), join_users=_join_users(render, form))
    form = replace(form, late_system=_late_system(render, form))
    form = _calls(render, form)
    form = replace(
        form,
        reasoning_key=_reasoning_key(render, form),
        shows_results=_shown(render, form, [*_CALLED, _result(_WORD)], _WORD),
        shows_tools=_answer(render, form, [_USER], [_TOOL]).find("probe") >= 0,
    )
    if form.shows_calls and _refused(render, form, [_USER, _assistant("t", "r", "x"), _result("r")]):
        apart = not _refused(render, form, [_USER, _assistant("t", "", "x"), _result("r")])
        form = replace(form, one_voice=apart)
    return form


def _assistant(text: str, reasoning: str, *values: str) -> Message:
    calls = tuple(
        ToolCall(f"callprob{i}", f"probe{i}", f'{{"k": "{value}"}}') for i, value in enumerate(values)
    )
    return Message("assistant", text, reasoning, calls)


def _result(text: str) -> Message:
    return Message("tool", text, call_id="callprob0")


_USER = Message("user", "question")
_SAID = Message("assistant", "answer")
_CALLED = (_USER, _assistant("", "", "x"))


def _answer(render: Render, form: Form, messages: Sequence[Message], tools: list[dict]) -> str:
    """The rendering, "" when the template refuses."""
    try:
        return render(form.messages(messages), tools)
    except BadRequest:
        return ""


def _shown(render: Render, form: Form, messages: Sequence[Message], word: str) -> bool:
    return word in _answer(render, form, messages, [])


def _refused(render: Render, form: Form, messages: Sequence[Message]) -> bool:
    return not _answer(render, form, messages, [])


def _parts(render: Render) -> bool:
    probe = [Message("user", _WORD)]
    return not _shown(render, Form(), probe, _WORD) and _shown(render, Form(parts=True), probe, _WORD)


def _first_system(render: Render, form: Form) -> Role:
    return "system" if _shown(render, form, [Message("system", _WORD), _USER], _WORD) else "user"


def _join_users(render: Render, form: Form) -> bool:
    return _refused(render, form, [_USER, _USER]) and not _refused(render, form, [_USER, _SAID, _USER])


def _late_system(render: Render, form: Form) -> Role:
    """The role under which a template leaves a system message of mid-conversation in its place."""
    dialogue = [Message("user", "question"), Message("assistant", _WORD), Message("system", _LATER)]
    for head in ([], [Message("system", "head")]):
        for tail in ([], [_USER]):
            said, _, rest = _answer(render, form, [*head, *dialogue, *tail], []).partition(_WORD)
            if _LATER not in rest or _LATER in said:
                return "user"
    return "system"


def _calls(render: Render, form: Form) -> Form:
    probe = [_USER, _assistant("", "", _WORD), _result("r")]
    as_text = replace(form, arguments_text=True)
    if not _shown(render, form, probe, _WORD):
        if not _shown(render, as_text, probe, _WORD):
            return replace(form, shows_calls=False)
        form = as_text
    both = [_USER, _assistant("", "", "x", _WORD), _result("r"), replace(_result("r"), call_id="callprob1")]
    return replace(form, single_calls=not _shown(render, form, both, _WORD))


def _reasoning_key(render: Render, form: Form) -> str:
    """Where the template reads thinking from; many show that of the last turn only."""
    keys = ("reasoning_content", "reasoning", "thinking")
    for last in (
        [_USER, _assistant("", _WORD, "x"), _result("r")],
        [_USER, Message("assistant", "t", _WORD)],
    ):
        for key in keys:
            if _shown(render, replace(form, reasoning_key=key), last, _WORD):
                return key
    return keys[0]
