"""Requests of three protocols become one conversation; what is not supported is refused by name."""

import base64
import copy
import json

import orjson
import pytest
from gyre_proxy.conversation import Answer, Message, ToolCall
from gyre_proxy.dialects import chat, messages, responses
from gyre_proxy.errors import BadRequest
from protocol_bodies import CHAT, MESSAGES, PARAMETERS, RESPONSES, SPEC, user


def test_three_protocols_give_one_conversation():
    parsed = [
        m.parse(b).conversation for m, b in ((messages, MESSAGES), (chat, CHAT), (responses, RESPONSES))
    ]
    assert parsed[0] == parsed[1] == parsed[2]
    assert parsed[0].tools == ({"type": "function", "function": SPEC},)
    assert [m.role for m in parsed[0].messages] == ["system", "user", "assistant", "tool", "user"]


def test_cache_marks_and_content_shape_make_no_difference():
    def body(content):
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    assert messages.parse(body(marked)).conversation == messages.parse(body("hi")).conversation


def test_the_billing_block_of_claude_code_is_not_shown_to_the_model():
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_is_subagent=true;"}
    body = {**MESSAGES, "system": [billing, *MESSAGES["system"]]}
    assert messages.parse(body).conversation == messages.parse(MESSAGES).conversation


def test_text_after_a_tool_call_is_the_same_turn_as_text_before_it():
    content = MESSAGES["messages"][1]["content"]
    moved = [*content[:1], content[2], content[1]]
    body = json.loads(json.dumps(MESSAGES))
    body["messages"][1]["content"] = moved
    assert messages.parse(body).conversation == messages.parse(MESSAGES).conversation


def test_system_messages_stay_where_they_are():
    body = {**MESSAGES, "messages": [*MESSAGES["messages"], {"role": "system", "content": "note"}]}
    assert messages.parse(body).conversation.messages[-1] == Message("system", "note")


def test_a_deferred_tool_is_shown_where_it_was_loaded():
    deferred = {"name": "late", "input_schema": PARAMETERS, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "late"}
    loaded = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    body = {
        **MESSAGES,
        "tools": [*MESSAGES["tools"], deferred],
        "messages": [*MESSAGES["messages"][:2], {"role": "user", "content": [loaded]}],
    }
    conversation = messages.parse(body).conversation
    assert conversation.tools == messages.parse(MESSAGES).conversation.tools
    assert json.loads(conversation.messages[-1].text)["function"]["name"] == "late"


def test_namespaced_and_custom_tools_come_back_as_the_client_named_them():
    agents = [{"type": "function", "name": "spawn", "parameters": PARAMETERS}]
    tools = [
        {"type": "namespace", "name": "agents", "tools": agents},
        {"type": "custom", "name": "patch", "description": "free text"},
        {"type": "web_search"},
    ]
    request = responses.parse({**RESPONSES, "tools": tools})
    assert [t["function"]["name"] for t in request.conversation.tools] == ["spawn", "patch"]
    calls = (ToolCall("c1", "spawn", '{"cmd": "x"}'), ToolCall("c2", "patch", '{"input": "*** Begin"}'))
    answer = responses.answer(request, Answer("a", 0, "", "", calls, "tool_calls", 1, 1))
    spawn, patch = answer["output"]
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")


def refusal(dialect, body):
    with pytest.raises(BadRequest) as caught:
        dialect.parse(body)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.param


def content(*blocks):
    return {"messages": [user(list(blocks))]}


def item(**fields):
    return {"input": [user("hi"), fields]}


