"""An OpenAPI description of the three protocols: what a valid body is, and what every answer looks like."""

TEXT = {"type": "string"}
NAME = {"type": "string", "minLength": 1}
FLAG = {"type": "boolean"}
NUMBER = {"type": "number"}
COUNT = {"type": "integer", "minimum": 1, "maximum": 100}
ANY = {"type": "object", "maxProperties": 3}


def thing(required: str = "", **fields: object) -> dict:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def const(word: str) -> dict:
    return {"type": "string", "enum": [word]}


def listing(*kinds: dict, least: int = 0) -> dict:
    return {"type": "array", "items": {"anyOf": list(kinds)}, "minItems": least, "maxItems": 4}


def text_or(*kinds: dict) -> dict:
    return {"anyOf": [TEXT, listing(*kinds)]}


SAMPLING = {"temperature": NUMBER, "top_p": NUMBER, "stream": FLAG, "model": TEXT}
STOPS = {"type": "array", "items": NAME, "maxItems": 3}

# --- Messages

_TEXT = thing("type text", type=const("text"), text=TEXT, cache_control=ANY)
_IMAGE = thing(
    "type source",
    type=const("image"),
    source=thing("type media_type data", type=const("base64"), media_type=TEXT, data=TEXT),
)
_RESULT = thing(
    "type tool_use_id",
    type=const("tool_result"),
    tool_use_id=TEXT,
    content=text_or(_TEXT, _IMAGE),
    is_error=FLAG,
)
_USER = thing("role content", role=const("user"), content=text_or(_TEXT, _IMAGE, _RESULT))
_ASSISTANT = thing(
    "role content",
    role=const("assistant"),
    content=text_or(
        _TEXT,
        thing("type thinking", type=const("thinking"), thinking=TEXT, signature=TEXT),
        thing("type id name input", type=const("tool_use"), id=TEXT, name=TEXT, input=ANY),
    ),
)
_TOOL = thing("name input_schema", name=NAME, description=TEXT, input_schema=ANY, strict=FLAG)
MESSAGES = thing(
    "messages",
    **SAMPLING,
    system=text_or(_TEXT),
    messages={
        "type": "array",
        "prefixItems": [_USER],
        "items": {"anyOf": [_USER, thing("role content", role=const("system"), content=text_or(_TEXT))]},
        "minItems": 1,
        "maxItems": 4,
    },
    tools={"type": "array", "items": _TOOL, "maxItems": 1},
    max_tokens=COUNT,
    stop_sequences=STOPS,
    metadata=thing(user_id=TEXT),
    thinking=thing("type", type=const("disabled")),
)
MESSAGES_HISTORY = {
    **MESSAGES,
    "properties": {
        **MESSAGES["properties"],
        "messages": {
            "type": "array",
            "prefixItems": [_USER, _ASSISTANT, _USER],
            "items": False,
            "minItems": 3,
        },
    },
}

# --- Chat Completions

_PART = thing("type text", type=const("text"), text=TEXT)
_PICTURE = thing("type image_url", type=const("image_url"), image_url=thing("url", url=NAME, detail=TEXT))
_CALL = thing(
    "id type function",
    id=TEXT,
    type=const("function"),
    function=thing("name arguments", name=TEXT, arguments=TEXT),
)
CHAT = thing(
    "messages",
    **SAMPLING,
    messages=listing(
        thing("role content", role=const("system"), content=text_or(_PART)),
        thing("role content", role=const("user"), content=text_or(_PART, _PICTURE), name=TEXT),
        thing(
            "role", role=const("assistant"), content=TEXT, tool_calls=listing(_CALL), reasoning_content=TEXT
        ),
        thing("role tool_call_id content", role=const("tool"), tool_call_id=TEXT, content=text_or(_PART)),
        least=1,
    ),
    tools=listing(
        thing(
            "type function",
            type=const("function"),
            function=thing("name", name=NAME, description=TEXT, parameters=ANY, strict=FLAG),
        )
    ),
    max_completion_tokens=COUNT,
    stop={"anyOf": [NAME, STOPS]},
    seed={"type": "integer", "minimum": -(2**63), "maximum": 2**63},
    stream_options=thing(include_usage=FLAG),
    metadata={"type": "object", "additionalProperties": TEXT, "maxProperties": 3},
    store=FLAG,
)

# --- Responses

_INPUT = thing("type text", type=const("input_text"), text=TEXT)
_OUTPUT = thing("type text", type=const("output_text"), text=TEXT)
_SUMMARY = thing("type text", type=const("summary_text"), text=TEXT)
RESPONSES = thing(
    "input",
    **SAMPLING,
    instructions=TEXT,
    input={
        "anyOf": [
            TEXT,
            listing(
                thing("role content", role={"enum": ["user", "developer"]}, content=text_or(_INPUT)),
                thing(
                    "type role content",
                    type=const("message"),
                    role=const("assistant"),
                    content=listing(_OUTPUT),
                    id=TEXT,
                ),
                thing(
                    "type",
                    type=const("reasoning"),
                    summary=listing(_SUMMARY),
                    encrypted_content=TEXT,
                ),
                thing(
                    "type call_id name arguments",
                    type=const("function_call"),
                    call_id=TEXT,
                    name=TEXT,
                    arguments=TEXT,
                ),
                thing(
                    "type call_id output",
                    type=const("function_call_output"),
                    call_id=TEXT,
                    output=text_or(_INPUT),
                ),
                least=1,
            ),
        ]
    },
    tools=listing(
        thing("type name", type=const("function"), name=NAME, parameters=ANY, strict=FLAG, description=TEXT),
        thing("type name", type=const("custom"), name=NAME, description=TEXT),
    ),
    max_output_tokens=COUNT,
    reasoning=thing(effort=TEXT, summary=TEXT),
    store=FLAG,
    include={"type": "array", "items": const("reasoning.encrypted_content"), "maxItems": 2},
)

# --- answers

_ANTHROPIC_ERROR = thing(
    "type error", type=const("error"), error=thing("type message", type=NAME, message=NAME)
)
_NULL_OR_TEXT = {"type": ["string", "null"]}
_OPENAI_ERROR = thing(
    "error",
    error=thing("message type param code", message=NAME, type=NAME, param=_NULL_OR_TEXT, code=_NULL_OR_TEXT),
)


def _operation(body: dict, error: dict) -> dict:
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}}
    refusal = {"description": "refused", "content": {"application/json": {"schema": error}}}
    return {
        "post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "answered", "content": answers},
                "400": refusal,
                "413": refusal,
            },
        }
    }


DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "three protocols", "version": "1"},
    "paths": {
        "/messages": _operation(MESSAGES, _ANTHROPIC_ERROR),
        "/messages/count_tokens": _operation(MESSAGES_HISTORY, _ANTHROPIC_ERROR),
        "/chat/completions": _operation(CHAT, _OPENAI_ERROR),
        "/responses": _operation(RESPONSES, _OPENAI_ERROR),
    },
}
