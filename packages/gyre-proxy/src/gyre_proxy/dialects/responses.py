"""Owns the OpenAI Responses protocol: request to Conversation, Answer to JSON or events.

Stateless: the whole history comes with each request. Hosted tools (web search and the like) are not offered
to the model, because nobody here could run them; a custom tool is offered as a function with one text
`input`.
"""

from collections.abc import Mapping

import orjson

from gyre_proxy.conversation import Answer, Conversation, Message, Request, ToolCall, merge_leading_system
from gyre_proxy.dialects.chat import content_text, tool_choice
from gyre_proxy.dialects.chat import error as chat_error
from gyre_proxy.dialects.fields import (
    arguments_text,
    asked_sampling,
    check_known,
    flag_field,
    function_tool,
    json_text,
    limit_field,
    list_field,
    mapping,
    sse,
    text_field,
)
from gyre_proxy.errors import BadRequest, ProxyError

TOOL_ID_PREFIX = "call_"

_KNOWN = {
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "stream",
    "temperature",
    "top_p",
    "store",
    "include",
    "reasoning",
    "text",
    "prompt_cache_key",
    "client_metadata",
    "metadata",
    "user",
    "service_tier",
    "truncation",
    "safety_identifier",
    "stream_options",
    "prompt_cache_retention",
}
_HOSTED = ("web_search", "file_search", "image_generation", "code_interpreter", "computer_use")
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def parse(body: Mapping) -> Request:
    """The request of a /v1/responses body. Raises BadRequest naming the field."""
    check_known(body, _KNOWN)
    if body.get("truncation") not in (None, "disabled"):
        raise BadRequest("truncation is not supported: only disabled", "truncation")
    text_format = mapping(body.get("text") or {}, "text").get("format") or {}
    if mapping(text_format, "text.format").get("type", "text") != "text":
        raise BadRequest("structured output (text.format) is not supported", "text")
    tools, kinds = _tools(list_field(body, "tools"))
    if tool_choice(body.get("tool_choice")) == "none":
        tools = []
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_field(body, "input")
    messages = []
    if body.get("instructions") is not None:
        messages.append(Message("system", text_field(body, "instructions")))
    messages += _messages([mapping(item, "every entry of 'input'") for item in items], kinds)
    if not messages:
        raise BadRequest("field 'input' must hold at least one item", "input")
    return Request(
        conversation=Conversation(merge_leading_system(messages), tuple(tools)),
        model=text_field(body, "model", "gyre"),
        stream=flag_field(body, "stream"),
        max_tokens=limit_field(body, "max_output_tokens"),
        asked=asked_sampling(body),
        tool_kinds=kinds,
    )


def _tools(values: list) -> tuple[list[dict], dict[str, dict[str, str]]]:
    tools: list[dict] = []
    kinds: dict[str, dict[str, str]] = {}

    def offer(tool: Mapping, **kind: str) -> None:
        name = text_field(tool, "name")
        offered = f"{kind['namespace']}__{name}" if "namespace" in kind and name in kinds else name
        parameters = _CUSTOM_INPUT if "custom" in kind else tool.get("parameters")
        tools.append(function_tool(offered, tool.get("description"), parameters))
        kinds[offered] = {"name": name, **kind}

    for value in values:
        tool = mapping(value, "every entry of 'tools'")
        kind = tool.get("type")
        if kind == "function":
            offer(tool)
        elif kind == "custom":
            offer(tool, custom="yes")
        elif kind == "namespace":
            for inner in list_field(tool, "tools"):
                offer(mapping(inner, "every tool of a namespace"), namespace=text_field(tool, "name"))
        elif not (isinstance(kind, str) and kind.startswith(_HOSTED)):
            raise BadRequest(f"tool type {kind!r} is not supported", "tools")
    return tools, kinds


