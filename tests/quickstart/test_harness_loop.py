"""What the harness shows the model, and what it does with the model's replies."""

import pytest


def shown(request):
    """Text of the last message of a request."""
    return request[0][-1]["content"]


def test_items_are_shown_one_at_a_time(agent_run, tool_call, tmp_path):
    task = {"prompt": "write api=teal\nwrite cli=gold"}
    requests = agent_run(
        task, [tool_call("write", path="api", content="teal"), tool_call("write", path="cli", content="gold")]
    )
    assert [shown(request) for request in requests] == ["write api=teal", "ok\nwrite cli=gold"]
    assert (tmp_path / "api").read_text() == "teal"
    assert (tmp_path / "cli").read_text() == "gold"


def test_each_request_extends_the_one_before(agent_run, tool_call):
    task = {"prompt": "\n".join(f"write {name}=teal" for name in ("api", "cli", "core"))}
    requests = agent_run(
        task, [tool_call("write", path=name, content="teal") for name in ("api", "cli", "core")]
    )
    for (earlier, _), (later, _) in zip(requests, requests[1:], strict=False):
        assert later[: len(earlier)] == earlier


def test_a_read_replaces_the_item_by_its_note(agent_run, tool_call, tmp_path):
    task = {"prompt": "read core=jade", "files": {"notes/jade": "write core=teal"}}
    requests = agent_run(
        task, [tool_call("read", key="jade"), tool_call("write", path="core", content="teal")]
    )
    assert shown(requests[1]) == "ok\nwrite core=teal"
    assert (tmp_path / "core").read_text() == "teal"


def test_a_read_without_a_note_settles_the_item(agent_run, tool_call, text):
    task = {"prompt": "read core=jade\nwrite api=teal"}
    requests = agent_run(task, [tool_call("read", key="jade"), text("done")])
    assert shown(requests[1]) == "none\nwrite api=teal"


def test_reading_again_and_again_ends(agent_run, tool_call):
    task = {"prompt": "read core=jade\nwrite api=teal", "files": {"notes/jade": "write core=teal"}}
    requests = agent_run(task, lambda messages, tools: tool_call("read", key="jade"))
    assert len(requests) == 4


def test_a_delegated_item_runs_in_a_context_of_its_own(agent_run, tool_call, tmp_path, text):
    task = {"prompt": "task cli=gold\nwrite api=teal"}
    requests = agent_run(
        task,
        [
            tool_call("task", path="cli", content="gold"),
            tool_call("write", path="cli", content="gold"),
            text("done"),
        ],
    )
    main, sub_agent, back = requests
    assert sub_agent[0][1]["content"] == "write cli=gold"
    assert sub_agent[0][0] != main[0][0], "its own system prompt"
    assert (main[1], sub_agent[1]) == (["write", "read", "task"], ["write"])
    assert shown(back) == "ok\nwrite api=teal"
    assert (tmp_path / "cli").read_text() == "gold"


@pytest.mark.parametrize("path", ["cli", "./cli", "cli/", "notes/../cli"])
def test_a_delegated_item_is_denied_to_the_main_agent(agent_run, tool_call, tmp_path, text, path):
    task = {"prompt": "task cli=gold\nwrite api=teal", "files": {"notes/jade": "x"}}
    requests = agent_run(task, [tool_call("write", path=path, content="gold"), text("done")])
    assert shown(requests[1]) == "denied\nwrite api=teal"
    assert not (tmp_path / "cli").exists()


def test_a_sub_agent_cannot_delegate_or_read(agent_run, tool_call, text):
    task = {"prompt": "task cli=gold\nwrite api=teal", "files": {"notes/jade": "write cli=gold"}}
    requests = agent_run(
        task, [tool_call("task", path="cli", content="gold"), tool_call("read", key="jade"), text("done")]
    )
    assert len(requests) == 3, "the failed read settled the sub-agent's only item"


