"""The official SDKs against a real server: three protocols, streaming and not, tools, three turns."""

import json

import anthropic
import openai
import pydantic
import pytest
from fuzz_bodies import ALL

ECHO = {"role": "assistant", "content": "Fine."}
CALL = (
    "<think>\nlook\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls"}}\n</tool_call>'
)
SCRIPT = [CALL, "Two files.", "Bye é☃."]
PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


def check_three_turns(proxy, engine):
    """Each prompt extends the one before plus its answer, byte for byte."""
    first, second, third = proxy.calls()
    assert (first.parent, second.parent, third.parent) == (None, first.id, second.id)
    path = []
    for call, request in zip((first, second, third), engine.requests, strict=True):
        path += call.input_ids.tolist()
        assert request["input_ids"] == path
        path += call.output_ids.tolist()
        assert call.finish == "stop" and call.versions == [[0, 0, len(call.output_ids)]]
    assert len({call.id for call in proxy.calls()}) == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_sdk_holds_a_three_turn_conversation_with_a_tool(scene, streaming):
    proxy, engine = scene(SCRIPT)
    client = anthropic.Anthropic(base_url=f"{proxy.url}/x/e", api_key="k", max_retries=0)
    tools = [{"name": "shell", "description": "Run it.", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": "look around"}]

    def ask():
        given = dict(model="m", max_tokens=500, system="Be brief.", messages=messages, tools=tools)
        if not streaming:
            return client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            return stream.get_final_message()

    one = ask()
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
    assert (one.content[0].thinking, one.content[1].text) == ("look", "I look.")
    assert one.content[2].input == {"cmd": "ls"} and one.stop_reason == "tool_use"
    assert one.usage.input_tokens == len(engine.requests[0]["input_ids"]) and one.usage.output_tokens > 0
    result = {"type": "tool_result", "tool_use_id": one.content[2].id, "content": "a b"}
    messages += [{"role": "assistant", "content": one.content}, {"role": "user", "content": [result]}]
    two = ask()
    assert (two.content[0].text, two.stop_reason) == ("Two files.", "end_turn")
    messages += [{"role": "assistant", "content": two.content}, {"role": "user", "content": "thanks"}]
    three = ask()
    assert three.content[0].text == "Bye é☃."
    assert len({one.id, two.id, three.id}) == 3
    check_three_turns(proxy, engine)


@pytest.mark.parametrize("streaming", [False, True])
def test_chat_sdk_holds_a_three_turn_conversation_with_a_tool(scene, streaming):
    proxy, engine = scene(SCRIPT)
    client = openai.OpenAI(base_url=f"{proxy.url}/x/e/v1", api_key="k", max_retries=0)
    function = {"name": "shell", "description": "Run it.", "parameters": PARAMETERS}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "look around"}]

    def ask():
        given = dict(model="m", messages=messages, tools=[{"type": "function", "function": function}])
        if not streaming:
            return client.chat.completions.create(**given)
        with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as stream:
            return stream.get_final_completion()

    one = ask()
    message = one.choices[0].message
    assert one.choices[0].finish_reason == "tool_calls" and message.content == "I look."
    assert message.tool_calls[0].function.name == "shell"
    assert message.tool_calls[0].function.arguments == '{"cmd": "ls"}'
    assert message.model_extra["reasoning_content"] == "look"
    assert one.usage.prompt_tokens == len(engine.requests[0]["input_ids"])
    messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a b"})
    two = ask()
    assert (two.choices[0].message.content, two.choices[0].finish_reason) == ("Two files.", "stop")
    messages += [{"role": "assistant", "content": "Two files."}, {"role": "user", "content": "thanks"}]
    assert ask().choices[0].message.content == "Bye é☃."
    check_three_turns(proxy, engine)


@pytest.mark.parametrize("streaming", [False, True])
def test_responses_sdk_holds_a_three_turn_conversation_with_a_tool(scene, streaming):
    proxy, engine = scene(SCRIPT)
    client = openai.OpenAI(base_url=f"{proxy.url}/x/e/v1", api_key="k", max_retries=0)
    tools = [{"type": "function", "name": "shell", "description": "Run it.", "parameters": PARAMETERS}]
    items = [{"role": "user", "content": "look around"}]

    def ask():
        given = dict(model="m", input=items, instructions="Be brief.", store=False)
        if not streaming:
            return client.responses.create(**given, tools=tools)
        with client.responses.stream(**given, tools=[{**tools[0], "strict": False}]) as stream:
            return stream.get_final_response()

    one = ask()
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]
    assert one.output_text == "I look." and one.output[2].arguments == '{"cmd": "ls"}'
    assert one.instructions == "Be brief." and [tool.name for tool in one.tools] == ["shell"]
    assert one.usage.input_tokens == len(engine.requests[0]["input_ids"])
    items += [item.model_dump(exclude={"parsed_arguments"}) for item in one.output]
    items.append({"type": "function_call_output", "call_id": one.output[2].call_id, "output": "a b"})
    two = ask()
    assert two.output_text == "Two files." and two.status == "completed"
    items += [item.model_dump() for item in two.output] + [{"role": "user", "content": "thanks"}]
    assert ask().output_text == "Bye é☃."
    check_three_turns(proxy, engine)


