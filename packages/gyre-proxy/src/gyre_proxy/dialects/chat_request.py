"""Owns requests of the OpenAI Chat Completions protocol: what each field may hold, and the Conversation they mean.

Of what the protocol offers, names of participants and hints about images have no place in a chat template and are read
without being shown. Beyond the protocol it reads `reasoning_content` (also `reasoning`) of assistant messages,
`chat_template_kwargs`, cache marks, images in tool results, and arguments given as an object.
"""

from collections.abc import Mapping

from gyre_proxy.conversation import TEMPLATE_OWN, Conversation, Message, Request, ToolCall, as_read
from gyre_proxy.dialects.checks import (
    BadField,
    any_list,
    either,
    flag,
    integer,
    list_of,
    mapping,
    name,
    one_of,
    positive,
    recorded,
    refused,
    refused_unless,
    table,
    tagged,
    text,
    whole,
)
from gyre_proxy.dialects.content import image_url, url_image
from gyre_proxy.dialects.openai import (
    ANSWER,
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    INERT,
    NO_HOSTED_TOOLS,
    NO_LOGPROBS,
    TEXT_ONLY,
    asked,
    text_format,
)
from gyre_proxy.dialects.readings import read
from gyre_proxy.dialects.tools import arguments, forced_tool, function_tool, json_text

_DEPRECATED = "it is deprecated; use tools and tool_choice"
_CUSTOM = "custom tools are served by the Responses protocol only; offer a function"


def _template_arguments(value: object) -> None:
    recorded(value)
    for field in value:
        if field in TEMPLATE_OWN:
            raise BadField("is what the proxy itself gives the template; remove it", field)


_MARKED = {"type": text, "cache_control": mapping}
_TEXT = table({**_MARKED, "text": text}, "text")
_IMAGE = table(
    {**_MARKED, "image_url": table({"url": image_url, "detail": text}, "url")},
    "image_url",
)
_REFUSAL = table({"type": text, "refusal": text}, "refusal")
_TEXTS = either((str, text), (list, list_of(tagged({"text": _TEXT}))))
_SHOWN = either(
    (str, text),
    (
        list,
        list_of(
            tagged(
                {
                    "text": _TEXT,
                    "image_url": _IMAGE,
                    "input_audio": refused(f"input_audio: {TEXT_ONLY}"),
                    "file": refused(f"file: {TEXT_ONLY}"),
                }
            )
        ),
    ),
)
_HEAD = {"role": text, "name": text, "cache_control": mapping}
_CALLED = table({"name": text, "arguments": either((str, arguments), (dict, mapping))}, "name")
_FUNCTION_CALL = table({"type": text, "id": text, "index": integer, "function": _CALLED}, "id function")
_CALL = tagged({"function": _FUNCTION_CALL, None: _FUNCTION_CALL, "custom": refused(_CUSTOM)})
_SYSTEM = table({**_HEAD, "content": _TEXTS}, "content")
_MESSAGE = tagged(
    {
        "system": _SYSTEM,
        "developer": _SYSTEM,
        "user": table({**_HEAD, "content": _SHOWN}, "content"),
        "assistant": table(
            {
                **_HEAD,
                "content": either((str, text), (list, list_of(tagged({"text": _TEXT, "refusal": _REFUSAL})))),
                "refusal": text,
                "reasoning_content": text,
                "reasoning": text,
                "tool_calls": list_of(_CALL),
                "function_call": refused(_DEPRECATED),
                "audio": refused(f"audio: {TEXT_ONLY}"),
                # what client libraries note beside an answer
                "annotations": any_list,
                "provider_specific_fields": mapping,
            }
        ),
        "tool": table({**_HEAD, "tool_call_id": text, "content": _SHOWN}, "tool_call_id"),
        "function": refused(_DEPRECATED),
    },
    "role",
)
_TOOL = tagged(
    {
        "function": table({**_MARKED, "function": table(FUNCTION_FIELDS, "name")}, "function"),
        "custom": refused(_CUSTOM),
    }
)
_BODY = table(
    {
        # what the prompt is made of
        "model": text,
        "messages": list_of(_MESSAGE),
        "tools": list_of(_TOOL),
        "tool_choice": either(
            (str, one_of("none", "auto", "required")),
            (
                dict,
                tagged(
                    {
                        "function": table(
                            {"type": text, "function": table({"name": name}, "name")}, "function"
                        ),
                        "custom": refused(_CUSTOM),
                        "allowed_tools": refused("allowed_tools: offer only the tools that may be called"),
                    }
                ),
            ),
        ),
        "chat_template_kwargs": _template_arguments,
        # how the answer is made
        **ANSWER,
        "max_tokens": positive,
        "max_completion_tokens": positive,
        "stop": either((str, name), (list, list_of(name, most=64))),
        "stream_options": table({"include_usage": flag, "include_obfuscation": flag}),
        "reasoning_effort": text,
        "response_format": text_format(
            table({"type": text, "json_schema": table(FORMAT_FIELDS, "name")}, "json_schema")
        ),
        "n": refused_unless(1, "n > 1; send one request for each answer"),
        "logprobs": refused_unless(False, NO_LOGPROBS),
        "modalities": list_of(one_of("text")),
        # what concerns neither here
        **INERT,
        "verbosity": text,
        "prediction": table({"type": one_of("content"), "content": _TEXTS}),
        # what this proxy does not do
        "audio": refused(f"audio: {TEXT_ONLY}"),
        "functions": list_of(refused(_DEPRECATED)),
        "function_call": refused(_DEPRECATED),
        "logit_bias": table({}),
        "web_search_options": refused(NO_HOSTED_TOOLS),
    }
)


