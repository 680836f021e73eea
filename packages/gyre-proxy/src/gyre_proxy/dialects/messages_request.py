"""Owns requests of the Anthropic Messages protocol: what each field may hold, and the Conversation they mean.

Of what the protocol offers, three things have no place in a chat template and are read without being shown:
`is_error` of a tool result (its text says it), cache marks, and citations of texts. Thinking blocks are shown as far
as the template shows thinking; their signature is not looked at.
"""

from collections.abc import Mapping

from gyre_proxy.conversation import Conversation, Message, Request, ToolCall, as_read
from gyre_proxy.dialects.checks import (
    STATELESS,
    BadField,
    any_list,
    either,
    flag,
    integer,
    list_of,
    mapping,
    name,
    number,
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
from gyre_proxy.dialects.content import base64_image, image, image_url, url_image
from gyre_proxy.dialects.readings import read
from gyre_proxy.dialects.tools import forced_tool, function_tool, json_text

# Claude Code's first system block changes during a run and says nothing to the model.
_BILLING = "x-anthropic-billing-header:"
_NO_SERVER_TOOLS = "this proxy runs no server tools"
_OWN_HISTORY = "this proxy does not edit the history; send what the model shall see"
_NO_TOOLSETS = "this model knows no toolsets; offer the tools themselves"
_TEXT_ONLY = "only plain text can be shown to the model"

_MARKED = {"type": text, "cache_control": mapping}
_TEXT = table({**_MARKED, "text": text, "citations": any_list}, "text")
_TEXTS = either((str, text), (list, list_of(tagged({"text": _TEXT}))))
_IMAGE = table(
    {
        **_MARKED,
        "source": tagged(
            {
                "base64": table({"type": text, "media_type": text, "data": text}, "media_type data"),
                "url": table({"type": text, "url": image_url}, "url"),
                "file": table({"type": text, "file_id": text}, "file_id"),
            }
        ),
        "transformations": mapping,
    },
    "source",
)
_DOCUMENT = table(
    {
        **_MARKED,
        "source": tagged(
            {
                "text": table({"type": text, "media_type": one_of("text/plain"), "data": text}, "data"),
                "content": table(
                    {
                        "type": text,
                        "content": either(
                            (str, text), (list, list_of(tagged({"text": _TEXT, "image": _IMAGE})))
                        ),
                    },
                    "content",
                ),
                "base64": refused(f"a document in base64 (PDF): {_TEXT_ONLY}"),
                "url": refused(f"a document by url: {_TEXT_ONLY}"),
                "file": refused(f"a document by file id: {_TEXT_ONLY}"),
            }
        ),
        "title": text,
        "context": text,
        "citations": table({"enabled": flag}),
    },
    "source",
)
_SEARCH_RESULT = table(
    {
        **_MARKED,
        "content": list_of(tagged({"text": _TEXT})),
        "source": text,
        "title": text,
        "citations": table({"enabled": flag}),
    },
    "content source title",
)
_SHOWN = {"text": _TEXT, "image": _IMAGE, "document": _DOCUMENT, "search_result": _SEARCH_RESULT}
_TOOL_FIELDS = {
    **_MARKED,
    "name": name,
    "description": text,
    "input_schema": mapping,
    "defer_loading": flag,
    "eager_input_streaming": flag,
    "input_examples": list_of(mapping),
    "strict": flag,
    "allowed_callers": list_of(one_of("direct")),
}
_TOOL = table(_TOOL_FIELDS, "name input_schema")
_TOOL_ADDITION = table(
    {
        **_MARKED,
        "tool": tagged(
            {
                "tool_reference": table({"type": text, "name": name}, "name"),
                "tool_definition": table(
                    {"type": text, "definition": tagged({None: _TOOL, "custom": _TOOL})}, "definition"
                ),
            }
        ),
    },
    "tool",
)
_TOOL_REMOVAL = table(
    {**_MARKED, "tool": tagged({"tool_reference": table({"type": text, "name": name}, "name")})}, "tool"
)
_TOOL_CHANGES = {"tool_addition": _TOOL_ADDITION, "tool_removal": _TOOL_REMOVAL}
_TOOL_RESULT = table(
    {
        **_MARKED,
        "tool_use_id": text,
        "content": either(
            (str, text),
            (
                list,
                list_of(
                    tagged({**_SHOWN, "tool_reference": table({**_MARKED, "tool_name": name}, "tool_name")})
                ),
            ),
        ),
        "is_error": flag,
        "toolset_name": refused(_NO_TOOLSETS),
    },
    "tool_use_id",
)
_THINKING = table({"type": text, "thinking": text, "signature": text}, "thinking")
_TOOL_USE = table(
    {
        **_MARKED,
        "id": text,
        "name": text,
        # Claude Code gives back what a model wrote instead of an object as it is.
        "input": either((dict, mapping), (list, any_list)),
        "toolset_name": refused(_NO_TOOLSETS),
        "caller": tagged({"direct": table({"type": text})}),
    },
    "id name input",
)
_MESSAGE = tagged(
    {
        "user": table(
            {
                "role": text,
                "content": either(
                    (str, text),
                    (list, list_of(tagged({"tool_result": _TOOL_RESULT, **_SHOWN, **_TOOL_CHANGES}))),
                ),
            },
            "content",
        ),
        "assistant": table(
            {
                "role": text,
                "content": either(
                    (str, text),
                    (
                        list,
                        list_of(
                            tagged(
                                {
                                    "text": _TEXT,
                                    "thinking": _THINKING,
                                    "tool_use": _TOOL_USE,
                                    "redacted_thinking": refused("redacted_thinking cannot be read here"),
                                    "server_tool_use": refused(f"server_tool_use: {_NO_SERVER_TOOLS}"),
                                    "compaction": refused(f"compaction: {_OWN_HISTORY}"),
                                }
                            )
                        ),
                    ),
                ),
            },
            "content",
        ),
        "system": table(
            {
                "role": text,
                "content": either((str, text), (list, list_of(tagged({"text": _TEXT, **_TOOL_CHANGES})))),
                "clear_at": refused_unless("never", _OWN_HISTORY),
                "output_config": table({"effort": text}),
            },
            "content",
        ),
    },
    "role",
)
_PARALLEL = {"type": text, "disable_parallel_tool_use": flag}
_THINKS = {"type": text, "display": text, "budget_tokens": positive, "block_binding": recorded}
_BODY = table(
    {
        # what the prompt is made of
        "model": text,
        "messages": list_of(_MESSAGE),
        "system": _TEXTS,
        "tools": list_of(tagged({None: _TOOL, "custom": _TOOL})),
        "tool_choice": tagged(
            {
                "auto": table(_PARALLEL),
                "any": table(_PARALLEL),
                "tool": table({**_PARALLEL, "name": name}, "name"),
                "none": table({"type": text}),
            }
        ),
        # how the answer is made
        "max_tokens": positive,
        "stop_sequences": list_of(name, most=64),
        "stream": flag,
        "temperature": number,
        "top_p": number,
        "top_k": integer,
        "thinking": tagged(
            {
                "enabled": table(_THINKS, "budget_tokens"),
                "adaptive": table(_THINKS),
                "between_tools": table(_THINKS),
                "disabled": table({"type": text}),
            }
        ),
        "output_config": table(
            {
                "effort": text,
                "format": tagged({"json_schema": table({"type": text, "schema": mapping}, "schema")}),
                "task_budget": table({"type": one_of("tokens"), "total": integer, "remaining": integer}),
            }
        ),
        # what concerns neither here
        "metadata": table({"user_id": text}),
        "cache_control": mapping,
        "service_tier": text,
        "speed": text,
        "betas": list_of(text),
        "inference_geo": text,
        "user_profile_id": text,
        "workspace_id": text,
        "billing_policy": mapping,
        "diagnostics": mapping,
        "fallbacks": either((str, one_of("default")), (list, list_of(mapping))),
        "fallback_credit_token": either((str, text), (dict, mapping)),
        "context_management": table(
            {
                "edits": list_of(
                    tagged(
                        {
                            "clear_thinking_20251015": table(
                                {"type": text, "keep": either((str, one_of("all")), (dict, mapping))}
                            ),
                            "clear_tool_uses_20250919": refused(f"clear_tool_uses: {_OWN_HISTORY}"),
                            "compact_20260112": refused(f"compact: {_OWN_HISTORY}"),
                        }
                    )
                )
            }
        ),
        # what this proxy does not do
        "compaction": refused(_OWN_HISTORY),
        "container": refused(_NO_SERVER_TOOLS),
        "mcp_servers": list_of(refused(_NO_SERVER_TOOLS)),
        "thread": refused(STATELESS),
    }
)


def parse(body: Mapping) -> Request:
    """The request of a /v1/messages or /v1/messages/count_tokens body. Raises BadField."""
    prefilled = _begins_answer(body.get("messages"))
    reader, before = read(body, "messages", _BODY, Reader, left_out=int(prefilled))
    prefill = _prefill(body["messages"], before) if prefilled else ""
    system = reader.system(body.get("system") or "")
    messages = as_read([*([Message("system", system)] if system else []), *reader.messages])
    if not reader.messages or not messages:
        raise BadField("must hold at least one message to answer", "messages")
    tools = tuple(reader.top.values())
    loaded = tuple(tool for name, tool in reader.loaded.items() if name not in reader.top)
    choice = body.get("tool_choice") or {"type": "auto"}
    if choice["type"] == "none":
        tools = loaded = ()
    wish = {"any": "", "tool": choice.get("name")}.get(choice["type"])
    return Request(
        conversation=Conversation(messages, tools, loaded),
        model=body.get("model") or "gyre",
        stream=body.get("stream") or False,
        max_tokens=whole(body.get("max_tokens")),
        stop=tuple(body.get("stop_sequences") or ()),
        asked=_asked(body, choice),
        images=reader.images,
        prefill=prefill,
        forced=forced_tool(wish, tools + loaded, "tool_choice"),
        schema=((body.get("output_config") or {}).get("format") or {}).get("schema"),
    )


_ASKED = ("temperature", "top_p", "top_k", "thinking")


def _asked(body: Mapping, choice: Mapping) -> dict:
    asked = {}
    for source, fields in ((body, _ASKED), (body.get("output_config") or {}, ("effort", "task_budget"))):
        asked |= {field: source[field] for field in fields if source.get(field) is not None}
    if choice.get("disable_parallel_tool_use"):
        asked["disable_parallel_tool_use"] = True
    return asked


def _joined(first: Message, second: Message) -> Message:
    reasoning = "\n".join(filter(None, (first.reasoning, second.reasoning)))
    return Message("assistant", first.text + second.text, reasoning, first.tool_calls + second.tool_calls)


def _begins_answer(given: object) -> bool:
    """Whether the client began the answer: the last message is an assistant's."""
    last = given[-1] if isinstance(given, list) and given else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _prefill(given: list[Mapping], before: int) -> str:
    """The text of the answer that the client began with the last message of those given, behind `before` others."""
    where = ("messages", before + len(given) - 1, "content")
    content = given[-1]["content"]
    if isinstance(content, str):
        text = content
    else:
        if any(block["type"] != "text" for block in content):
            raise BadField("begins the answer, and may hold only text for that", *where)
        text = "".join(block["text"] for block in content)
    if text != text.rstrip():
        raise BadField("begins the answer, and cannot end with trailing whitespace", *where)
    return text


def _tool(tool: Mapping) -> dict:
    spec = function_tool(tool["name"], tool.get("description"), tool["input_schema"])
    if tool.get("input_examples"):
        spec["function"]["input_examples"] = tool["input_examples"]
    return spec


class Reader:
    """Turns checked blocks into text and messages; notes the images and the loaded tools it meets."""

    def __init__(self, tools: list[Mapping]) -> None:
        self._definitions = {tool["name"]: _tool(tool) for tool in tools}
        if len(self._definitions) < len(tools):
            raise BadField("names a tool twice", "tools")
        at_once = [tool["name"] for tool in tools if not tool.get("defer_loading")]
        self.top = {name: self._definitions[name] for name in at_once}
        self.messages: list[Message] = []
        self.images = 0
        self.loaded: dict[str, dict] = {}

    def add(self, item: Mapping) -> None:
        read = self._messages(item)
        if item["role"] == "assistant" and self.messages and self.messages[-1].role == "assistant":
            read = [_joined(self.messages.pop(), *read)]  # by the API's own rule they are one turn
        self.messages += read

    def system(self, content: str | list) -> str:
        texts = [content] if isinstance(content, str) else [block["text"] for block in content]
        return "\n".join(text for text in texts if not text.startswith(_BILLING))

    def _messages(self, item: Mapping) -> list[Message]:
        role, content = item["role"], item["content"]
        if isinstance(content, str):
            return [Message(role, content)]
        if role == "assistant":
            return [self._assistant(content)]
        if role == "system":
            return [Message("system", self._texts(content))]
        return self._user(content)

    def _user(self, blocks: list[Mapping]) -> list[Message]:
        """Tool results become messages of role "tool"; runs of text between them become user messages."""
        out: list[Message] = []
        texts: list[str] = []
        for block in blocks:
            if block["type"] == "tool_result":
                if texts:
                    out.append(Message("user", "\n".join(texts)))
                    texts = []
                content = block.get("content") or ""
                shown = content if isinstance(content, str) else self._texts(content)
                out.append(Message("tool", shown, call_id=block["tool_use_id"]))
            else:
                texts.append(self._text(block))
        if texts or not out:
            out.append(Message("user", "\n".join(texts)))
        return out

    def _assistant(self, blocks: list[Mapping]) -> Message:
        texts, reasoning, calls = [], [], []
        for block in blocks:
            kind = block["type"]
            if kind == "thinking":
                reasoning.append(block["thinking"])
            elif kind == "tool_use":
                calls.append(ToolCall(block["id"], block["name"], json_text(block["input"])))
            else:
                texts.append(block["text"])
        return Message("assistant", "".join(texts), "\n".join(reasoning), tuple(calls))

    def _texts(self, blocks: list[Mapping]) -> str:
        return "\n".join([self._text(block) for block in blocks])

    def _text(self, block: Mapping) -> str:
        """What the model sees of one block."""
        kind = block["type"]
        if kind == "text":
            return block["text"]
        if kind == "image":
            return self._image(block["source"])
        if kind == "tool_reference":
            return self._load(block["tool_name"])
        if kind == "document":
            return self._document(block)
        if kind == "search_result":
            return "\n".join((block["title"], block["source"], self._texts(block["content"])))
        tool = block["tool"]
        if kind == "tool_removal":
            self.loaded.pop(tool["name"], None)
            return f"Tool {tool['name']} is no longer available."
        if tool["type"] == "tool_reference":
            return self._load(tool["name"])
        definition = _tool(tool["definition"])
        self.loaded[definition["function"]["name"]] = definition
        return json_text(definition)

    def _image(self, source: Mapping) -> str:
        self.images += 1
        if source["type"] == "base64":
            return base64_image(source["media_type"], source["data"])
        return url_image(source["url"]) if source["type"] == "url" else image(f"file {source['file_id']}")

    def _document(self, block: Mapping) -> str:
        source = block["source"]
        content = source["data"] if source["type"] == "text" else source["content"]
        shown = content if isinstance(content, str) else self._texts(content)
        return "\n".join(filter(None, (block.get("title"), block.get("context"), shown)))

    def _load(self, name: str) -> str:
        """A tool loaded in mid-conversation is shown where it was loaded.

        The tool list at the top stays as it was.
        """
        definition = self._definitions.get(name)
        if definition is None:
            return f"Tool {name} is now available."
        self.loaded[name] = definition
        return json_text(definition)
