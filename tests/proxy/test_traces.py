"""Every recorded scenario of real harnesses, replayed over HTTP: each request extends what it goes on from, token by token.

The rule: an agent's request extends its last answered one. EXCEPTIONS names every request that does not, and why.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from gyre_proxy.codec import Codec
from gyre_trajtree import Call, RunLogTail, Tree
from proxy_stage import DEADLINE_S, Stage
from trace_changes import CHANGES, protocol
from trace_replay import CONTEXT, Replay, Step, TraceEngine, given_texts, path_tokens, scenarios

RECORDED = scenarios()

BROKEN_CALL = (
    "the model's call was no JSON object: text to the proxy, a call that the harness rewrote in the trace"
)
UNSEEN = "an answer without visible output is dropped, and the user message before it gets a reminder"
AGAIN = "an empty or cut answer is thrown away and the same prompt sampled again"
NO_GOOD_CALL = "a turn without a good call is dropped and a user message says why"
HELD_BACK = "the newest turn is left out of what is summarised, and kept for after"
NEW_HEAD = "a compacted conversation begins anew"
PARTIAL = "the text that arrived before the cut is kept as a turn, so the cut call is extended"
INVENTED = "the harness made a tool call of the cut answer, which the model never finished"
MERGED = "the cut text and its continuation come back as one turn"
NO_IDS = "the recorded API gave no message ids: the harness lost its history"
SAME_IDS = "the recorded API gave one tool id for all calls: the harness lost those after the first"
UNDEFERRED = "after a 400 the harness offers other tools"
OTHER_CONTEXT = "another system text: the harness reads the conversation for its memory"

EXCEPTIONS: dict[str, dict[int, tuple[int | None, str]]] = {
    "claude.basic": {10: (8, BROKEN_CALL), 11: (8, UNSEEN)},
    "claude.basic_old": {11: (9, BROKEN_CALL), 12: (9, UNSEEN)},
    "claude.coerce": {13: (11, BROKEN_CALL)},
    "claude.emptyresp": {2: (None, UNSEEN)},
    "claude.compact": {4: (2, HELD_BACK), 5: (None, NEW_HEAD)},
    "claude.compact_old": {4: (2, HELD_BACK), 5: (None, NEW_HEAD), 6: (None, HELD_BACK), 7: (None, NEW_HEAD)},
    "claude.drop": {3: (2, PARTIAL)},
    "claude.evterr": {3: (2, PARTIAL)},
    "claude.f400": {5: (None, UNDEFERRED), 6: (None, UNDEFERRED), 7: (None, UNDEFERRED)},
    "claude.basic_noid": {n: (None, NO_IDS) for n in range(3, 12)},
    "claude.basic_sametool": {n: (1, SAME_IDS) for n in range(3, 12)},
    "codex.basic": {10: (8, BROKEN_CALL)},
    "codex.coerce": {13: (11, BROKEN_CALL)},
    "codex.compact": {5: (None, NEW_HEAD)},
    "mini.basic": {9: (7, NO_GOOD_CALL), 10: (7, NO_GOOD_CALL)},
    "mini.edit": {6: (4, NO_GOOD_CALL), 7: (4, NO_GOOD_CALL)},
    "mini.f429": {6: (4, NO_GOOD_CALL), 7: (4, NO_GOOD_CALL)},
    "mini.f500": {6: (4, NO_GOOD_CALL), 7: (4, NO_GOOD_CALL)},
    "mini.maxtok_tool": {2: (None, NO_GOOD_CALL), 4: (2, NO_GOOD_CALL), 5: (2, NO_GOOD_CALL)},
    "opencode.basic": {11: (9, BROKEN_CALL)},
    "opencode.coerce": {14: (12, BROKEN_CALL)},
    "opencode.compact": {6: (None, NEW_HEAD)},
    "opencode.drop": {5: (2, INVENTED)},
    "opencode.maxtok_tool": {3: (None, BROKEN_CALL)},
    "opencode.resp": {11: (9, BROKEN_CALL)},
    "pi.basic": {10: (8, BROKEN_CALL)},
    "pi.coerce": {13: (11, BROKEN_CALL)},
    "pi.maxtok_tool": {2: (None, BROKEN_CALL)},
    "pi.resp": {10: (8, BROKEN_CALL)},
    "qwen.basic": {10: (8, AGAIN), 11: (8, AGAIN)},
    "qwen.coerce": {13: (11, BROKEN_CALL)},
    "qwen.drop": {3: (2, PARTIAL), 4: (1, MERGED)},
    "qwen.maxtok": {2: (None, AGAIN)},
    "qwen.maxtok_tool": {2: (None, AGAIN)},
    "qwen.thinkonly": {2: (None, OTHER_CONTEXT)},
}


@pytest.fixture(scope="module")
def play(tokenizer_dir: Path, codec: Codec, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """play(scenario, changed=False) -> Replay, an execution of its own; all in front of one proxy and one engine.

    `changed`: each request is changed as harnesses change them between turns, at places that chance picks.
    """
    stage = Stage()
    engine = TraceEngine(codec, [])
    stage.do(engine.start())
    record = tmp_path_factory.mktemp("traces") / "run.jsonl"
    settings = {"tokenizer": tokenizer_dir, "record": record, "context_length": CONTEXT}
    # An engine that fails is given up at once: what fails here fails for good.
    proxy = stage.proxy(engines=(engine.url,), engine_wait_s=0.02, **settings)
    log = RunLogTail(record)
    log.poll()

    def replay(name: str, changed: bool = False) -> Replay:
        def change(n: int, path: str, body: dict) -> dict:
            chance = random.Random(f"{name} {n}")
            for kind in CHANGES if changed else ():
                kind(chance, body, protocol(path))
            return body

        execution = f"{name}-changed" if changed else name
        found = Replay(proxy, engine, codec, log, client, execution, change)
        found.play(RECORDED[name])
        return found

    with httpx.Client(base_url=proxy.url, timeout=DEADLINE_S) as client:
        yield replay
    stage.clear()
    stage.do(engine.stop())
    stage.close()


def expected_parents(name: str, steps: list[Step]) -> dict[int, int | None]:
    """{n: n of the request that it extends} of the recorded calls, by the rule and its exceptions."""
    answered: dict[str, int] = {}
    parents: dict[int, int | None] = {}
    exceptions = EXCEPTIONS.get(name, {})
    for step in steps:
        if step.call is None:
            continue
        parents[step.n] = answered.get(step.agent)
        if step.n in exceptions:
            assert parents[step.n] != exceptions[step.n][0], f"{step.n} is no exception"
            parents[step.n] = exceptions[step.n][0]
        if step.fault is None:
            answered[step.agent] = step.n
    return parents


def expected_attempts(steps: list[Step]) -> dict[int, int | None]:
    """{n: n of the failed request that it repeats}, by what was recorded."""
    failed: dict[str, int] = {}
    attempts: dict[int, int | None] = {}
    for step in steps:
        if step.call is not None:
            attempts[step.n] = failed.pop(asked(step.recorded), None)
            if step.fault is not None:
                failed[asked(step.recorded)] = step.n
    return attempts


def asked(body: dict) -> str:
    """What a request asks, whoever asks and wherever the cache marks are."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items() if key != "cache_control"}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(plain([body.get(key) for key in ("system", "messages", "input", "tools")]))


