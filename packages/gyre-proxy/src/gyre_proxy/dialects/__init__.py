"""Owns the client protocols: one module each, pure functions and a stream writer, chosen by path.

Every module offers `parse(body) -> Request`, `answer(request, Answer) -> dict`, `error(ProxyError) -> dict`,
`TOOL_ID_PREFIX` and `Stream(request, call_id, created, prompt_tokens)` with `start`, `delta`, `keepalive` and
`finish`, each of which returns bytes of server-sent events. What a protocol offers and this proxy does not do
raises BadRequest; nothing is dropped in silence.
"""

from types import ModuleType

from gyre_proxy.dialects import chat, messages, responses

BY_PATH: dict[str, ModuleType] = {
    "messages": messages,
    "chat/completions": chat,
    "responses": responses,
}
