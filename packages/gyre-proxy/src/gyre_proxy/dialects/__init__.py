"""Owns the client protocols: pure functions and a stream writer each, chosen by path.

Every protocol's module offers `Reader` (of a list's items), `parse(body) -> Request`, `answer(request, Answer) -> dict`,
`error(ProxyError) -> dict`, `TOOL_ID_PREFIX` and `Stream(request, call_id, created, prompt_tokens, reused_tokens)` with
`start`, `delta`, `keepalive` and `finish`, each of which returns bytes of server-sent events. Its `_request` module has
the table of fields: each is used, or checked and of no concern here, or refused by name. Nothing is dropped in silence.
"""

from types import ModuleType

from gyre_proxy.dialects import chat, messages, responses

BY_PATH: dict[str, ModuleType] = {
    "messages": messages,
    "chat/completions": chat,
    "responses": responses,
}
