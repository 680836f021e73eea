import pytest
from gyre_trajtree import ROLES, contexts_of, infer_roles
from gyre_trajtree.evidence import plain
from hypothesis import given
from hypothesis import strategies as st

TASK = "Build the inventory service described in spec.md and make its tests pass."
BRIEF = "Write the catalog module with its loader and return the list of files."
SUMMARY = "The catalog is finished, the loader is half done, and tests for it are missing so far."
MAIN = {"system": "S-main", "tools": "T-main", "first_user": TASK, "last_user": TASK}
SUB = {"system": "S-sub", "tools": "T-sub", "first_user": BRIEF, "last_user": BRIEF}
TITLE = {
    "system": "S-title",
    "tools": None,
    "first_user": TASK,
    "last_user": TASK,
    "text": "Inventory service",
}
CONTINUED = {
    "system": "S-main",
    "tools": "T-main",
    "first_user": f"This session continues an earlier one. Its summary:\n{SUMMARY}\nGo on.",
    "last_user": f"This session continues an earlier one. Its summary:\n{SUMMARY}\nGo on.",
}
ASKED = "Your context is full. Please summarise the work."


def delegating_run(recorder):
    recorder.call("main-1", evidence=MAIN | {"spawns": ["catalog", BRIEF]})
    recorder.call("sub-1", evidence=SUB)
    recorder.call("sub-2", "sub-1", evidence=SUB)
    recorder.call("main-2", "main-1", evidence=MAIN)


def test_a_lone_root_is_the_main_agent(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("b", "a", evidence=MAIN)
    assert recorder.roles() == {"b": "main"}


def test_a_context_that_a_tool_argument_opened_is_a_sub_agent(recorder):
    delegating_run(recorder)
    assert recorder.roles() == {"sub-2": "sub-agent", "main-2": "main"}
    decision = infer_roles(recorder.tree())["sub-2"]
    assert decision.confidence > 0.8 and "main-1" in decision.evidence[0]


def test_reminders_and_spacing_around_a_brief_do_not_hide_it(recorder):
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF]})
    wrapped = f"<system-reminder>be\nbrief</system-reminder>\n\n  {BRIEF.replace(' ', '  ')}\n"
    recorder.call("fork", evidence=MAIN | {"first_user": wrapped})
    assert recorder.roles()["fork"] == "sub-agent"


def test_a_brief_longer_than_the_record_still_matches(recorder):
    brief = "Write module number one. " * 100
    recorder.call("main-1", evidence=MAIN | {"spawns": [brief[:2000]]})
    recorder.call("sub", evidence=SUB | {"first_user": brief[:1990]})
    assert infer_roles(recorder.tree())["sub"].evidence[0].startswith("call main-1")


def test_short_arguments_of_a_delegating_tool_mark_a_sub_agent(recorder):
    recorder.call("main-1", evidence=MAIN | {"spawns": ["api", "teal"]})
    recorder.call("sub", evidence=SUB | {"first_user": "write api=teal", "last_user": "write api=teal"})
    decision = infer_roles(recorder.tree())["sub"]
    assert decision.role == "sub-agent" and "main-1" in decision.evidence[0]


def test_short_arguments_found_in_the_main_agents_own_continuation_do_not_mislead(recorder):
    recorder.call("main-1", evidence=MAIN | {"spawns": ["catalog", "loader"]})
    recorder.call("sum", "main-1", evidence=MAIN | {"last_user": ASKED, "text": SUMMARY})
    recorder.call("main-2", evidence=CONTINUED)
    assert recorder.roles() == {"sum": "main-summary", "main-2": "main"}


def test_compaction_makes_a_summary_leaf_and_a_main_continuation(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("b", "a", evidence=MAIN)
    recorder.call("sum", "a", evidence=MAIN | {"last_user": ASKED, "text": SUMMARY})
    recorder.call("c", evidence=CONTINUED)
    recorder.call("d", "c", evidence=CONTINUED)
    assert recorder.roles() == {"b": "main", "sum": "main-summary", "d": "main"}


def test_a_summary_without_a_continuation_is_known_by_the_request(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("sum", "a", evidence=MAIN | {"last_user": ASKED, "text": SUMMARY})
    assert recorder.roles() == {"sum": "main-summary"}


def test_a_continuation_is_no_summary_because_its_first_message_speaks_of_one(recorder):
    recorder.call("c", evidence=CONTINUED)
    recorder.call("d", "c", evidence=CONTINUED)
    assert recorder.roles() == {"d": "main"}


def test_a_sub_agent_that_compacts_stays_a_sub_agent(recorder):
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF]})
    recorder.call("sub-1", evidence=SUB)
    recorder.call("sum", "sub-1", evidence=SUB | {"last_user": ASKED, "text": SUMMARY})
    recorder.call("sub-2", evidence=CONTINUED | {"system": "S-sub", "tools": "T-sub"})
    recorder.call("main-2", "main-1", evidence=MAIN)
    assert recorder.roles() == {"sum": "sub-agent-summary", "sub-2": "sub-agent", "main-2": "main"}


