"""Tasks come in a seeded order, endlessly, and a bad task is named."""

from itertools import islice

import pytest
from gyre_cli.errors import MisuseError
from gyre_cli.sources import load_function, load_tasks


def write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_file_is_repeated_in_a_seeded_order(tmp_path):
    source = write(tmp_path / "t.jsonl", [f'{{"id": "{i}", "prompt": "p"}}' for i in range(5)])
    first = [task["id"] for task in islice(load_tasks(source, 1), 10)]
    assert first == [task["id"] for task in islice(load_tasks(source, 1), 10)]
    assert sorted(first[:5]) == sorted(first[5:]) == list("01234")
    assert first != [task["id"] for task in islice(load_tasks(source, 2), 10)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "a task is an object"),
        ('{"id": "a"}', "a task is an object"),
        ('{"id": "a", "prompt": "p", "files": {"../x": ""}}', "outside the workspace"),
        ('{"id": "a", "prompt": "p", "files": {"x\\u0000": ""}}', "outside the workspace"),
        ('{"id": "a", "prompt": "p", "files": {"x": 5}}', "must hold a string"),
        ('{"id": "a", "prompt": "p", "files": ["x"]}', "task a: files is an object"),
        ('{"id": "a", "prompt": "p", "harness": 7}', "task a: harness is an object, not '7'"),
    ],
)
def test_a_bad_task_is_named(tmp_path, line, message):
    with pytest.raises(MisuseError, match=message):
        load_tasks(write(tmp_path / "t.jsonl", [line]), 0)


def test_a_missing_source_and_function_are_named(tmp_path):
    with pytest.raises(MisuseError, match="cannot be read"):
        load_tasks(str(tmp_path / "none.jsonl"), 0)
    with pytest.raises(MisuseError, match=r"no\.such:thing"):
        load_function("no.such:thing", "task.source")
    with pytest.raises(MisuseError, match="json:nothing"):
        load_function("json:nothing", "task.source")


@pytest.mark.parametrize(
    "text",
    [
        "def f(seed): raise OSError('no')",
        "def f(seed): return 5",
        "raise SystemExit(7)",
        "def f(seed:",
        "1 / 0",
    ],
)
def test_a_module_that_fails_in_any_way_is_named(tmp_path, monkeypatch, text):
    name = f"source_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MisuseError, match=name):
        load_tasks(f"{name}:f", 0)