UNSUPPORTED = [
    # (protocol, its body, what is changed, the field that is named, words of the reason)
    (messages, MESSAGES, {"mcp_servers": [{}]}, "mcp_servers[0]", "no server tools"),
    (messages, MESSAGES, {"container": "c"}, "container", "no server tools"),
    (messages, MESSAGES, {"thread": {"type": "create"}}, "thread", "stateless"),
    (messages, MESSAGES, {"compaction": {"type": "summarize"}}, "compaction", "history"),
    (
        messages,
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "w"}]},
        "tools[0].type",
        "web_search_20250305",
    ),
    (messages, MESSAGES, {"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
    (messages, MESSAGES, {"tools": MESSAGES["tools"] * 2}, "tools", "twice"),
    (messages, MESSAGES, {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "not in 'tools'"),
    (messages, {**MESSAGES, "tools": []}, {"tool_choice": {"type": "any"}}, "tool_choice", "needs 'tools'"),
    (
        messages,
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
        "missing",
    ),
    (messages, MESSAGES, {"stop_sequences": 5}, "stop_sequences", "list"),
    (messages, MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]", "not empty"),
    (messages, MESSAGES, {"stop_sequences": ["x"] * 65}, "stop_sequences", "at most 64"),
    (messages, MESSAGES, {"max_tokens": 0}, "max_tokens", "positive"),
    (messages, MESSAGES, {"messages": "hi"}, "messages", "list"),
    (messages, MESSAGES, {"messages": []}, "messages", "at least one"),
    (messages, MESSAGES, {"thinking": "on"}, "thinking", "object"),
    (messages, MESSAGES, {"thinking": {"type": "on"}}, "thinking.type", "enabled"),
    (messages, MESSAGES, {"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing"),
    (messages, MESSAGES, {"metadata": 5}, "metadata", "object"),
    (
        messages,
        MESSAGES,
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
        "clear_tool_uses",
    ),
    (messages, MESSAGES, content({"type": "text"}), "messages[0].content[0].text", "missing"),
    (messages, MESSAGES, content({"type": "video"}), "messages[0].content[0].type", "video"),
    (messages, MESSAGES, content({"type": "document"}), "messages[0].content[0].source", "missing"),
    (
        messages,
        MESSAGES,
        content(
            {"type": "document", "source": {"type": "base64", "data": "", "media_type": "application/pdf"}}
        ),
        "messages[0].content[0].source",
        "PDF",
    ),
    (
        messages,
        MESSAGES,
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": [{"type": "redacted_thinking"}]},
                user("b"),
            ]
        },
        "messages[1].content[0]",
        "redacted_thinking",
    ),
    (
        messages,
        MESSAGES,
        {"messages": [user("a"), {"role": "assistant", "content": [{"type": "server_tool_use"}]}, user("b")]},
        "messages[1].content[0]",
        "server_tool_use",
    ),
    (
        messages,
        MESSAGES,
        {"messages": [user("a"), {"role": "assistant", "content": "begun \n"}]},
        "messages[1].content",
        "trailing whitespace",
    ),
    (chat, CHAT, {"n": 2}, "n", "n > 1"),
    (chat, CHAT, {"logprobs": True}, "logprobs", "recorded"),
    (chat, CHAT, {"logit_bias": {"1": 1}}, "logit_bias.1", "remove"),
    (chat, CHAT, {"functions": [SPEC]}, "functions[0]", "deprecated"),
    (chat, CHAT, {"web_search_options": {}}, "web_search_options", "no hosted tools"),
    (chat, CHAT, {"modalities": ["text", "audio"]}, "modalities[1]", "audio"),
    (chat, CHAT, {"seed": "x"}, "seed", "integer"),
    (chat, CHAT, {"seed": True}, "seed", "integer"),
    (chat, CHAT, {"temperature": "hot"}, "temperature", "number"),
    (chat, CHAT, {"store": "x"}, "store", "true or false"),
    (chat, CHAT, {"stream": "yes"}, "stream", "true or false"),
    (chat, CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    (chat, CHAT, {"messages": []}, "messages", "at least one"),
    (chat, CHAT, content({"type": "image_url"}), "messages[0].content[0].image_url", "missing"),
    (chat, CHAT, content({"type": "input_audio"}), "messages[0].content[0]", "input_audio"),
    (chat, CHAT, content({"type": "file"}), "messages[0].content[0]", "file"),
    (
        chat,
        CHAT,
        {"messages": [{"role": "function", "name": "f", "content": "x"}]},
        "messages[0]",
        "deprecated",
    ),
    (chat, CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role", "robot"),
    (chat, CHAT, {"tools": [{"type": "custom"}]}, "tools[0]", "custom"),
    (
        chat,
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        "object",
    ),
    (chat, CHAT, {"tool_choice": "any"}, "tool_choice", "required"),
    (
        chat,
        CHAT,
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "the proxy itself",
    ),
    (
        chat,
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "s"}}},
        "response_format.json_schema.schema",
        "object",
    ),
    (responses, RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "stateless"),
    (responses, RESPONSES, {"conversation": "c"}, "conversation", "stateless"),
    (responses, RESPONSES, {"background": True}, "background", "stateless"),
    (responses, RESPONSES, {"prompt": {"id": "p"}}, "prompt", "stores no prompts"),
    (responses, RESPONSES, {"reasoning": []}, "reasoning", "object"),
    (responses, RESPONSES, {"include": ["message.output_text.logprobs"]}, "include[0]", "logprobs"),
    (responses, RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
    (responses, RESPONSES, item(type="compaction", encrypted_content="x"), "input[1]", "compaction"),
    (responses, RESPONSES, item(type="web_search_call", id="x"), "input[1].type", "web_search_call"),
    (responses, RESPONSES, item(type="function_call_output", output="x"), "input[1].call_id", "missing"),
    (responses, RESPONSES, {"truncation": "auto"}, "truncation", "disabled"),
    (responses, RESPONSES, {"tools": [{"type": "mcp"}]}, "tools[0]", "mcp"),
    (responses, RESPONSES, {"tools": [{"type": "local_shell"}]}, "tools[0]", "local_shell"),
    (
        responses,
        RESPONSES,
        {"tools": [{"type": "tool_search", "execution": "server"}]},
        "tools[0].execution",
        "hosted",
    ),
    (
        responses,
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema",
        "missing",
    ),
]


@pytest.mark.parametrize(("dialect", "body", "change", "field", "words"), UNSUPPORTED)
def test_unsupported_requests_are_refused_by_name(dialect, body, change, field, words):
    message, param = refusal(dialect, {**body, **change})
    assert param == field and words in message and repr(field) in message


@pytest.mark.parametrize("dialect_body", [(messages, MESSAGES), (chat, CHAT), (responses, RESPONSES)])
def test_unknown_fields_are_refused_unless_they_are_empty(dialect_body):
    dialect, body = dialect_body
    for empty in (None, [], {}, "", False):
        assert dialect.parse({**body, "unheard_of": empty}) == dialect.parse(body)
    message, param = refusal(dialect, {**body, "unheard_of\n" + "x" * 500: 1})
    assert "not supported" in message and len(message) < 200 and param.startswith("unheard_of")


@pytest.mark.parametrize("field", ["previous_response_id", "background", "conversation", "prompt"])
def test_fields_that_ask_for_nothing_are_accepted(field):
    responses.parse({**RESPONSES, field: None})


# --- images and documents

PNG = base64.b64encode(b"x" * 4213).decode()
SEEN = "[image image/png, 4213 bytes: this model reads text only]"
BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
DATA_URL = f"data:image/png;base64,{PNG}"
IMAGES = [
    (messages, {"messages": [user([{"type": "text", "text": "a"}, BASE64])]}),
    (
        chat,
        {
            "messages": [
                user([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": DATA_URL}}])
            ]
        },
    ),
    (
        responses,
        {
            "input": [
                user([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": DATA_URL}])
            ]
        },
    ),
]


@pytest.mark.parametrize(("dialect", "body"), IMAGES)
def test_an_image_is_a_line_of_text_where_it_stands(dialect, body):
    request = dialect.parse(body)
    assert request.conversation.messages == (Message("user", f"a\n{SEEN}"),) and request.images == 1


def test_images_inside_tool_results_are_seen_and_counted():
    result = {"type": "tool_result", "tool_use_id": "t", "content": [BASE64, BASE64]}
    call = {
        "type": "function_call_output",
        "call_id": "t",
        "output": [{"type": "input_image", "image_url": DATA_URL}],
    }
    picture = {
        "role": "tool",
        "tool_call_id": "t",
        "content": [{"type": "image_url", "image_url": {"url": DATA_URL}}],
    }
    for request, count in (
        (messages.parse({"messages": [user([result])]}), 2),
        (responses.parse({"input": [call]}), 1),
        (chat.parse({"messages": [picture]}), 1),
    ):
        shown = Message("tool", "\n".join([SEEN] * count), call_id="t")
        assert request.conversation.messages == (shown,) and request.images == count


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        (
            {"type": "url", "url": "https://host/a.png"},
            "[image https://host/a.png: this model reads text only]",
        ),
        ({"type": "url", "url": "data:image/svg+xml,%3Csvg%3E"}, "image/svg+xml, 5 bytes"),
        ({"type": "file", "file_id": "file_1"}, "[image file file_1: this model reads text only]"),
        ({"type": "base64", "media_type": "image/gif", "data": ""}, "image/gif, 0 bytes"),
        ({"type": "base64", "media_type": "image/gif", "data": "QQ=="}, "image/gif, 1 bytes"),
    ],
)
def test_images_by_address_and_by_file_show_what_names_them(source, seen):
    request = messages.parse(content({"type": "image", "source": source}))
    assert seen in request.conversation.messages[0].text


def test_a_long_address_does_not_fill_the_prompt():
    source = {"type": "url", "url": "https://host/" + "a" * 10**6}
    request = messages.parse(content({"type": "image", "source": source}))
    assert len(request.conversation.messages[0].text) < 3000


def test_plain_documents_and_search_results_are_their_text():
    plain = {"type": "text", "media_type": "text/plain", "data": "the text"}
    document = {"type": "document", "title": "T", "context": "C", "source": plain}
    blocks = {
        "type": "document",
        "source": {"type": "content", "content": [{"type": "text", "text": "part"}]},
    }
    found = {
        "type": "search_result",
        "title": "R",
        "source": "https://host",
        "content": [{"type": "text", "text": "hit"}],
    }
    request = messages.parse(content(document, blocks, found))
    assert request.conversation.messages[0].text == "T\nC\nthe text\npart\nR\nhttps://host\nhit"


# --- tools that come later, kinds of tools

SEARCHED = {"type": "function", "name": "late", "defer_loading": True, "parameters": PARAMETERS}


def functions(tools):
    return [tool["function"]["name"] for tool in tools]


def test_tools_that_a_message_adds_may_be_called_and_are_in_no_list():
    deferred = {"name": "late", "input_schema": PARAMETERS, "defer_loading": True}
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}
    defined = {"type": "tool_definition", "definition": {"name": "new", "input_schema": PARAMETERS}}
    system = {"role": "system", "content": [added, {"type": "tool_addition", "tool": defined}]}
    body = {**MESSAGES, "tools": [*MESSAGES["tools"], deferred], "messages": [*MESSAGES["messages"], system]}
    conversation = messages.parse(body).conversation
    assert functions(conversation.tools) == ["shell"] and functions(conversation.loaded) == ["late", "new"]
    assert functions(conversation.offered) == ["shell", "late", "new"]
    shown = [json.loads(line) for line in conversation.messages[-1].text.split("\n")]
    assert shown == list(conversation.loaded)
    gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "late"}}
    body["messages"].append({"role": "system", "content": [gone]})
    later = messages.parse(body).conversation
    assert functions(later.loaded) == ["new"] and "late is no longer available" in later.messages[-1].text