@pytest.mark.parametrize("text", [CALL, "<think>\nnever at an end", "no thinking"])
def test_openai_s_usage_tells_how_many_tokens_were_thinking(scene, codec, text):
    proxy, _ = scene([text] * 2)
    client = openai.OpenAI(base_url=f"{proxy.url}/x/e/v1", api_key="k", max_retries=0)
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    response = client.responses.create(model="m", input="go")
    details = (chat.usage.completion_tokens_details, response.usage.output_tokens_details)
    ids = proxy.calls()[0].output_ids.tolist()
    closed = [number for number in range(len(ids)) if codec.text(ids[: number + 1]).endswith("</think>")]
    thinking = 0 if text == "no thinking" else closed[0] + 1 if closed else len(ids)
    assert [d.reasoning_tokens for d in details] == [thinking] * 2


def test_async_sdks_share_one_proxy_without_mixing_executions(scene):
    proxy, _ = scene(["one answer"])
    for execution in ("a", "b"):
        client = openai.OpenAI(base_url=f"{proxy.url}/x/{execution}", api_key="k")
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "same"}])
    assert [(call.execution, call.parent) for call in proxy.calls()] == [("a", None), ("b", None)]


def test_models_and_token_counts_are_served_to_the_sdks(scene):
    proxy, engine = scene(["ok"])
    client = anthropic.Anthropic(base_url=f"{proxy.url}/x/e", api_key="k")
    messages = [{"role": "user", "content": "count me"}]
    counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
    client.messages.create(model="m", max_tokens=5, messages=messages)
    assert counted == len(engine.requests[0]["input_ids"])
    assert [m.id for m in openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="k").models.list()] == ["gyre"]


@pytest.mark.parametrize("place", range(len(ALL["messages"])))
def test_the_count_of_tokens_is_that_of_the_prompt(scene, place):
    """With tools, images, documents, a begun answer, a schema; before the first call and as a later turn."""
    proxy, engine = scene(["Fine.", "Fine."])
    body = ALL["messages"][place]

    def counted():
        return proxy.post("messages/count_tokens", body).json()["input_tokens"]

    before = counted()
    assert proxy.post("messages", body).status_code == 200
    assert counted() == before == len(engine.requests[0]["input_ids"])
    body = {
        **body,
        "messages": [*body["messages"], *([] if place == 2 else [ECHO]), {"role": "user", "content": "go"}],
    }
    before = counted()
    answer = proxy.post("messages", body).json()
    assert before == len(engine.requests[1]["input_ids"])
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == before
    assert (usage["cache_read_input_tokens"] > 0) == (place != 2)


def test_models_are_listed_and_found_by_both_sdks(scene):
    proxy, _ = scene(["ok"])
    first = anthropic.Anthropic(base_url=f"{proxy.url}/x/e", api_key="k")
    second = openai.OpenAI(base_url=f"{proxy.url}/x/e/v1", api_key="k")
    for models in (first.models, second.models):
        (listed,) = models.list()
        assert listed.id == "gyre" and models.retrieve("some-model").id == "some-model"
    assert first.models.list().has_more is False