def _messages(items: list[Mapping], kinds: Mapping[str, Mapping[str, str]]) -> list[Message]:
    """Reasoning, text and calls that follow each other are one assistant turn."""
    out: list[Message] = []
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []

    def flush() -> None:
        if texts or reasoning or calls:
            out.append(Message("assistant", "".join(texts), "\n".join(reasoning), tuple(calls)))
        texts.clear(), reasoning.clear(), calls.clear()

    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "reasoning":
            reasoning += _reasoning(item)
        elif kind in ("function_call", "custom_tool_call"):
            calls.append(_call(item, kinds))
        elif kind == "message" and role == "assistant":
            texts.append(content_text(item.get("content"), "input", ""))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            flush()
            text = content_text(item.get("output"), "input")
            out.append(Message("tool", text, call_id=text_field(item, "call_id")))
        elif kind == "message" and role in ("user", "system", "developer"):
            flush()
            neutral = "user" if role == "user" else "system"
            out.append(Message(neutral, content_text(item.get("content"), "input")))
        else:
            raise BadRequest(f"input item {kind!r} with role {role!r} is not supported", "input")
    flush()
    return out


def _reasoning(item: Mapping) -> list[str]:
    parts = list_field(item, "content") or list_field(item, "summary")
    return [text_field(mapping(part, "every reasoning part"), "text", "") for part in parts]


def _call(item: Mapping, kinds: Mapping[str, Mapping[str, str]]) -> ToolCall:
    name = text_field(item, "name")
    if item.get("type") == "custom_tool_call":
        return ToolCall(text_field(item, "call_id"), name, json_text({"input": text_field(item, "input")}))
    namespace = item.get("namespace")
    if namespace and kinds.get(f"{namespace}__{name}"):
        name = f"{namespace}__{name}"
    return ToolCall(text_field(item, "call_id"), name, arguments_text(text_field(item, "arguments")))


def _items(request: Request, done: Answer) -> list[dict]:
    """The output items of a finished answer, in order: reasoning, text, calls."""
    items = []
    if done.reasoning:
        items.append(_reasoning_item(done.id, done.reasoning))
    if done.text:
        items.append(_text_item(done.id, done.text))
    return items + [_call_item(request, call) for call in done.tool_calls]


def _reasoning_item(call_id: str, text: str) -> dict:
    summary = [{"type": "summary_text", "text": text}]
    return {"id": f"rs_{call_id}", "type": "reasoning", "summary": summary, "encrypted_content": call_id}


def _text_item(call_id: str, text: str) -> dict:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(request: Request, call: ToolCall) -> dict:
    kind = request.tool_kinds.get(call.name, {"name": call.name})
    head = {"id": f"fc_{call.id}", "call_id": call.id, "name": kind["name"], "status": "completed"}
    if "custom" in kind:
        arguments = orjson.loads(call.arguments)
        given = arguments.get("input") if isinstance(arguments.get("input"), str) else call.arguments
        return {**head, "id": f"ctc_{call.id}", "type": "custom_tool_call", "input": given}
    if "namespace" in kind:
        head["namespace"] = kind["namespace"]
    return {**head, "type": "function_call", "arguments": call.arguments}


def _response(
    request: Request, call_id: str, created: int, status: str, output: list, done: Answer | None = None
) -> dict:
    usage = None
    if done is not None:
        usage = {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": usage,
    }


def _status(request: Request, done: Answer) -> str:
    """ "incomplete" only when the client's own limit cut the answer.

    Codex gives up a whole run at the word.
    """
    cut_by_client = (
        done.finish == "length"
        and request.max_tokens is not None
        and done.completion_tokens >= request.max_tokens
    )
    return "incomplete" if cut_by_client else "completed"


def answer(request: Request, done: Answer) -> dict:
    """The body of a non-streaming answer."""
    status = _status(request, done)
    return _response(request, done.id, done.created, status, _items(request, done), done)