def test_a_summariser_in_a_context_of_its_own_belongs_to_who_continues(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("sum", evidence={"system": "S-sum", "first_user": "transcript ...", "text": SUMMARY})
    recorder.call("c", evidence=CONTINUED)
    assert recorder.roles() == {"a": "main", "sum": "main-summary", "c": "main"}
    assert [context.cause for context in contexts_of(recorder.tree())] == ["start", "summary", "compaction"]


def test_title_generation_is_auxiliary_even_when_it_comes_first(recorder):
    recorder.call("title", evidence=TITLE)
    recorder.call("a", evidence=MAIN)
    recorder.call("b", "a", evidence=MAIN)
    assert recorder.roles(task_prompt=TASK) == {"title": "auxiliary", "b": "main"}


def test_a_title_copied_from_the_task_is_no_summary(recorder):
    recorder.call("title", evidence=TITLE | {"text": "Build the inventory service"})
    recorder.call("a", evidence=MAIN)
    assert recorder.roles() == {"title": "auxiliary", "a": "main"}


def test_a_result_passed_to_a_second_sub_agent_is_no_summary(recorder):
    """The text travels through the main agent's tool argument: a delegation, not a compaction."""
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF]})
    recorder.call("sub-1", evidence=SUB | {"text": SUMMARY})
    second = f"Finish the loader. {SUMMARY}"
    recorder.call("main-2", "main-1", evidence=MAIN | {"spawns": [second]})
    recorder.call("sub-2", evidence=SUB | {"first_user": second})
    assert recorder.roles() == {"sub-1": "sub-agent", "main-2": "main", "sub-2": "sub-agent"}


def test_a_changed_history_with_the_same_setting_stays_main(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("edited", evidence=MAIN | {"first_user": "Something else entirely."})
    assert recorder.roles() == {"a": "main", "edited": "main"}


def test_the_main_setting_outweighs_short_arguments_found_by_chance(recorder):
    recorder.call("a", evidence=MAIN | {"spawns": ["catalog", "loader"]})
    recorder.call("edited", evidence=MAIN | {"first_user": "Go on with the catalog and the loader."})
    assert recorder.roles() == {"a": "main", "edited": "main"}


def test_structure_outweighs_a_wrong_hint(recorder):
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF], "kind": "subagent"})
    recorder.call("sub-1", evidence=SUB | {"kind": "main"})
    assert recorder.roles() == {"main-1": "main", "sub-1": "sub-agent"}


def test_a_hint_decides_where_structure_is_silent(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("b", evidence={"kind": "sub-agent", "system": "S-main", "tools": "T-few"})
    recorder.call("c", "a", evidence=MAIN | {"kind": "compact", "last_user": "Fasse zusammen."})
    recorder.call("d", "a", evidence=MAIN | {"kind": "compact", "last_user": "Condense this."})
    assert recorder.roles() == {"b": "sub-agent", "c": "main-summary", "d": "main-summary"}


def test_headers_of_a_parent_agent_count_as_a_hint(recorder):
    recorder.call("a", evidence=MAIN, hints={"session": "s"})
    unmatched = SUB | {"first_user": "Rewritten.", "system": "S-main"}
    recorder.call("b", evidence=unmatched, hints={"session": "s", "parent": "p"})
    recorder.call("c", evidence=unmatched | {"tools": "T-3"}, hints={"subagent": "review"})
    recorder.call("d", "a", evidence=MAIN | {"last_user": "Condense this."}, hints={"subagent": "compact"})
    assert recorder.roles() == {"b": "sub-agent", "c": "sub-agent", "d": "main-summary"}


def test_the_task_finds_the_main_context_among_roots_without_tools(recorder):
    recorder.call("a", evidence={"system": "S1", "first_user": "What is the weather like today?"})
    recorder.call("b", evidence={"system": "S2", "first_user": TASK})
    assert recorder.roles(task_prompt=TASK)["b"] == "main"
    assert recorder.roles(task_prompt=TASK)["a"] != "main"


def test_a_log_without_evidence_is_all_main_with_little_confidence(recorder):
    recorder.call("a")
    recorder.call("b")
    decisions = infer_roles(recorder.tree())
    assert {d.role for d in decisions.values()} == {"main"}
    assert decisions["b"].confidence < 0.6


texts = st.sampled_from([TASK, BRIEF, SUMMARY, "api", ""])
anything = st.none() | st.integers() | texts | st.lists(texts | st.integers(), max_size=2)
evidence = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        [
            "system",
            "tools",
            "first_user",
            "last_user",
            "opening",
            "spawns",
            "text",
            "kind",
            "echoes",
            "tool_calls",
        ],
        anything,
    ),
)