def test_a_full_context_is_replaced_by_its_summary(agent_run, tool_call, text):
    task = {"prompt": "write api=teal\nwrite cli=gold", "context_budget": 50}
    replies = [tool_call("write", path="api", content="teal"), text(" write cli=gold "), text("done")]
    first, summary, fresh = agent_run(task, replies, used=51)
    assert summary[0][: len(first[0])] == first[0], "asked in the same context"
    assert shown(summary) == "summary"
    assert fresh[0] == [first[0][0], {"role": "user", "content": "write cli=gold"}]


def test_a_context_within_its_budget_is_kept(agent_run, tool_call, text):
    task = {"prompt": "write api=teal\nwrite cli=gold", "context_budget": 50}
    requests = agent_run(task, [tool_call("write", path="api", content="teal"), text("done")], used=50)
    assert shown(requests[-1]) == "ok\nwrite cli=gold"


def test_a_summary_without_text_leaves_nothing_to_do(agent_run, tool_call, text):
    task = {"prompt": "write api=teal\nwrite cli=gold", "context_budget": 50}
    act = tool_call("write", path="api", content="teal")
    assert shown(agent_run(task, [act, act, text("done")], used=51)[-1]) == "empty"


def test_a_broken_call_is_forgotten_and_costs_its_item(agent_run, tool_call, text):
    task = {"prompt": "write api=teal\nwrite cli=gold\nwrite core=jade"}
    replies = [
        tool_call("write", path="api", content="teal"),
        text('<tool_call>{"name": "write", "argum</tool_call>'),
        text("done"),
    ]
    _, broken, after = agent_run(task, replies)
    assert shown(broken) == "ok\nwrite cli=gold"
    assert shown(after) == "ok\nwrite core=jade"
    assert after[0][:-1] == broken[0][:-1], "a branch: the same history but for the shown item"


@pytest.mark.parametrize(
    "arguments",
    [{"path": "api"}, {"path": "api", "content": "teal", "mode": "x"}, {"path": 1, "content": "x"}],
)
def test_wrong_arguments_cost_the_item(agent_run, tool_call, text, tmp_path, arguments):
    task = {"prompt": "write api=teal\nwrite cli=gold"}
    requests = agent_run(task, [tool_call("write", **arguments), text("done")])
    assert shown(requests[1]) == "error\nwrite cli=gold"
    assert not (tmp_path / "api").exists()


def test_an_unknown_tool_costs_the_item(agent_run, tool_call, text):
    requests = agent_run(
        {"prompt": "write api=teal\nwrite cli=gold"}, [tool_call("shell", run="ls"), text("")]
    )
    assert shown(requests[1]) == "error\nwrite cli=gold"


def test_every_call_of_a_reply_is_answered(agent_run, tool_call, text):
    reply = tool_call("write", path="api", content="teal")
    reply["tool_calls"] += tool_call("write", path="cli", content="gold")["tool_calls"]
    requests = agent_run({"prompt": "write api=teal\nwrite cli=gold\nwrite core=jade"}, [reply, text("done")])
    assert [message["content"] for message in requests[1][0][-2:]] == [
        "ok\nwrite cli=gold",
        "ok\nwrite core=jade",
    ]


@pytest.mark.parametrize(
    "path", ["../out", "/tmp/out", "a/../../out", "", ".", "link/out", "x\0y", "a" * 5000]
)
def test_nothing_is_written_outside_the_workspace(harness, tmp_path, path):
    outside, folder = tmp_path / "outside", tmp_path / "workspace"
    outside.mkdir()
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    assert not harness.Workspace(str(folder)).write(path, "text")
    assert not any(outside.iterdir())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["outside", "workspace"]


@pytest.mark.parametrize("key", ["../api", "../notes/../api", "/etc/passwd", "", "."])
def test_only_notes_are_read(harness, tmp_path, key):
    (tmp_path / "api").write_text("secret")
    (tmp_path / "notes").mkdir()
    assert harness.Workspace(str(tmp_path)).note(key) is None