def check(name: str, replay: Replay) -> None:
    """Every call is in the log once, on the node that it extends, with that node's tokens."""
    steps = replay.steps
    calls = {step.call.id: step.call for step in steps if step.call is not None}
    number = {step.call.id: step.n for step in steps if step.call is not None} | {None: None}
    parents = {number[id]: number[call.parent] for id, call in calls.items()}
    assert parents == expected_parents(name, steps)
    assert {number[id]: number[call.attempt_of] for id, call in calls.items()} == expected_attempts(steps)
    tree = Tree.from_calls(calls.values())
    assert len(tree.nodes) == len(calls)
    assert sum(node.parent is None for node in tree.nodes) == sum(
        parent is None for parent in parents.values()
    )
    for step in steps:
        if step.call is not None:
            check_call(step, calls, replay.codec)


def check_call(step: Step, calls: dict[str, Call], codec: Codec) -> None:
    call = step.call
    ends = {None: "length" if step.cut_short else "stop", "http": "error"}
    assert call.finish == ends.get(step.fault, "abort")
    assert codec.decode(call.output_ids.tolist()) == ("" if step.fault in ("http", "left") else step.text)
    if step.prompt is None:
        return
    path = path_tokens(calls[call.parent], calls) if call.parent else np.empty(0, np.int32)
    assert step.prompt == np.concatenate((path, call.input_ids)).tolist()
    expected = -(len(step.prompt) + np.arange(len(call.output_ids))) / 1000
    assert np.allclose(call.logprobs, expected)
    shown = codec.decode(step.prompt)
    assert [text for text in given_texts(step.body) if text not in shown] == []


def test_every_exception_has_its_scenario():
    assert EXCEPTIONS.keys() <= RECORDED.keys() and len(RECORDED) == 79


@pytest.mark.parametrize("name", RECORDED)
def test_requests_of_a_recorded_scenario_extend_what_they_go_on_from(play, name):
    check(name, play(name))


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_harness_changes_between_turns_leaves_the_tree_as_it_is(play, name):
    check(name, play(name, changed=True))
