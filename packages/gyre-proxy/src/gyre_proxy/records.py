"""Owns what becomes of a sampled call: the answer for its client, the line of the run log, the node of the session. Pure.

Invariants: answer, line and node are of the same ids; the node that a line gives back after a restart is the
node that the call left.
"""

from collections.abc import Sequence

import numpy as np
from gyre_trajtree import Call, RecordedExecution
from gyre_trajtree.arrays import LOGPROB_ROUNDING

from gyre_proxy import parsers
from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Answer, Message, ToolCall
from gyre_proxy.errors import BadRequest
from gyre_proxy.evidence import evidence
from gyre_proxy.flights import Flight
from gyre_proxy.sessions import Node, Prompt, Session, ids_json
from gyre_proxy.stopping import cut


def said(
    ids: Sequence[int],
    prompt: Prompt,
    codec: Codec,
    types: parsers.Types | None,
    stop: Sequence[str] = (),
) -> tuple[parsers.Parsed, str | None]:
    """What ids sampled after a prompt mean, and the stop string that ended them.

    `types`: parameter types of the tools on offer, None without tools.
    """
    text, stop_string = cut(codec.decode(ids), stop)
    if prompt.prefill_length:
        text = codec.text(prompt.prefill) + text
    return parsers.parse(text, codec.answers_after(prompt.question), types), stop_string


def tool_calls(parsed: parsers.Parsed, call_id: str, id_prefix: str) -> tuple[ToolCall, ...]:
    """The tool calls of an answer; their ids begin with `id_prefix` and name the call."""
    return tuple(
        ToolCall(f"{id_prefix}{call_id}{i:02d}", name, arguments)
        for i, (name, arguments) in enumerate(parsed.calls)
    )


def call_answer(flight: Flight, id_prefix: str) -> Answer:
    """What the sampled ids say; tool calls get ids that begin with `id_prefix`."""
    request, prompt = flight.request, flight.prompt
    types = flight.codec.types_of(request.conversation.offered)
    parsed, stop_string = said(flight.ids, prompt, flight.codec, types, request.stop)
    calls = tool_calls(parsed, flight.id, id_prefix)
    finish = "length" if flight.finish == "length" else "tool_calls" if calls else "stop"
    return Answer(
        id=flight.id,
        created=int(flight.started),
        text=parsed.text,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        finish=finish,
        prompt_tokens=len(prompt),
        completion_tokens=len(flight.ids),
        stop_string=stop_string,
        reused_tokens=prompt.parent.length if prompt.parent else 0,
        reasoning_tokens=flight.codec.thinking_tokens(flight.ids) if parsed.reasoning else 0,
        malformed=parsed.malformed,
        prefilled=len(request.prefill) if parsed.text.startswith(request.prefill) else 0,
    )


def answer_message(answer: Answer) -> Message:
    """The answer as a later request repeats it."""
    return Message("assistant", answer.text, tool_calls=answer.tool_calls)


def call_record(flight: Flight, answer: Answer, end: float, id_prefix: str) -> Call:
    """The line of the run log; `end` in unix seconds. It holds what `restored` needs to go on after a restart."""
    request, match, prompt = flight.request, flight.match, flight.prompt
    parent = prompt.parent.id if prompt.parent else None
    echoes = flight.session.echoes(match.messages[match.known if parent else 0 :])
    context = flight.session.context(match, answer_message(answer))
    sampling = dict(flight.sampling)
    if request.stop:
        sampling["stop"] = list(request.stop)
    if request.asked:
        sampling["asked"] = dict(request.asked)
    extra: dict = {"context": context.hex(), "tool_ids": id_prefix}
    conversation = request.conversation
    if conversation.offered:
        extra["tool_types"] = _called_types(conversation.offered, answer.tool_calls)
    if conversation.template_arguments:
        extra["template_arguments"] = dict(conversation.template_arguments)
    if prompt.prefill_length:
        extra["started"] = prompt.prefill_length
    return Call(
        id=flight.id,
        execution=flight.session.execution,
        parent=parent,
        input_ids=prompt.new,
        output_ids=flight.ids,
        logprobs=_recordable(flight.logprobs, constrained="json_schema" in sampling),
        versions=[list(span) for span in flight.spans],
        sampling=sampling,
        finish=flight.finish,
        engine=flight.last_engine,
        time={"start": flight.started, "first": flight.first, "end": end},
        digest=match.digest.hex(),
        hints=flight.hints,
        evidence=evidence(match, parent, echoes, answer.text, answer.tool_calls, flight.hints.get("kind")),
        attempt_of=flight.attempt_of,
        extra=extra,
    )


