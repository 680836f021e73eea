"""One conversation in three protocols."""

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}
SPEC = {"name": "shell", "description": "Run it.", "parameters": PARAMETERS}

MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "shell", "description": "Run it.", "input_schema": PARAMETERS}],
    "messages": [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a b", "is_error": False},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
}
CHAT = {
    "model": "m",
    "tools": [{"type": "function", "function": SPEC}],
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "shell", "arguments": '{"cmd":"ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "a b"}]},
        {"role": "user", "content": "go on"},
    ],
}
RESPONSES = {
    "model": "m",
    "instructions": "Be brief.",
    "tools": [{"type": "function", "strict": False, **SPEC}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "call_id": "t1", "name": "shell", "arguments": '{"cmd":"ls"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "a b"},
        {"type": "message", "role": "user", "content": "go on"},
    ],
}

BODIES = {"messages": MESSAGES, "chat/completions": CHAT, "responses": RESPONSES}


def user(content: object) -> dict:
    return {"role": "user", "content": content}
