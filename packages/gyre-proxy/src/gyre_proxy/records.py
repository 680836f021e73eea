"""Owns what becomes of a sampled call: the answer for its client, the line of the run log, the node of the session. Pure.

Invariant: answer, line and node are of the same ids.
"""

import numpy as np
from gyre_trajtree import Call

from gyre_proxy import parsers
from gyre_proxy.codec import Codec
from gyre_proxy.conversation import Answer, ToolCall
from gyre_proxy.evidence import evidence
from gyre_proxy.flights import Flight
from gyre_proxy.sessions import Node, ids_json
from gyre_proxy.stopping import cut


def call_answer(flight: Flight, codec: Codec, tool_parser: str, id_prefix: str) -> Answer:
    """What the sampled ids say; tool calls get ids that begin with `id_prefix`."""
    tools = bool(flight.request.conversation.tools)
    text, stop_string = cut(codec.decode(flight.ids), flight.request.stop)
    parsed = parsers.parse(text, tool_parser, codec.opens_reasoning, tools)
    calls = tuple(
        ToolCall(f"{id_prefix}{flight.id}{i:02d}", name, arguments)
        for i, (name, arguments) in enumerate(parsed.calls)
    )
    finish = "length" if flight.finish == "length" else "tool_calls" if calls else "stop"
    return Answer(
        id=flight.id,
        created=int(flight.started),
        text=parsed.text,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        finish=finish,
        prompt_tokens=len(flight.prompt),
        completion_tokens=len(flight.ids),
        stop_string=stop_string,
    )


def call_record(flight: Flight, answer: Answer, end: float) -> Call:
    """The line of the run log; `end` in unix seconds."""
    request, match, prompt = flight.request, flight.match, flight.prompt
    parent = prompt.parent.id if prompt.parent else None
    echoes = flight.session.echoes(match.messages[match.known if parent else 0 :])
    sampling = dict(flight.sampling)
    if request.stop:
        sampling["stop"] = list(request.stop)
    if request.asked:
        sampling["asked"] = dict(request.asked)
    return Call(
        id=flight.id,
        execution=flight.session.execution,
        parent=parent,
        input_ids=prompt.new,
        output_ids=flight.ids,
        logprobs=np.array([np.nan if v is None else v for v in flight.logprobs], np.float32),
        versions=[list(span) for span in flight.spans],
        sampling=sampling,
        finish=flight.finish,
        engine=flight.last_engine,
        time={"start": flight.started, "first": flight.first, "end": end},
        digest=match.digest.hex(),
        hints=flight.hints,
        evidence=evidence(match, parent, echoes, answer.text, answer.tool_calls, flight.hints.get("kind")),
        attempt_of=flight.attempt_of,
    )


def call_node(flight: Flight, answer: Answer, turn_end: int | None) -> Node:
    """The node that later requests extend; for a call with output."""
    ids = np.concatenate((flight.prompt.new, np.asarray(flight.ids, np.int32)))
    return Node(
        id=flight.id,
        parent=flight.prompt.parent,
        ids=ids,
        json=ids_json(ids),
        length=len(flight.prompt) + len(flight.ids),
        ended=flight.ids[-1] == turn_end,
        call_ids=tuple(call.id for call in answer.tool_calls),
        reasoning=answer.reasoning,
    )