def test_examples_of_a_tools_input_are_shown():
    tool = {**MESSAGES["tools"][0], "input_examples": [{"cmd": "ls"}]}
    assert messages.parse({**MESSAGES, "tools": [tool]}).conversation.tools[0]["function"][
        "input_examples"
    ] == [{"cmd": "ls"}]


def test_additional_tools_before_everything_are_the_tool_list():
    inner = [
        {"type": "custom", "name": "exec"},
        {"type": "function", "name": "wait", "parameters": PARAMETERS},
    ]
    added = {
        "type": "additional_tools",
        "id": "at_1",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "description": "", "tools": inner}],
    }
    request = responses.parse({"model": "m", "input": [added, *RESPONSES["input"]]})
    assert functions(request.conversation.tools) == ["exec", "wait"] and request.conversation.loaded == ()
    assert request.tool_kinds["exec"] == {"name": "exec", "namespace": "functions", "custom": "yes"}
    call = ToolCall("c1", "exec", '{"input": "1 + 1"}')
    (made,) = responses.answer(request, Answer("a", 0, "", "", (call,), "tool_calls", 1, 1))["output"]
    assert (made["type"], made["input"], made["namespace"]) == ("custom_tool_call", "1 + 1", "functions")
    again = responses.parse({"input": [added, user("x"), {k: v for k, v in made.items() if k != "status"}]})
    assert again.conversation.messages[-1].tool_calls == (ToolCall("c1", "exec", '{"input":"1 + 1"}'),)


