"""The tiny model's tokenizer and chat template, in the layout of a Hugging Face directory.

Byte-level BPE over single words, with the chat marks and the fixed parts of a tool call as whole tokens, so
that a call is seven tokens. Invariant of the template: what it renders for n messages is a prefix of what it
renders for those messages and more, and a tool call is rendered byte for byte as the model emits it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_cli.quickstart.tasks import PATHS, WORDS

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL_PARTS = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "write", "arguments": {"path": "',
    '{"name": "task", "arguments": {"path": "',
    '{"name": "read", "arguments": {"key": "',
    '", "content": "',
    '"}}',
)
VOCABULARY = 480
"""Ids of the tokenizer and rows of the model's embedding, a multiple of 32; every id can be decoded."""
WORD = r"[a-z]+|[A-Z]+|[0-9]|\s|[^A-Za-z0-9\s]+"
OTHER_WORDS = [
    "build every file write read task one tools ok none denied error empty todo done summary",
    "system user assistant tool name arguments path content key",
]

CHAT_TEMPLATE = """\
{%- set lead = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if lead or tools %}
    {{- '<|im_start|>system\\n' + lead }}
    {%- if tools %}
        {{- ('\\n' if lead else '') + 'tools:' }}
        {%- for tool in tools %}
            {{- ' ' + (tool.function or tool).name }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '<tool_call>{"name": ' + (call.name | tojson) + ', "arguments": ' }}
            {{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer():
    """The `tokenizers.Tokenizer` of VOCABULARY ids; every word of the tasks and roles is one token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TOOL_CALL_PARTS),
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = " ".join([*PATHS, *WORDS, *OTHER_WORDS])
    tokenizer.train_from_iterator([words] * 3, trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False, special=False) for part in TOOL_CALL_PARTS])
    unused = range(VOCABULARY - tokenizer.get_vocab_size())
    tokenizer.add_special_tokens([f"<|unused_{number}|>" for number in unused])
    return tokenizer


def chat_renderer():
    """A function (messages, tools) -> prompt text with the generation prompt, as chat servers render it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE)

    def render(messages: Iterable[dict[str, Any]], tools: Iterable[dict[str, Any]] = ()) -> str:
        return template.render(messages=list(messages), tools=list(tools), add_generation_prompt=True)

    return render


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) to an existing folder."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
