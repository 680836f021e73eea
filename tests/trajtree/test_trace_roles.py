"""Roles of every recorded scenario of real harnesses.

All leaves of a scenario are the main agent's, except those in EXPECTED. Failed and abandoned attempts have the role of
the context that made them; that they are never trained is sampling's job (`dead_tips`).
"""

from dataclasses import replace
from functools import cache

import pytest
from gyre_trajtree import Tree, infer_roles
from gyre_trajtree.roles import AUXILIARY, MAIN, MAIN_SUMMARY, SUB_AGENT, SUB_AGENT_SUMMARY
from trajtree_replay import Replay, scenarios

TASK = "TOPTASK: look around in this folder, then say done."

EXPECTED = {
    # Sub-agents: each has a root of its own, because system text or tools differ; its first user message is the
    # `prompt` (Claude, Qwen, opencode) or `message` (Codex) argument of the main agent's call.
    "claude.agents": {"6": SUB_AGENT, "7": SUB_AGENT},
    "claude.fg": {"4": SUB_AGENT, "5": SUB_AGENT},
    "claude.fg_nobeta": {"4": SUB_AGENT, "5": SUB_AGENT},
    "codex.agents": {"6": SUB_AGENT, "7": SUB_AGENT},
    "codex.fg": {"4": SUB_AGENT, "7": SUB_AGENT},
    "qwen.agents": {"6": SUB_AGENT, "7": SUB_AGENT},
    "qwen.fg": {"4": SUB_AGENT, "5": SUB_AGENT},
    "qwen.explore": {"3": SUB_AGENT},
    # Request 1 is the title call: before the main agent, no tools, a system text of its own, never continued.
    "opencode.fg": {"1": AUXILIARY, "5": SUB_AGENT, "6": SUB_AGENT},
    **{
        f"opencode.{name}": {"1": AUXILIARY}
        for name in (
            ["basic", "coerce", "drop", "edit", "f500", "image", "maxtok_tool", "resall", "resp", "trunc"]
        )
    },
    # Compaction with an appended instruction: call 4 leaves out the newest turn (3), which call 5 keeps.
    "claude.compact": {"4": MAIN_SUMMARY},
    # The same twice; the second request (6) was answered with a tool call, but asks in the words of the first.
    "claude.compact_old": {"4": MAIN_SUMMARY, "6": MAIN_SUMMARY},
    # After a refusal for length the history is cut and the summary asked for in a new root (3); the next root (4)
    # has the same setting and nothing of that history.
    "claude.toolong": {"3": MAIN_SUMMARY},
    # Same system text and history, tools withheld, request_kind=compaction.
    "codex.compact": {"4": MAIN_SUMMARY},
    # A summariser of its own: no tools, another system text, the transcript as one text; its answer opens root 6.
    "opencode.compact": {"1": AUXILIARY, "5": MAIN_SUMMARY},
    # A summariser of its own that is shown the main agent's turns and has no tools to act with.
    "qwen.compact": {"4": MAIN_SUMMARY},
    "qwen.toolong": {"3": MAIN_SUMMARY},
    # Memory extraction after the last answer: tools and a system text of its own, the main history as prefix.
    "qwen.thinkonly": {"2": SUB_AGENT},
}
SILENT = {"qwen.thinkonly"}
"""Only a system text speaks there: a hint may decide."""

RECORDED = scenarios()


@cache
def played(name):
    return Replay().play(RECORDED[name])


def roles(calls, task=TASK):
    return {leaf: decision.role for leaf, decision in infer_roles(Tree.from_calls(calls), task).items()}


def expected(name, found, prefix=""):
    special = {prefix + n: role for n, role in EXPECTED.get(name, {}).items()}
    assert special.keys() <= found.keys(), "an expected leaf is no leaf"
    return {leaf: special.get(leaf, MAIN) for leaf in found}


def claiming(calls, kind):
    return [replace(call, hints={}, evidence=call.evidence | {"kind": kind}) for call in calls]


def test_every_expectation_has_its_scenario():
    assert EXPECTED.keys() <= RECORDED.keys() and len(RECORDED) == 79


@pytest.mark.parametrize("name", RECORDED)
def test_roles_of_a_recorded_scenario(name):
    found = roles(played(name))
    assert found == expected(name, found)


@pytest.mark.parametrize("name", RECORDED)
def test_roles_do_not_need_headers_or_the_task(name):
    calls = Replay().play(RECORDED[name], with_hints=False)
    found = roles(calls, task=None)
    assert found == expected(name, found)


@pytest.mark.parametrize("claim", ["title", "main", "subagent"])
@pytest.mark.parametrize("name", sorted(RECORDED.keys() - SILENT))
def test_no_claim_of_whose_context_it_is_wins_over_structure(name, claim):
    calls = played(name)
    found = roles(claiming(calls, claim))
    assert found == expected(name, found)


@pytest.mark.parametrize("name", RECORDED)
def test_a_false_claim_of_compaction_turns_no_call_that_acts_or_goes_on(name):
    """It may decide only where a text answers a new message, as a summary does."""
    calls = played(name)
    by_id = {call.id: call for call in calls}
    found = roles(claiming(calls, "compaction"))
    for leaf, role in expected(name, found).items():
        call = by_id[leaf]
        above = by_id[call.parent].evidence["last_user"] if call.parent else None
        if call.evidence["tool_calls"] or call.evidence["last_user"] == above:
            assert found[leaf] == role


def harness(name):
    return name.split(".")[0]


