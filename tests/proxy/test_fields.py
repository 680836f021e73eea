"""Every field and kind of object that the official SDKs can send is used, or checked and inert, or refused by name."""

import copy
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsNonStreaming as BetaMessage
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as AnthropicMessage
from gyre_proxy.dialects import chat, messages, responses
from gyre_proxy.errors import BadRequest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Completion
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Response
from protocol_bodies import CHAT, MESSAGES, RESPONSES, user
from sdk_fields import fields, kinds, members, smallest

NOT_OFFERED = ("web_search", "image_generation")
"""Hosted tools that harnesses always list: nothing of them reaches the model."""
UNKNOWN = "is not supported by this proxy; remove it"
WRONG = (5, -1.5, "zz", True, [], {}, [5], ["zz"], {"zz": 5}, [[]], [{"type": "zz"}])
PARAMETERS = [
    (messages, MESSAGES, AnthropicMessage),
    (messages, MESSAGES, BetaMessage),
    (messages, MESSAGES, MessageCountTokensParams),
    (chat, CHAT, Completion),
    (responses, RESPONSES, Response),
]
FIELDS = [(dialect, body, name) for dialect, body, params in PARAMETERS for name in fields(params)]


def refused(dialect: Any, body: dict) -> BadRequest | None:
    try:
        dialect.parse(body)
    except BadRequest as error:
        return error
    return None


@pytest.mark.parametrize(("dialect", "body", "name"), FIELDS)
def test_a_field_of_the_sdk_is_known_and_its_type_is_checked(dialect, body, name):
    errors = [refused(dialect, {**body, name: wrong}) for wrong in WRONG]
    found = [error for error in errors if error is not None]
    assert all(error.param.startswith(name) for error in found) and len(found) >= len(WRONG) - 4
    assert not [e for e in found if e.param == name and UNKNOWN in str(e)]


def blocks(params: type, role: str) -> list[tuple[str, type]]:
    """The kinds of content blocks that a message of the role may hold."""
    (message,) = [m for m in members(fields(params)["messages"]) if smallest(m)["role"] == role]
    return kinds(fields(message)["content"])


def in_message(role: str):
    return lambda block: {"messages": [user("a"), {"role": role, "content": [block]}, user("b")]}


def in_field(name: str):
    return lambda value: {name: value}


def in_list(name: str):
    return lambda value: {name: [value]}


def in_chat_message(role: str):
    head = {"role": role, "tool_call_id": "t"} if role == "tool" else {"role": role}
    return lambda part: {"messages": [{**head, "content": [part]}]}


KINDS = [
    (dialect, body, place, kind, params)
    for dialect, body, place, found in (
        (messages, MESSAGES, in_message("user"), blocks(BetaMessage, "user")),
        (messages, MESSAGES, in_message("assistant"), blocks(BetaMessage, "assistant")),
        (messages, MESSAGES, in_message("system"), blocks(BetaMessage, "system")),
        (messages, MESSAGES, in_list("tools"), kinds(fields(BetaMessage)["tools"])),
        (messages, MESSAGES, in_field("tool_choice"), kinds(fields(BetaMessage)["tool_choice"])),
        (messages, MESSAGES, in_field("thinking"), kinds(fields(BetaMessage)["thinking"])),
        (chat, CHAT, in_list("tools"), kinds(fields(Completion)["tools"])),
        (chat, CHAT, in_field("tool_choice"), kinds(fields(Completion)["tool_choice"])),
        (chat, CHAT, in_field("response_format"), kinds(fields(Completion)["response_format"])),
        (chat, CHAT, in_chat_message("user"), blocks(Completion, "user")),
        (chat, CHAT, in_chat_message("system"), blocks(Completion, "system")),
        (chat, CHAT, in_chat_message("assistant"), blocks(Completion, "assistant")),
        (chat, CHAT, in_chat_message("tool"), blocks(Completion, "tool")),
        (responses, RESPONSES, in_list("tools"), kinds(fields(Response)["tools"])),
        (responses, RESPONSES, in_field("tool_choice"), kinds(fields(Response)["tool_choice"])),
        (responses, RESPONSES, in_list("input"), kinds(fields(Response)["input"])),
    )
    for kind, params in found
]


@pytest.mark.parametrize(("dialect", "body", "place", "kind", "params"), KINDS)
def test_a_kind_of_object_of_the_sdk_is_read_or_refused_by_its_name(dialect, body, place, kind, params):
    """And where it is read, each of its fields is known and has its type checked."""
    least = {**smallest(params), "type": kind}
    error = refused(dialect, {**body, **place(least)})
    if error is not None:
        assert kind in str(error) or "is missing" in str(error), error
        return
    if kind.startswith(NOT_OFFERED):
        return
    for name in fields(params):
        if name == "type":
            continue
        whole = [copy.deepcopy({**least, name: wrong}) for wrong in WRONG]
        errors = [e for value in whole if (e := refused(dialect, {**body, **place(value)})) is not None]
        named = [e for e in errors if f"{name}" in (e.param or "")]
        assert named, f"{kind}.{name} takes anything"
        assert not [e for e in named if e.param.endswith(f".{name}") and UNKNOWN in str(e)], (kind, name)