def parse(body: Mapping) -> Request:
    """The request of a /v1/chat/completions body. Raises BadField."""
    reader, _ = read(body, "messages", _BODY, Reader)
    messages = as_read(reader.messages)
    if not messages:
        raise BadField("must hold at least one message", "messages")
    tools = reader.tools
    choice = body.get("tool_choice") or "auto"
    if choice == "none":
        tools = ()
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    stop = body.get("stop") or ()
    return Request(
        conversation=Conversation(
            messages,
            tools,
            template_arguments=body.get("chat_template_kwargs") or {},
        ),
        model=body.get("model") or "gyre",
        stream=body.get("stream") or False,
        max_tokens=whole(body.get("max_completion_tokens") or body.get("max_tokens")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        asked=asked(body, "reasoning_effort"),
        include_usage=(body.get("stream_options") or {}).get("include_usage") or False,
        images=reader.images,
        forced=forced_tool("" if choice == "required" else named, tools, "tool_choice"),
        schema=_schema(body.get("response_format") or {}),
    )


def _schema(response_format: Mapping) -> dict | None:
    if response_format.get("type", "text") == "text":
        return None
    return (response_format.get("json_schema") or {}).get("schema") or {"type": "object"}


def _tool(function: Mapping) -> dict:
    return function_tool(function["name"], function.get("description"), function.get("parameters"))


class Reader:
    """Turns checked messages into neutral ones; counts the images it meets."""

    def __init__(self, tools: list[Mapping]) -> None:
        self.tools = tuple(_tool(tool["function"]) for tool in tools)
        self.messages: list[Message] = []
        self.images = 0

    def add(self, item: Mapping) -> None:
        self.messages.append(self._message(item))

    def _message(self, item: Mapping) -> Message:
        role = item["role"]
        if role == "assistant":
            return self._assistant(item)
        shown = self._text(item.get("content"), "\n")
        if role == "tool":
            return Message("tool", shown, call_id=item["tool_call_id"])
        return Message("user" if role == "user" else "system", shown)

    def _assistant(self, item: Mapping) -> Message:
        text = self._text(item.get("content"), "") + (item.get("refusal") or "")
        reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
        calls = item.get("tool_calls")
        return Message("assistant", text, reasoning, tuple(map(_tool_call, calls)) if calls else ())

    def _text(self, content: str | list | None, joiner: str) -> str:
        if type(content) is str:
            return content
        return joiner.join([self._part(part) for part in content]) if content else ""

    def _part(self, part: Mapping) -> str:
        kind = part["type"]
        if kind == "image_url":
            self.images += 1
            return url_image(part["image_url"]["url"])
        return part["text" if kind == "text" else "refusal"]


def _tool_call(call: Mapping) -> ToolCall:
    function = call["function"]
    given = function.get("arguments") or ""
    return ToolCall(call["id"], function["name"], given if isinstance(given, str) else json_text(given))