@pytest.mark.parametrize("streaming", [False, True])
def test_an_overlong_prompt_is_the_error_each_sdk_knows(scene, streaming):
    proxy, engine = scene(["ok"])
    first = anthropic.Anthropic(base_url=f"{proxy.url}/x/e", api_key="k", max_retries=0)
    second = openai.OpenAI(base_url=f"{proxy.url}/x/e/v1", api_key="k", max_retries=0)
    messages = [{"role": "user", "content": "many words " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: [0-9]+ tokens > 4095 maximum"):
        first.messages.create(model="m", max_tokens=5, messages=messages, stream=streaming)
    with pytest.raises(openai.BadRequestError) as caught:
        second.chat.completions.create(model="m", messages=messages, stream=streaming)
    assert caught.value.code == "context_length_exceeded"
    if streaming:
        seen = list(second.responses.create(model="m", input=messages, stream=True))
        assert [event.type for event in seen] == ["response.created", "response.failed"]
        assert seen[-1].response.error.code == "context_length_exceeded"
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            second.responses.create(model="m", input=messages)
        assert caught.value.code == "context_length_exceeded"
    assert engine.requests == []


PARALLEL = "\n".join(
    f'<tool_call>\n{{"name": "shell", "arguments": {{"cmd": "{cmd}"}}}}\n</tool_call>'
    for cmd in ("ls", "pwd")
)


def test_parallel_calls_an_image_and_an_empty_answer_go_through_every_sdk(scene):
    """Two calls at once, a picture among the results, an answer without a word: and the path is whole."""
    proxy, engine = scene([PARALLEL, "", "Done."] * 3)
    picture = "data:image/png;base64,QUJD"
    client = anthropic.Anthropic(base_url=f"{proxy.url}/x/a", api_key="k", max_retries=0)
    tools = [{"name": "shell", "description": "Run it.", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": "look"}]

    def ask():
        with client.messages.stream(model="m", max_tokens=500, messages=messages, tools=tools) as stream:
            return stream.get_final_message()

    one = ask()
    assert [block.input for block in one.content] == [{"cmd": "ls"}, {"cmd": "pwd"}]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [image]} for block in one.content[::-1]
    ]
    messages += [{"role": "assistant", "content": one.content}, {"role": "user", "content": results}]
    assert ask().content == []
    messages += [{"role": "assistant", "content": []}, {"role": "user", "content": "and?"}]
    assert ask().content[0].text == "Done."
    check_three_turns(proxy, engine)

    client = openai.OpenAI(base_url=f"{proxy.url}/x/b/v1", api_key="k", max_retries=0)
    function = {"type": "function", "function": {"name": "shell", "parameters": PARAMETERS}}
    messages = [{"role": "user", "content": "look"}]

    def complete():
        with client.chat.completions.stream(model="m", messages=messages, tools=[function]) as stream:
            return stream.get_final_completion().choices[0].message

    two = complete()
    assert [call.function.arguments for call in two.tool_calls] == ['{"cmd": "ls"}', '{"cmd": "pwd"}']
    messages.append(two.model_dump(include={"role", "content", "tool_calls"}))
    part = {"type": "image_url", "image_url": {"url": picture}}
    messages += [{"role": "tool", "tool_call_id": call.id, "content": [part]} for call in two.tool_calls]
    assert complete().content == ""
    messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "and?"}]
    assert complete().content == "Done."

    items = [{"role": "user", "content": "look"}]
    tools = [{"type": "function", "name": "shell", "parameters": PARAMETERS, "strict": False}]

    def respond():
        with client.responses.stream(model="m", input=items, tools=tools) as stream:
            return stream.get_final_response()

    three = respond()
    assert [item.arguments for item in three.output] == ['{"cmd": "ls"}', '{"cmd": "pwd"}']
    items += [item.model_dump(exclude={"parsed_arguments"}) for item in three.output]
    seen = [{"type": "input_image", "image_url": picture, "detail": "auto"}]
    items += [{"type": "function_call_output", "call_id": i.call_id, "output": seen} for i in three.output]
    empty = respond()
    assert empty.output == [] and empty.status == "completed"
    items.append({"role": "user", "content": "and?"})
    assert respond().output_text == "Done."
    shown = proxy.calls()[1].evidence
    assert shown["messages"] == 4


class Listing(pydantic.BaseModel):
    files: list[str]


def test_the_helpers_for_typed_answers_and_tools_are_served(scene):
    proxy, engine = scene(['{"files": ["a", "b"]}'] * 3 + [CALL])
    first = anthropic.Anthropic(base_url=f"{proxy.url}/x/a", api_key="k", max_retries=0)
    second = openai.OpenAI(base_url=f"{proxy.url}/x/b/v1", api_key="k", max_retries=0)
    messages = [{"role": "user", "content": "list"}]
    wanted = Listing(files=["a", "b"])
    one = first.messages.parse(model="m", max_tokens=50, messages=messages, output_format=Listing)
    assert one.parsed_output == wanted
    two = second.chat.completions.parse(model="m", messages=messages, response_format=Listing)
    assert two.choices[0].message.parsed == wanted
    three = second.responses.parse(model="m", input=messages, text_format=Listing)
    assert three.output_parsed == wanted
    schemas = [request["sampling_params"]["json_schema"] for request in engine.requests]
    assert [json.loads(schema)["required"] for schema in schemas] == [["files"]] * 3

    class shell(pydantic.BaseModel):
        cmd: str

    tools = [openai.pydantic_function_tool(shell)]
    four = second.chat.completions.parse(model="m", messages=messages, tools=tools)
    assert four.choices[0].message.tool_calls[0].function.parsed_arguments == shell(cmd="ls")