def error(failure: ProxyError) -> dict:
    """The error body, as in Chat Completions."""
    return chat_error(failure)


def failed_event(failure: ProxyError) -> bytes:
    """A stream that consists of one failure: streaming clients look for the over-long code only there."""
    detail = chat_error(failure)["error"]
    response = {
        "id": "resp_failed",
        "object": "response",
        "status": "failed",
        "error": {"code": detail["code"] or detail["type"], "message": detail["message"]},
        "output": [],
    }
    return sse("response.failed", {"type": "response.failed", "sequence_number": 0, "response": response})


class Stream:
    """Writes one answer as Responses events, numbered in sequence."""

    def __init__(self, request: Request, call_id: str, created: int, prompt_tokens: int) -> None:
        self._request, self._id, self._created = request, call_id, created
        self._sequence = 0
        self._index = -1
        self._open: str | None = None
        self._text = ""

    def start(self) -> bytes:
        response = _response(self._request, self._id, self._created, "in_progress", [])
        return self._event("response.created", response=response) + self.keepalive()

    def keepalive(self) -> bytes:
        response = _response(self._request, self._id, self._created, "in_progress", [])
        return self._event("response.in_progress", response=response)

    def delta(self, kind: str, text: str) -> bytes:
        """More content: `kind` is "reasoning" or "text"."""
        out = b"" if self._open == kind else self._close() + self._begin(kind)
        self._text += text
        if kind == "text":
            return out + self._part("response.output_text.delta", delta=text, logprobs=[])
        return out + self._part("response.reasoning_summary_text.delta", delta=text)

    def finish(self, done: Answer) -> bytes:
        """Everything after the last text: tool calls and the completed response."""
        out = self._close()
        for call in done.tool_calls:
            out += self._tool_call(_call_item(self._request, call))
        status = _status(self._request, done)
        items = _items(self._request, done)
        response = _response(self._request, self._id, self._created, status, items, done)
        return out + self._event(f"response.{status}", response=response)

    def _tool_call(self, item: dict) -> bytes:
        self._index += 1
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        where = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, field: "", "status": "in_progress"}
        return (
            self._event("response.output_item.added", output_index=self._index, item=begun)
            + self._event(f"{name}.delta", **where, delta=item[field])
            + self._event(f"{name}.done", **where, name=item["name"], **{field: item[field]})
            + self._event("response.output_item.done", output_index=self._index, item=item)
        )

    def _begin(self, kind: str) -> bytes:
        self._index += 1
        self._open, self._text = kind, ""
        if kind == "text":
            item = {**_text_item(self._id, ""), "status": "in_progress", "content": []}
            added = self._event("response.output_item.added", output_index=self._index, item=item)
            return added + self._part("response.content_part.added", part=_text_part(""))
        item = {**_reasoning_item(self._id, ""), "summary": []}
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        part = {"type": "summary_text", "text": ""}
        return added + self._part("response.reasoning_summary_part.added", part=part)

    def _close(self) -> bytes:
        kind, text = self._open, self._text
        if kind is None:
            return b""
        if kind == "text":
            item = _text_item(self._id, text)
            out = self._part("response.output_text.done", text=text, logprobs=[])
            out += self._part("response.content_part.done", part=_text_part(text))
        else:
            item = _reasoning_item(self._id, text)
            out = self._part("response.reasoning_summary_text.done", text=text)
            part = {"type": "summary_text", "text": text}
            out += self._part("response.reasoning_summary_part.done", part=part)
        self._open = None
        return out + self._event("response.output_item.done", output_index=self._index, item=item)

    def _part(self, event: str, **fields: object) -> bytes:
        prefix, place = ("msg_", "content_index") if self._open == "text" else ("rs_", "summary_index")
        where = {"item_id": prefix + self._id, "output_index": self._index, place: 0}
        return self._event(event, **where, **fields)

    def _event(self, event: str, **fields: object) -> bytes:
        data = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(event, data)
