"""Owns how a matched request becomes the tokens that an engine is asked with, without holding up the event loop.

Invariants: the tokens of a recorded path are reused as they are; a text that cannot fit into the context, whatever its
tokens, is not encoded.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np

from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Request, texts
from gyre_proxy.errors import BadRequest
from gyre_proxy.sessions import Match, Prompt

SHORT_TEXT = 2**10
"""Characters below which encoding holds up other calls for less time than handing it to a thread."""

LONG_TEXT, ENCODERS = 2**16, 2
"""Characters from which texts are encoded a few at a time, others meanwhile pass by: the tokenizer needs a second for a
million of them, and hundreds of times their size in memory.
"""

THREADS = 4
"""Of their own, so that no record waits for its disk behind a prompt."""


class Prompts:
    """Encodes the requests of all executions for one model."""

    def __init__(self, codec: Codec, beside: asyncio.Lock) -> None:
        """`beside`: held while the codec of new template arguments is made, in a thread."""
        self._codec, self._beside = codec, beside
        self._long = asyncio.Semaphore(ENCODERS)
        self._threads = ThreadPoolExecutor(THREADS, "encode")

    async def codec(self, request: Request) -> Codec:
        """The codec with the request's own template arguments, whose proof takes a while when they are new."""
        arguments = request.conversation.template_arguments
        known = self._codec.known_for(arguments)
        if known is not None:
            return known
        async with self._beside:
            return await asyncio.to_thread(self._codec.for_arguments, arguments)

    async def encode(self, match: Match, request: Request, codec: Codec, limit: int) -> Prompt:
        """Tokens of the request and of how its answer must begin.

        Raises ContextOverflow when they cannot fit into `limit` tokens, BadRequest when they cannot be rendered.
        """
        prompt = await self._question(match, request, codec, limit)
        for encode, text in _prefills(request, codec):
            ids = await self._encoded(partial(encode, text, prompt.new, len(prompt), limit), (text,))
            new = np.concatenate((prompt.new, ids))
            prompt = Prompt(prompt.parent, new, prompt.prefill_length + len(ids))
        return prompt

    async def _question(self, match: Match, request: Request, codec: Codec, limit: int) -> Prompt:
        """Tokens of the request; those of a recorded path are reused as they are."""
        node = match.node
        messages = match.messages[match.known :]
        if node is not None and codec.extends(messages):
            encode = partial(codec.encode_suffix, messages, int(node.ids[-1]), node.length, limit)
            return Prompt(node, await self._encoded(encode, texts(messages)))
        messages, tools = match.messages, request.conversation.tools
        encode = partial(codec.encode_prompt, messages, tools, limit)
        whole = await self._encoded(encode, texts(messages, tools))
        if node is not None and np.array_equal(node.path_tokens(), whole[: node.length]):
            return Prompt(node, whole[node.length :])
        return Prompt(None, whole)

    async def _encoded(self, encode: Callable[[], list[int]], shown: Iterable[str]) -> np.ndarray:
        """Token ids, int32."""

        def ids() -> np.ndarray:
            return np.asarray(encode(), np.int32)

        size = sum(map(len, shown))
        if size < SHORT_TEXT:
            return ids()
        async with self._long if size >= LONG_TEXT else nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self._threads, ids)


def _prefills(request: Request, codec: Codec) -> list[tuple[Callable[..., list[int]], str]]:
    """(what encodes it, text) of what an answer must begin with. Raises BadRequest."""
    out = [(codec.encode_prefill, request.prefill)] if request.prefill else []
    if request.forced is not None:
        if codec.answers.tools is None:
            raise BadRequest(
                "field 'tool_choice' cannot force a call: this model's calls cannot be read", "tool_choice"
            )
        out.append((codec.encode_forced_call, request.forced))
    if request.schema is not None and not out:
        out.append((codec.encode_prefill, ""))  # thinking that the prompt opened is no JSON: close it
    return out
