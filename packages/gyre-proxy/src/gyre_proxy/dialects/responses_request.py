"""Owns requests of the OpenAI Responses protocol: what each field and item may hold, and the Conversation they mean.

Stateless: the whole history comes with each request. Hosted web search and image generation, which Codex always
lists, are not offered to the model, because nobody here could run them. A custom tool is offered as a function with
one text `input`, a client's tool search as a function of its own; `tool_kinds` says how answers name them. Tools that
an input item brings are part of the tool list when they stand before everything else; later ones are shown where
they stand, so that the prompt before them stays as it was.
"""

from collections.abc import Iterable, Mapping

from gyre_proxy.conversation import Conversation, Message, Request, ToolCall, as_read
from gyre_proxy.dialects.checks import (
    STATELESS,
    BadField,
    any_list,
    either,
    flag,
    list_of,
    mapping,
    name,
    one_of,
    positive,
    refused,
    refused_unless,
    table,
    tagged,
    text,
    whole,
)
from gyre_proxy.dialects.content import image, image_url, url_image
from gyre_proxy.dialects.openai import (
    ANSWER,
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    INERT,
    NO_HOSTED_TOOLS,
    TEXT_ONLY,
    asked,
    text_format,
)
from gyre_proxy.dialects.readings import read
from gyre_proxy.dialects.tools import arguments, forced_tool, function_tool, json_text

SEARCH = "tool_search"
_CALLS = frozenset(("function_call", "custom_tool_call", "tool_search_call"))
_OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output"))
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_SEARCH_INPUT = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
_ENCRYPTED = "what is encrypted for another model cannot be read here"
_NOT_RUN = "this proxy does not know how to offer it; offer a function"

# --- what fields may hold

_TEXT = table({"type": text, "text": text, "annotations": any_list, "logprobs": any_list}, "text")
_PARTS = tagged(
    {
        "input_text": _TEXT,
        "output_text": _TEXT,
        "text": _TEXT,
        "refusal": table({"type": text, "refusal": text}, "refusal"),
        "input_image": table({"type": text, "image_url": image_url, "file_id": text, "detail": text}),
        "input_file": refused(f"input_file: {TEXT_ONLY}"),
        "input_audio": refused(f"input_audio: {TEXT_ONLY}"),
        "encrypted_content": refused(_ENCRYPTED),
    }
)
_CONTENT = either((str, text), (list, list_of(_PARTS)))
_FUNCTION = table({"type": text, **FUNCTION_FIELDS, "defer_loading": flag}, "name")
_CUSTOM = table(
    {
        "type": text,
        "name": name,
        "description": text,
        "defer_loading": flag,
        "format": tagged(
            {
                "text": table({"type": text}),
                "grammar": table({"type": text, "syntax": text, "definition": text}, "syntax definition"),
            }
        ),
    },
    "name",
)
_NAMESPACE = table(
    {
        "type": text,
        "name": name,
        "description": text,
        "tools": list_of(tagged({"function": _FUNCTION, "custom": _CUSTOM})),
    },
    "name",
)
_TOOLS = list_of(
    tagged(
        {
            "function": _FUNCTION,
            "custom": _CUSTOM,
            "namespace": _NAMESPACE,
            SEARCH: table(
                {
                    "type": text,
                    "execution": refused_unless("client", NO_HOSTED_TOOLS),
                    "description": text,
                    "parameters": mapping,
                },
                "execution",
            ),
            # listed by harnesses whether they are used or not
            "web_search": mapping,
            "web_search_2025_08_26": mapping,
            "web_search_preview": mapping,
            "web_search_preview_2025_03_11": mapping,
            "image_generation": mapping,
            "file_search": refused(f"file_search: {NO_HOSTED_TOOLS}"),
            "code_interpreter": refused(f"code_interpreter: {NO_HOSTED_TOOLS}"),
            "mcp": refused(f"mcp: {NO_HOSTED_TOOLS}"),
            "computer_use_preview": refused(f"computer_use_preview: {_NOT_RUN}"),
            "local_shell": refused(f"local_shell: {_NOT_RUN}"),
            "shell": refused(f"shell: {_NOT_RUN}"),
            "apply_patch": refused(f"apply_patch: {_NOT_RUN}"),
        }
    )
)
_ITEM = {
    "type": text,
    "id": text,
    "status": text,
    "internal_chat_message_metadata_passthrough": mapping,
}
_MESSAGE = table(
    {
        **_ITEM,
        "role": one_of("user", "assistant", "system", "developer"),
        "content": _CONTENT,
        "phase": text,
    },
    "role content",
)
_OUTPUT = table({**_ITEM, "call_id": text, "name": text, "namespace": text, "output": _CONTENT}, "call_id")
_ITEMS = tagged(
    {
        None: _MESSAGE,
        "message": _MESSAGE,
        "agent_message": table(
            {**_ITEM, "author": text, "recipient": text, "content": _CONTENT}, "author recipient content"
        ),
        "reasoning": table(
            {
                **_ITEM,
                "summary": list_of(tagged({"summary_text": _TEXT})),
                "content": list_of(tagged({"reasoning_text": _TEXT, "text": _TEXT})),
                "encrypted_content": text,
            }
        ),
        "function_call": table(
            {**_ITEM, "call_id": text, "name": text, "namespace": text, "arguments": arguments},
            "call_id name arguments",
        ),
        "custom_tool_call": table(
            {**_ITEM, "call_id": text, "name": text, "namespace": text, "input": text}, "call_id name input"
        ),
        "tool_search_call": table(
            {
                **_ITEM,
                "call_id": text,
                "execution": refused_unless("client", NO_HOSTED_TOOLS),
                "arguments": either((dict, mapping), (str, arguments)),
            },
            "call_id",
        ),
        "function_call_output": _OUTPUT,
        "custom_tool_call_output": _OUTPUT,
        "tool_search_output": table(
            {
                **_ITEM,
                "call_id": text,
                "execution": refused_unless("client", NO_HOSTED_TOOLS),
                "tools": _TOOLS,
            },
            "call_id",
        ),
        "additional_tools": table({**_ITEM, "role": text, "tools": _TOOLS}, "tools"),
        "item_reference": refused(f"item_reference: {STATELESS}"),
        "compaction": refused(f"compaction: {_ENCRYPTED}"),
        "compaction_summary": refused(f"compaction_summary: {_ENCRYPTED}"),
        "context_compaction": refused(f"context_compaction: {_ENCRYPTED}"),
    }
)
_BODY = table(
    {
        # what the prompt is made of
        "model": text,
        "instructions": text,
        "input": either((str, text), (list, list_of(_ITEMS))),
        "tools": _TOOLS,
        "tool_choice": either(
            (str, one_of("none", "auto", "required")),
            (
                dict,
                tagged(
                    {
                        "function": table({"type": text, "name": name, "namespace": text}, "name"),
                        "custom": table({"type": text, "name": name, "namespace": text}, "name"),
                        "allowed_tools": refused("allowed_tools: offer only the tools that may be called"),
                    }
                ),
            ),
        ),
        # how the answer is made
        **ANSWER,
        "max_output_tokens": positive,
        "stream_options": table({"include_obfuscation": flag}),
        "reasoning": table({"effort": text, "summary": text, "generate_summary": text, "context": text}),
        "text": table(
            {
                "format": text_format(table({"type": text, **FORMAT_FIELDS}, "schema")),
                "verbosity": text,
            }
        ),
        "truncation": refused_unless("disabled", "the proxy does not edit the history; send disabled"),
        "include": list_of(
            one_of(
                "reasoning.encrypted_content",
                "message.input_image.image_url",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
            )
        ),
        # what concerns neither here
        **INERT,
        "client_metadata": mapping,
        "max_tool_calls": positive,
        # what this proxy does not do
        "background": refused_unless(False, STATELESS),
        "previous_response_id": refused(STATELESS),
        "conversation": refused(STATELESS),
        "prompt": refused("the proxy stores no prompts; send the text"),
    }
)