@given(st.lists(st.tuples(st.integers(-1, 10), evidence), min_size=1, max_size=10))
def test_every_leaf_gets_one_decision_whatever_was_recorded(new_recorder, steps):
    recorder = new_recorder()
    for i, (target, recorded) in enumerate(steps):
        recorder.call(f"c{i}", f"c{target % i}" if target >= 0 and i else None, evidence=recorded)
    tree = recorder.tree()
    decisions = infer_roles(tree, TASK)
    assert list(decisions) == [leaf.id for leaf in tree.leaves()]
    assert all(d.role in ROLES and 0 < d.confidence <= 1 and d.evidence for d in decisions.values())
    assert decisions == infer_roles(tree, TASK)


def without_evidence(recorder, **kwargs):
    """A foreign log: tokens only."""
    for call in recorder.calls:
        call.evidence = {}
    return recorder.roles(**kwargs)


def test_tokens_alone_show_a_compaction(recorder):
    system, summary = recorder.fresh(50), recorder.fresh(40)
    recorder.call("a", new=system + recorder.fresh(10))
    recorder.call("b", "a")
    recorder.call("sum", "a", out=summary)
    recorder.call("c", new=system + recorder.fresh(5) + summary + recorder.fresh(5))
    recorder.call("d", "c")
    assert without_evidence(recorder) == {"b": "main", "sum": "main-summary", "d": "main"}


def test_tokens_alone_show_a_delegation(recorder):
    brief = recorder.fresh(30)
    recorder.call("a", out=recorder.fresh(20) + brief + recorder.fresh(4))
    recorder.call("sub", new=recorder.fresh(60) + brief + recorder.fresh(5))
    recorder.call("b", "a")
    assert without_evidence(recorder) == {"sub": "sub-agent", "b": "main"}


def test_words_that_every_prompt_holds_link_nothing(recorder):
    """A model that quotes its system text does not thereby write the next root's opening."""
    system = recorder.fresh(60)
    recorder.call("a", new=system + recorder.fresh(5), out=system[:40])
    recorder.call("b", new=system + recorder.fresh(5))
    assert without_evidence(recorder) == {"a": "main", "b": "main"}


def test_a_log_whose_writer_encodes_every_prompt_anew_is_all_main(recorder):
    """No prompt extends an earlier path exactly, so each call is a root that repeats what was said before."""
    system, prompt = recorder.fresh(50), []
    for turn in range(6):
        prompt = prompt + recorder.fresh(30)
        out = recorder.fresh(40)
        recorder.call(f"c{turn}", new=system + prompt, out=out)
        prompt = prompt + [*recorder.fresh(1), *out[1:]]  # the first token came back as another
    assert set(without_evidence(recorder).values()) == {"main"}
    contexts = contexts_of(recorder.tree())
    assert [c.cause for c in contexts] == ["start"] + ["edit"] * 5
    assert [c.source and c.source.id for c in contexts] == [None, "c0", "c1", "c2", "c3", "c4"]


def test_a_summary_in_any_language_is_known_by_its_reappearance(recorder):
    summary = "目录已完成,加载器完成了一半,测试尚未编写。请继续完成加载器并运行测试。"
    recorder.call("a", evidence=MAIN)
    recorder.call("sum", "a", evidence=MAIN | {"last_user": "请概括到目前为止的工作。", "text": summary})
    opening = f"以下是之前的摘要:{summary}"
    recorder.call("b", evidence=MAIN | {"first_user": opening, "last_user": opening})
    assert recorder.roles() == {"sum": "main-summary", "b": "main"}


