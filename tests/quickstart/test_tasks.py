"""The tasks and their evaluator: what counts, and that no short cut does."""

import itertools
import json

import pytest
from gyre_cli.quickstart.tasks import evaluate, make_tasks
from gyre_scheduler.executions import harness_view
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

seeds = st.integers(0, 10_000)


def some_tasks(seed, count=20):
    return list(itertools.islice(make_tasks(seed), count))


def shown(messages):
    """(kind, path, word) of the item that the last message shows."""
    kind, _, rest = messages[-1]["content"].splitlines()[-1].partition(" ")
    return kind, *rest.split("=")


@given(seeds)
def test_a_seed_determines_the_tasks(seed):
    assert some_tasks(seed) == some_tasks(seed)
    assert some_tasks(seed) != some_tasks(seed + 1)


@given(seeds)
def test_tasks_are_json_and_named_apart(seed):
    tasks = some_tasks(seed)
    assert json.loads(json.dumps(tasks)) == tasks
    assert len({task["id"] for task in tasks}) == len(tasks)


@given(seeds)
def test_the_harness_never_gets_what_is_expected(seed):
    for task in some_tasks(seed):
        assert set(harness_view(task)) == {"id", "prompt", "context_budget"}
        for line in task["prompt"].splitlines():
            kind, path, word = line.replace("=", " ").split()
            if kind == "read":
                assert task["expect"][path] not in task["prompt"].replace("=", " ").split()
                assert task["files"][f"notes/{word}"] == f"write {path}={task['expect'][path]}"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(seed=seeds, data=st.data())
def test_the_score_is_the_share_of_right_files(tmp_path_factory, seed, data):
    task = next(make_tasks(seed))
    right = data.draw(st.sets(st.sampled_from(sorted(task["expect"]))))
    folder = tmp_path_factory.mktemp("workspace")
    for path, text in task["expect"].items():
        (folder / path).write_text(text if path in right else f"{text} ")
    assert evaluate(folder, task) == len(right) / len(task["expect"])


def test_a_link_a_folder_or_a_huge_file_scores_nothing(tmp_path):
    task = {"expect": {"api": "teal", "cli": "gold", "core": "jade", "data": "plum"}}
    (tmp_path / "elsewhere").write_text("teal")
    (tmp_path / "api").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cli").mkdir()
    (tmp_path / "core").write_text("jade" * 100_000)
    assert evaluate(tmp_path, task) == 0.0


def diligent(call):
    def reply(messages, tools):
        kind, path, word = shown(messages)
        return call("read", key=word) if kind == "read" else call(kind, path=path, content=word)

    return reply


def test_doing_what_is_asked_scores_one(agent_run, tool_call, tmp_path):
    for task in some_tasks(7):
        agent_run(task | {"context_budget": 10**6}, diligent(tool_call))
        assert evaluate(tmp_path, task) == 1.0
        for path in task["expect"]:
            (tmp_path / path).unlink()


SHORT_CUTS = {
    "never reads": lambda kind, path, word: ("write" if kind == "read" else kind, path, word),
    "never delegates": lambda kind, path, word: ("write" if kind == "task" else kind, path, word),
    "delegates everything unread": lambda kind, path, word: ("task", path, word),
    "writes a placeholder": lambda kind, path, word: (kind if kind == "read" else "write", path, "todo"),
    "writes over a note": lambda kind, path, word: ("write", f"notes/{word}", word),
    "writes another name of the file": lambda kind, path, word: ("write", f"./{path}", word),
}
GAIN = {
    "never reads": {"write", "task"},
    "never delegates": {"write", "read"},
    "delegates everything unread": {"write", "task"},
    "writes another name of the file": {"write"},
}


@pytest.mark.parametrize("name", SHORT_CUTS)
def test_a_short_cut_earns_only_the_items_it_does_right(agent_run, tool_call, tmp_path, name):
    def reply(messages, tools):
        kind, path, word = shown(messages)
        tool, path, word = (kind, path, word) if len(tools) == 1 else SHORT_CUTS[name](kind, path, word)
        return tool_call("read", key=word) if tool == "read" else tool_call(tool, path=path, content=word)

    for number, task in enumerate(some_tasks(11, 10)):
        folder = tmp_path / str(number)
        folder.mkdir()
        kinds = [line.split()[0] for line in task["prompt"].splitlines()]
        agent_run(task | {"context_budget": 10**6}, reply, folder=folder)
        assert evaluate(folder, task) == sum(kind in GAIN.get(name, ()) for kind in kinds) / len(kinds)