_ECHOED = ("instructions", "metadata", "prompt_cache_key", "text", "tool_choice", "tools")

# --- what they mean


def parse(body: Mapping) -> Request:
    """The request of a /v1/responses body. Raises BadField."""
    reader, _ = read(body, "input", _BODY, Reader)
    messages = [] if body.get("instructions") is None else [Message("system", body["instructions"])]
    messages += reader.messages
    messages += reader.turn()
    if isinstance(given := body.get("input"), str):
        messages.append(Message("user", given))
    messages = as_read(messages)
    if not messages:
        raise BadField("must hold at least one item", "input")
    tools, loaded = reader.offers()
    choice = body.get("tool_choice") or "auto"
    if choice == "none":
        tools = loaded = ()
    wish = "" if choice == "required" else None
    if isinstance(choice, dict):
        wish = reader.offered(choice["name"], choice.get("namespace"))
    text_wish = body.get("text") or {}
    return Request(
        conversation=Conversation(messages, tools, loaded),
        model=body.get("model") or "gyre",
        stream=body.get("stream") or False,
        max_tokens=whole(body.get("max_output_tokens")),
        asked=asked(body, "reasoning"),
        echoed={name: body[name] for name in _ECHOED if body.get(name) is not None},
        tool_kinds=reader.kinds,
        images=reader.images,
        forced=forced_tool(wish, tools + loaded, "tool_choice"),
        schema=_schema(text_wish.get("format") or {}),
    )


def _schema(text_format: Mapping) -> dict | None:
    if text_format.get("type", "text") == "text":
        return None
    return text_format.get("schema") or {"type": "object"}