def test_additional_tools_later_are_shown_where_they_stand():
    added = {"type": "additional_tools", "tools": [SEARCHED]}
    request = responses.parse({**RESPONSES, "input": [*RESPONSES["input"], added]})
    before = responses.parse(RESPONSES).conversation
    assert request.conversation.tools == before.tools
    assert request.conversation.messages[:-1] == before.messages
    assert json.loads(request.conversation.messages[-1].text) == request.conversation.loaded[0]


def test_a_clients_tool_search_is_a_function_and_what_it_finds_is_loaded():
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "Find tools.",
        "parameters": PARAMETERS,
    }
    hidden = {"type": "namespace", "name": "crm", "tools": [SEARCHED]}
    body = {"model": "m", "tools": [search, hidden], "input": [user("look")]}
    request = responses.parse(body)
    assert functions(request.conversation.tools) == ["tool_search"]
    call = ToolCall("c1", "tool_search", '{"cmd": "late"}')
    answered = json.loads(
        orjson.dumps(responses.answer(request, Answer("a", 0, "", "", (call,), "tool_calls", 1, 1)))
    )
    (made,) = answered["output"]
    assert made == {
        "id": "tsc_c1",
        "type": "tool_search_call",
        "call_id": "c1",
        "status": "completed",
        "execution": "client",
        "arguments": {"cmd": "late"},
    }
    found = {"type": "tool_search_output", "call_id": "c1", "status": "completed", "execution": "client"}
    body["input"] += [made, {**found, "tools": [hidden]}]
    request = responses.parse(body)
    assert functions(request.conversation.tools) == ["tool_search"]
    assert functions(request.conversation.loaded) == ["late"]
    assert request.conversation.messages[-2].tool_calls[0].parsed() == {"cmd": "late"}
    assert json.loads(request.conversation.messages[-1].text) == request.conversation.loaded[0]
    assert request.tool_kinds["late"] == {"name": "late", "namespace": "crm"}