@pytest.mark.parametrize(
    "name", ["claude.basic", "codex.coerce", "opencode.edit", "pi.coerce", "qwen.edit", "mini.edit"]
)
def test_independent_conversations_under_one_key_are_all_main(name):
    """The same program started three times with one key: three conversations, none replaces another."""
    replay = Replay()
    for run in "abc":
        replay.play(RECORDED[name], prefix=run)
    found = roles(replay.calls)
    assert found == {leaf: role for run in "abc" for leaf, role in expected_of_run(name, found, run).items()}


def expected_of_run(name, found, run):
    return expected(name, {leaf: role for leaf, role in found.items() if leaf.startswith(run)}, run)


def in_the_folder_of(name):
    """opencode writes the folder it works in into its tools; one execution has one folder."""
    tools = [request["body"].get("tools") for _, request, _ in RECORDED[name] if request["body"].get("tools")]

    def changed(body):
        return body | {"tools": tools[0]} if harness(name) == "opencode" and body.get("tools") else body

    return changed


@pytest.mark.parametrize("first", ["claude.compact", "codex.compact", "opencode.compact", "qwen.toolong"])
def test_a_conversation_after_a_compacted_one_is_still_main(first):
    replay = Replay()
    replay.play(RECORDED[first], prefix="a")
    replay.play(RECORDED[f"{harness(first)}.coerce"], prefix="b", change=in_the_folder_of(first))
    found = roles(replay.calls)
    coerce = f"{harness(first)}.coerce"
    assert found == expected_of_run(first, found, "a") | expected_of_run(coerce, found, "b")


SUB_TASK = {"claude": "SUBTASK-1 fg", "codex": "SUBTASK-1 fg"}


def in_place_of_sub_agent(name):
    """Changes requests of the main agent to those of the sub-agent of the same harness: its setting, its task."""
    (_, sub, _) = next(step for step in RECORDED[f"{harness(name)}.fg"] if step[0] == 2)
    brief = SUB_TASK[harness(name)]

    def change(value):
        if isinstance(value, dict):
            return {key: change(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [change(inner) for inner in value]
        return brief if value == TASK else value

    def changed(body):
        body = change(body)
        if body.get("tools"):  # a compaction request of Codex offers none
            body["tools"] = sub["body"]["tools"]
        if "system" in body:
            body["system"] = sub["body"]["system"]
        return body

    return changed


@pytest.mark.parametrize("with_hints", [True, False])
@pytest.mark.parametrize("name", ["claude.compact", "claude.compact_old", "codex.compact"])
def test_a_sub_agent_that_compacts_stays_a_sub_agent(name, with_hints):
    """The recorded compaction, made by the sub-agent that the recorded main agent started."""
    main = {n: [(n, request, response)] for n, request, response in RECORDED[f"{harness(name)}.fg"]}
    inner = RECORDED[name]
    replay = Replay()
    replay.play(main[1], "main-", with_hints)
    replay.play(inner, "sub-", with_hints=False, change=in_place_of_sub_agent(name))
    replay.play(main[3] if harness(name) == "codex" else main[6], "main-", with_hints)
    found = roles(replay.calls)
    for leaf, role in found.items():
        number = leaf.removeprefix("sub-")
        if leaf.startswith("main-"):
            assert role == MAIN
        elif EXPECTED[name].get(number) == MAIN_SUMMARY:
            assert role == SUB_AGENT_SUMMARY
        else:
            assert role == SUB_AGENT


@pytest.mark.parametrize("name", ["claude.fg", "qwen.fg", "opencode.fg"])
def test_an_interrupted_sub_agent_and_its_second_attempt_are_sub_agents(name):
    """The first attempt ends after one call; the main agent delegates the same brief again (paper, C.3)."""
    steps = {n: [(n, request, response)] for n, request, response in RECORDED[name]}
    first = min(n for n in steps if n > 1 and steps[n][0][2]["class"].startswith("sub"))
    replay = Replay()
    for n in range(1, first + 1):
        replay.play(steps[n], "one-")
    again = [steps[n][0] for n in sorted(steps) if steps[n][0][2]["class"] == steps[first][0][2]["class"]]
    replay.play(again, "two-")
    found = roles(replay.calls)
    sub = {leaf: role for leaf, role in found.items() if leaf in (f"one-{first}", f"two-{again[-1][0]}")}
    assert len(sub) == 2 and set(sub.values()) == {SUB_AGENT}


def forked(body, brief, keep_text):
    """A request as Claude Code's fork sends it: the parent's up to its delegating turn, then the brief."""
    *history, turn, _ = body["messages"]
    calls = [block for block in turn["content"] if block["type"] == "tool_use"]
    turn = turn if keep_text else turn | {"content": calls}
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "Fork started."} for call in calls
    ]
    last = {"role": "user", "content": [*results, {"type": "text", "text": brief}]}
    return body | {"messages": [*history, turn, last]}


@pytest.mark.parametrize("keep_text", [True, False])
@pytest.mark.parametrize("with_hints", [True, False])
def test_a_fork_of_the_main_context_is_a_sub_agent(with_hints, keep_text):
    steps = {n: (n, request, response) for n, request, response in RECORDED["claude.fg"]}
    brief = "SUBTASK-1 fg"
    n, request, response = steps[6]
    request = request | {"headers": [*request["headers"], ["X-Claude-Code-Agent-Id", "f0"]]}
    replay = Replay()
    replay.play([steps[1]], "main-")
    replay.play(
        [(n, request, response)], "fork-", with_hints, change=lambda body: forked(body, brief, keep_text)
    )
    replay.play([steps[6], steps[7]], "main-")
    assert roles(replay.calls) == {"fork-6": SUB_AGENT, "main-7": MAIN}