class Reader:
    """Turns checked items into messages, checked tools into functions; notes how answers must name them."""

    def __init__(self, tools: Iterable[Mapping]) -> None:
        self.kinds: dict[str, dict[str, str]] = {}
        self.top: dict[str, dict] = {}
        self.messages: list[Message] = []
        """Without the turn that is being read."""
        self.images = 0
        self._loaded: dict[str, dict] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._offer_all(tools, self.top)

    def offers(self) -> tuple[tuple[dict, ...], tuple[dict, ...]]:
        """The tools of the list at the top, and those offered later."""
        later = (tool for name, tool in self._loaded.items() if name not in self.top)
        return tuple(self.top.values()), tuple(later)

    def offered(self, name: str, namespace: str | None) -> str:
        """The name by which the model knows a client's tool."""
        return self._names.get((namespace, name), name)

    def _offer_all(self, tools: Iterable[Mapping], into: dict[str, dict]) -> list[dict]:
        """Offer the tools; returns their functions."""
        functions = []
        for tool in tools:
            kind = tool["type"]
            if kind in ("function", "custom"):
                functions += self._offer(tool, into)
            elif kind == "namespace":
                for inner in tool.get("tools") or ():
                    functions += self._offer(inner, into, tool["name"], tool.get("description"))
            elif kind == SEARCH:
                parameters = tool.get("parameters") or _SEARCH_INPUT
                found = {"name": SEARCH, "description": tool.get("description"), "parameters": parameters}
                functions += self._offer({"type": SEARCH, **found}, into)
        return functions

    def _offer(
        self, tool: Mapping, into: dict[str, dict], namespace: str | None = None, about: str | None = None
    ) -> list[dict]:
        """One function, or none for a tool that waits to be found; `about` describes its namespace."""
        if tool.get("defer_loading") and into is self.top:
            return []
        name = tool["name"]
        offered = self._free_name(name, namespace)
        description = "\n\n".join(filter(None, (about, tool.get("description"), _grammar(tool))))
        parameters = _CUSTOM_INPUT if tool["type"] == "custom" else tool.get("parameters")
        into[offered] = function_tool(offered, description, parameters)
        kind = {"name": name}
        if namespace is not None:
            kind["namespace"] = namespace
        if tool["type"] != "function":
            kind[tool["type"]] = "yes"
        self.kinds[offered] = kind
        return [into[offered]]

    def _free_name(self, name: str, namespace: str | None) -> str:
        """The plain name, unless a tool of another namespace has it."""
        known = self._names.get((namespace, name))
        if known is None:
            known = name
            while known in self.kinds:
                known = f"{namespace or 'tool'}__{known}"
            self._names[namespace, name] = known
        return known

    def turn(self) -> list[Message]:
        """The assistant's turn that is being read: reasoning, text and calls that follow each other."""
        if not (self._texts or self._calls or self._reasoning):
            return []
        reasoning = "\n".join(self._reasoning)
        return [Message("assistant", "".join(self._texts), reasoning, tuple(self._calls))]

    def _ends_turn(self) -> None:
        self.messages += self.turn()
        self._texts, self._reasoning, self._calls = [], [], []

    def add(self, item: Mapping) -> None:
        kind = item.get("type") or "message"
        if kind in _CALLS:
            self._calls.append(self._call(kind, item))
        elif kind == "message" and item["role"] == "assistant":
            self._texts.append(self._text(item["content"], ""))
        elif kind == "reasoning":
            self._reasoning += [part["text"] for part in item.get("content") or item.get("summary") or ()]
        else:
            self._ends_turn()
            self._add_other(kind, item)

    def _add_other(self, kind: str, item: Mapping) -> None:
        """What no assistant says."""
        out = self.messages
        if kind in _OUTPUTS:
            out.append(Message("tool", self._text(item.get("output"), "\n"), call_id=item["call_id"]))
        elif kind == "message":
            role = "user" if item["role"] == "user" else "system"
            out.append(Message(role, self._text(item["content"], "\n")))
        elif kind == "additional_tools":
            functions = self._offer_all(item["tools"], self._loaded if out else self.top)
            if out and functions:
                out.append(Message("system", "\n".join(map(json_text, functions))))
        elif kind == "tool_search_output":
            functions = self._offer_all(item.get("tools") or (), self._loaded)
            out.append(Message("tool", "\n".join(map(json_text, functions)), call_id=item["call_id"]))
        else:  # agent_message
            words = self._text(item["content"], "\n")
            out.append(Message("user", f"[{item['author']} to {item['recipient']}]\n{words}"))

    def _call(self, kind: str, item: Mapping) -> ToolCall:
        if kind == "tool_search_call":
            given = item.get("arguments")
            return ToolCall(
                item["call_id"], SEARCH, given if isinstance(given, str) else json_text(given or {})
            )
        name = self.offered(item["name"], item.get("namespace"))
        if kind == "custom_tool_call":
            return ToolCall(item["call_id"], name, json_text({"input": item["input"]}))
        return ToolCall(item["call_id"], name, item["arguments"])

    def _text(self, content: str | list | None, joiner: str) -> str:
        if type(content) is str:
            return content
        return joiner.join([self._part(part) for part in content]) if content else ""

    def _part(self, part: Mapping) -> str:
        kind = part["type"]
        if kind != "input_image":
            return part["refusal" if kind == "refusal" else "text"]
        self.images += 1
        url = part.get("image_url")
        return url_image(url) if url else image(f"file {part.get('file_id')}")


def _grammar(tool: Mapping) -> str | None:
    """What a custom tool's input must look like, in words for the model."""
    form = tool.get("format") or {}
    if form.get("type") != "grammar":
        return None
    return f"The input follows this {form['syntax']} grammar:\n{form['definition']}"