def test_tools_of_one_name_in_two_namespaces_are_told_apart():
    spaces = [
        {"type": "namespace", "name": n, "tools": [{"type": "function", "name": "wait", "description": n}]}
        for n in ("a", "b")
    ]
    body = {"tools": [*spaces, {"type": "function", "name": "wait"}], "input": "hi"}
    request = responses.parse(body)
    assert functions(request.conversation.tools) == ["wait", "b__wait", "tool__wait"]
    calls = tuple(
        ToolCall(f"c{i}", name, "{}") for i, name in enumerate(functions(request.conversation.tools))
    )
    made = responses.answer(request, Answer("a", 0, "", "", calls, "tool_calls", 1, 1))["output"]
    assert [(c["name"], c.get("namespace")) for c in made] == [("wait", "a"), ("wait", "b"), ("wait", None)]
    again = responses.parse({**body, "input": [user("hi"), *made]})
    assert again.conversation.messages[-1].tool_calls == calls


def test_the_grammar_of_a_custom_tool_and_words_about_a_namespace_reach_the_model():
    form = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    inner = [{"type": "custom", "name": "exec", "description": "Run it.", "format": form}]
    space = {"type": "namespace", "name": "functions", "description": "Of the shell.", "tools": inner}
    tool = responses.parse({"tools": [space], "input": "hi"}).conversation.tools[0]["function"]
    assert tool["description"].split("\n\n") == [
        "Of the shell.",
        "Run it.",
        "The input follows this lark grammar:\nstart: WORD",
    ]


def test_messages_between_agents_say_who_speaks():
    given = item(
        type="agent_message", author="/root", recipient="/a", content=[{"type": "input_text", "text": "go"}]
    )
    assert responses.parse(given).conversation.messages[-1] == Message("user", "[/root to /a]\ngo")


# --- how the answer shall be