def _called_types(tools: Sequence[dict], calls: Sequence[ToolCall]) -> dict:
    """Parameter types of the tools that were called: without them the answer's ids would be read otherwise."""
    called = {call.name for call in calls}
    offered = [tool for tool in tools if tool.get("function", {}).get("name") in called] if called else []
    return dict(parsers.tool_types(offered))


def _recorded_types(value: object) -> parsers.Types:
    """What `_called_types` recorded; nothing of what another writer may have put there."""
    if not isinstance(value, dict) or not all(isinstance(types, dict) for types in value.values()):
        return {}
    return {
        tool: {name: tuple(kinds) for name, kinds in types.items() if isinstance(kinds, list)}
        for tool, types in value.items()
    }


def _recordable(logprobs: Sequence[float | None], constrained: bool) -> np.ndarray:
    """float32 [m]: log-probs in nats; NaN, which keeps a token from training, for what no log-prob can be.

    Neither can that of a token to which a schema left no choice: it is not the model's.
    """
    if constrained:
        return np.full(len(logprobs), np.nan, np.float32)
    values = np.array([np.nan if value is None else value for value in logprobs], np.float32)
    values[~np.isfinite(values) | (values > LOGPROB_ROUNDING)] = np.nan
    return values


def call_node(flight: Flight, answer: Answer) -> Node:
    """The node that later requests extend; for a call with output."""
    prompt = flight.prompt
    return _node(flight.id, prompt.parent, prompt.new, flight.ids, answer.tool_calls, answer.reasoning)


def _node(
    call_id: str,
    parent: Node | None,
    new: np.ndarray,
    output: Sequence[int],
    calls: Sequence[ToolCall],
    reasoning: str,
) -> Node:
    ids = np.concatenate((new, np.asarray(output, np.int32)))
    return Node(
        id=call_id,
        parent=parent,
        ids=ids,
        json=ids_json(ids),
        length=len(ids) + (parent.length if parent else 0),
        call_ids=tuple(call.id for call in calls),
        reasoning=reasoning,
    )


def restored(recorded: RecordedExecution, codec: Codec) -> Session:
    """The session of an execution whose calls an earlier proxy recorded; later requests extend them.

    Calls that another writer recorded have no `context`: they count and stay as they are, nothing extends them.
    """
    session = Session(recorded.id)
    deadlines = [state.deadline for state in recorded.states if state.deadline]
    session.deadline = deadlines[-1] if deadlines else None
    nodes: dict[str, Node] = {}
    for call in recorded.calls:
        context, prompt = _digest(call.extra.get("context")), _digest(call.digest)
        prefix, stop = call.extra.get("tool_ids"), call.sampling.get("stop", [])
        texts = isinstance(stop, list) and all(isinstance(text, str) for text in stop)
        spoken = _recorded_codec(codec, call.extra.get("template_arguments"))
        if not (context and prompt and isinstance(prefix, str) and texts and spoken):
            session.calls += 1
            continue
        ids = call.output_ids.tolist()
        asked = Prompt(None, call.input_ids, _recorded_prefill(call))
        types = _recorded_types(call.extra["tool_types"]) if "tool_types" in call.extra else None
        parsed, _ = said(ids, asked, spoken, types, stop)
        calls = tool_calls(parsed, call.id, prefix)
        node = None
        if ids and (call.parent is None or call.parent in nodes):
            parent = nodes[call.parent] if call.parent else None
            node = nodes[call.id] = _node(call.id, parent, call.input_ids, ids, calls, parsed.reasoning)
        failed = call.finish in ("abort", "error")
        session.remember(call.id, prompt, context, node, calls, failed, parsed.text)
    return session


def _recorded_codec(codec: Codec, arguments: object) -> Codec | None:
    """The codec with recorded template arguments; None when they can be none."""
    if arguments is None:
        return codec
    try:
        return codec.for_arguments(arguments) if isinstance(arguments, dict) else None
    except BadRequest:
        return None


def _recorded_prefill(call: Call) -> int:
    started = call.extra.get("started", 0)
    return started if type(started) is int and 0 <= started <= len(call.input_ids) else 0


def _digest(value: object) -> bytes | None:
    """Bytes of a recorded digest; None for anything else, which another writer may have put there."""
    try:
        return bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        return None