def test_a_result_told_to_the_main_agents_next_context_makes_no_summary_of_a_sub_agent(recorder):
    """A harness that drops old turns without a model call may keep what a sub-agent answered."""
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF], "tool_calls": 1})
    recorder.call("sub-1", evidence=SUB | {"text": SUMMARY, "tool_calls": 0})
    recorder.call("main-2", "main-1", evidence=MAIN | {"tool_calls": 1})
    recorder.call("main-3", evidence=MAIN | {"opening": f"{TASK}\nEarlier turns were removed. {SUMMARY}"})
    assert recorder.roles() == {"sub-1": "sub-agent", "main-2": "main", "main-3": "main"}


def test_tools_that_change_within_a_context_do_not_hide_whose_it_is(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call("b", "a", evidence=MAIN | {"tools": "T-more"})
    recorder.call("c", evidence={"system": "S-other", "tools": "T-more", "first_user": "Go on."})
    assert recorder.roles() == {"b": "main", "c": "main"}


def test_causes_name_why_each_context_began(recorder):
    recorder.call("title", evidence=TITLE)
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF], "tool_calls": 1})
    recorder.call("sub", evidence=SUB | {"tool_calls": 1})
    recorder.call("sum", "main-1", evidence=MAIN | {"last_user": ASKED, "text": SUMMARY, "tool_calls": 0})
    recorder.call("main-2", evidence=CONTINUED | {"tool_calls": 1})
    recorder.call("edited", evidence=CONTINUED | {"echoes": ["main-2"], "tool_calls": 1})
    recorder.call("other", evidence=MAIN | {"first_user": "Something new.", "last_user": "Something new."})
    found = {
        context.head.id: (context.family, context.cause, context.source and context.source.id)
        for context in contexts_of(recorder.tree(), TASK)
    }
    assert found == {
        "title": ("auxiliary", "auxiliary", None),
        "main-1": ("main", "start", None),
        "sub": ("sub-agent", "delegation", "main-1"),
        "main-2": ("main", "compaction", "sum"),
        "edited": ("main", "edit", "main-2"),
        "other": ("main", "start", None),
    }


def test_every_call_is_in_one_context(recorder):
    delegating_run(recorder)
    contexts = contexts_of(recorder.tree())
    names = [node.id for context in contexts for node in context.nodes]
    assert sorted(names) == sorted(call.id for call in recorder.calls)


def test_a_task_that_a_harness_rewords_in_part_still_finds_the_main_context(recorder):
    reworded = TASK.replace("and make its tests pass", "then have its tests succeed")
    recorder.call("a", evidence={"system": "S1", "first_user": "What is the weather like today?"})
    recorder.call("b", evidence={"system": "S2", "first_user": f"Please do this: {reworded}"})
    decisions = infer_roles(recorder.tree(), TASK)
    assert decisions["b"].role == "main" and decisions["a"].role != "main"
    whole = infer_roles(recorder.tree(), f"Please do this: {reworded}")
    assert whole["b"].confidence > decisions["b"].confidence


def test_turns_kept_beside_a_summary_do_not_make_it_an_edited_history(recorder):
    recorder.call("a", evidence=MAIN | {"tool_calls": 1})
    recorder.call("b", "a", evidence=MAIN | {"tool_calls": 1})
    recorder.call("c", "b", evidence=MAIN | {"tool_calls": 1})
    recorder.call("sum", "c", evidence=MAIN | {"last_user": ASKED, "text": SUMMARY, "tool_calls": 0})
    recorder.call("d", evidence=CONTINUED | {"echoes": ["b", "c"], "tool_calls": 1})
    assert recorder.roles() == {"sum": "main-summary", "d": "main"}


def test_an_edited_history_that_ends_with_an_answer_makes_no_summary_of_it(recorder):
    """Old tool results were cleared in place: every turn comes along, the last answer too."""
    answer = MAIN | {"last_user": "And the docs?", "text": SUMMARY, "tool_calls": 0}
    recorder.call("a", evidence=MAIN | {"tool_calls": 1})
    recorder.call("b", "a", evidence=MAIN | {"tool_calls": 1})
    recorder.call("c", "b", evidence=answer)
    opening = {"opening": f"{TASK}\n{SUMMARY}\nGo on.", "last_user": "Go on.", "echoes": ["a", "b"]}
    recorder.call("d", evidence=MAIN | opening | {"tool_calls": 1})
    assert recorder.roles() == {"c": "main", "d": "main"}