def test_a_begun_answer_is_no_message():
    begun = {"role": "assistant", "content": [{"type": "text", "text": "{"}]}
    request = messages.parse({**MESSAGES, "messages": [*MESSAGES["messages"], begun]})
    assert request.prefill == "{"
    assert request.conversation == messages.parse(MESSAGES).conversation
    empty = {"role": "assistant", "content": ""}
    assert messages.parse({"messages": [user("x"), empty]}).prefill == ""
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    assert refusal(messages, {"messages": [user("x"), use]})[1] == "messages[1].content"


@pytest.mark.parametrize(
    ("dialect", "body", "choices"),
    [
        (
            messages,
            MESSAGES,
            [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "shell"}, {"type": "none"}],
        ),
        (chat, CHAT, ["auto", "required", {"type": "function", "function": {"name": "shell"}}, "none"]),
        (responses, RESPONSES, ["auto", "required", {"type": "function", "name": "shell"}, "none"]),
    ],
)
def test_the_forced_tool_is_known(dialect, body, choices):
    requests = [dialect.parse({**body, "tool_choice": choice}) for choice in choices]
    assert [r.forced for r in requests] == [None, "", "shell", None]
    assert [functions(r.conversation.tools) for r in requests] == [["shell"]] * 3 + [[]]
    with pytest.raises(BadRequest, match="tool_choice"):
        dialect.parse({**body, "tools": [], "tool_choice": choices[1]})


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("dialect", "body", "change", "schema"),
    [
        (
            messages,
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            SCHEMA,
        ),
        (chat, CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, SCHEMA),
        (chat, CHAT, {"response_format": {"type": "json_object"}}, {"type": "object"}),
        (chat, CHAT, {"response_format": {"type": "text"}}, None),
        (responses, RESPONSES, {"text": {"format": {"type": "json_schema", **NAMED}}}, SCHEMA),
        (responses, RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
        (responses, RESPONSES, {"text": {"verbosity": "low"}}, None),
    ],
)
def test_the_schema_of_the_answers_text_is_known(dialect, body, change, schema):
    assert dialect.parse({**body, **change}).schema == schema


def test_template_arguments_are_part_of_the_conversation():
    off = chat.parse({**CHAT, "chat_template_kwargs": {"enable_thinking": False}})
    assert off.conversation.template_arguments == {"enable_thinking": False}
    assert off.conversation != chat.parse(CHAT).conversation


@pytest.mark.parametrize(
    ("dialect", "body", "change", "asked"),
    [
        (messages, MESSAGES, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        (messages, MESSAGES, {"output_config": {"effort": "max"}, "top_k": 5}, {"effort": "max", "top_k": 5}),
        (
            messages,
            MESSAGES,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"disable_parallel_tool_use": True},
        ),
        (
            chat,
            CHAT,
            {"reasoning_effort": "low", "parallel_tool_calls": False, "temperature": 0},
            {"reasoning_effort": "low", "parallel_tool_calls": False, "temperature": 0},
        ),
        (chat, CHAT, {"parallel_tool_calls": True}, {}),
        (responses, RESPONSES, {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "low"}}),
    ],
)
def test_what_clients_say_of_sampling_and_thinking_is_noted(dialect, body, change, asked):
    request = dialect.parse({**body, **change})
    assert request.asked == asked
    assert request.conversation == dialect.parse(body).conversation


def test_tool_input_that_is_no_object_is_read_as_it_is():
    body = copy.deepcopy(MESSAGES)
    body["messages"][1]["content"][2]["input"] = ["x"]
    assert messages.parse(body).conversation.messages[2].tool_calls[0].arguments == '["x"]'


@pytest.mark.parametrize(
    ("dialect", "field", "message"),
    [
        (messages, "messages", {"role": "assistant", "content": []}),
        (chat, "messages", {"role": "assistant", "content": ""}),
        (chat, "messages", {"role": "assistant", "content": None}),
        (responses, "input", {"role": "assistant", "content": ""}),
        (responses, "input", {"type": "reasoning", "summary": []}),
        (responses, "input", {"type": "additional_tools", "tools": []}),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_request_of_messages_that_say_nothing_is_refused_or_has_a_message(dialect, field, message, count):
    try:
        assert dialect.parse({field: [message] * count}).conversation.messages
    except BadRequest as error:
        assert error.param == field