def test_notes_that_a_later_session_reads_are_no_brief(recorder):
    recorder.call("a", evidence=MAIN | {"spawns": [SUMMARY], "tool_calls": 1})
    recorder.call("b", "a", evidence=MAIN | {"tool_calls": 0})
    opening = f"A new session. Your notes: {SUMMARY}"
    recorder.call("c", evidence=MAIN | {"first_user": opening, "last_user": opening, "tool_calls": 1})
    assert recorder.roles() == {"b": "main", "c": "main"}


def test_nested_and_parallel_sub_agents_are_all_sub_agents(recorder):
    inner = "Look for loader bugs inside catalog.py and report every one."
    recorder.call("main-1", evidence=MAIN | {"spawns": [BRIEF, BRIEF]})
    recorder.call("one", evidence=SUB | {"spawns": [inner]})
    recorder.call("two", evidence=SUB)
    recorder.call("inner", evidence=SUB | {"first_user": inner, "last_user": inner})
    recorder.call("one-2", "one", evidence=SUB)
    recorder.call("main-2", "main-1", evidence=MAIN)
    assert recorder.roles() == {
        "two": "sub-agent",
        "inner": "sub-agent",
        "one-2": "sub-agent",
        "main-2": "main",
    }


def test_a_task_that_is_a_summary_is_the_main_agents(recorder):
    task = "Write a summary of the repository into SUMMARY.md."
    own = MAIN | {"first_user": task, "last_user": task}
    recorder.call("a", evidence=own | {"tool_calls": 1})
    recorder.call("b", "a", evidence=own | {"tool_calls": 0, "text": "Done."})
    assert recorder.roles(task_prompt=task) == {"b": "main"}


@pytest.mark.parametrize("kind", ["title", "probe"])
def test_a_context_that_works_is_no_side_request_whatever_a_header_says(recorder, kind):
    recorder.call("a", evidence=MAIN)
    worker = {"system": "S-own", "tools": "T-own", "first_user": "Look.", "kind": kind, "tool_calls": 1}
    recorder.call("b", evidence=worker)
    recorder.call("c", "b", evidence=worker)
    assert recorder.roles() == {"a": "main", "c": "sub-agent"}


def test_a_brief_that_is_nearly_all_that_a_call_wrote_is_still_a_brief(recorder):
    brief = recorder.fresh(200)
    recorder.call("a", out=[*recorder.fresh(3), *brief, *recorder.fresh(1)])
    recorder.call("sub", new=recorder.fresh(60) + brief + recorder.fresh(5))
    recorder.call("b", "a")
    assert without_evidence(recorder) == {"sub": "sub-agent", "b": "main"}


def test_a_turn_that_is_kept_whole_is_no_brief(recorder):
    turn = recorder.fresh(60)
    recorder.call("a", out=turn)
    recorder.call("b", "a")
    recorder.call("c", new=recorder.fresh(20) + turn + recorder.fresh(5))
    assert without_evidence(recorder) == {"b": "main", "c": "main"}


def test_a_word_in_a_name_asks_for_no_summary(recorder):
    recorder.call("a", evidence=MAIN)
    recorder.call(
        "b", "a", evidence=MAIN | {"last_user": "Fix the bug in summary_table.py now", "tool_calls": 0}
    )
    assert recorder.roles() == {"b": "main"}


def test_the_first_call_of_an_execution_summarises_nothing_whatever_a_header_says(recorder):
    recorder.call("a", evidence=MAIN | {"kind": "compact", "tool_calls": 0})
    assert recorder.roles() == {"a": "main"}


def test_a_conversation_begun_once_more_is_no_sub_agent_of_the_first(recorder):
    recorder.call("a", evidence=MAIN | {"spawns": [TASK]})
    recorder.call("b", "a", evidence=MAIN)
    recorder.call("again", evidence=MAIN)
    assert recorder.roles() == {"b": "main", "again": "main"}


def test_marks_that_never_close_cost_one_look(recorder):
    text = "<analysis>" * 40_000
    assert plain(f"<analysis>x</analysis>{text}") == text
    assert plain("a<system-reminder>b</system-reminder> c <analysis>d</analysis>e") == "a c e"
