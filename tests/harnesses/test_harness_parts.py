"""What the tests of harnesses rest on: the policy's reading of prompts, what is told where a harness is missing."""

import json

import harness_install
import pytest
from harness_all import HARNESSES, need
from harness_install import PACKAGES, STAMP, InstallError, missing
from harness_policy import FINAL, Script, Step, Use, turns
from harness_scenarios import chains, work

CODEX = next(each for each in HARNESSES if each.name == "codex")
SCRIPT = Script(
    {
        "main": [
            Step("One.", [Use("shell", {"cmd": "ls"})], "Hm."),
            Step("", [Use("shell", {"cmd": "echo main.2"})]),
        ],
        "first": [Step("Mine.")],
    },
    summary_request="^SUMMARISE",
    title_request="title generator",
    asides={},
)


def chat(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


def test_answers_follow_from_marks_and_from_who_is_spoken_to():
    begun = [("system", "main.7 is no mark of main"), ("user", "You are actor-main.")]
    mark, said = SCRIPT.answer(chat(begun[1]))
    assert mark == "main.1"
    call = '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls"}}\n</tool_call>'
    assert said == f"<think>\nHm.\n</think>\n\nOne. (main.1)\n{call}"
    after = [begun[1], ("assistant", said), ("user", "\n<tool_response>\nactor-first\n</tool_response>")]
    assert SCRIPT.answer(chat(*after))[0] == "main.2"
    assert SCRIPT.answer(chat(*after, ("user", "You are actor-first.")))[0] == "first.1"
    assert [turn.role for turn in turns(chat(*after))] == ["user", "assistant", "tool"]


def test_an_answer_that_was_cut_before_its_mark_is_given_again():
    cut = chat(
        ("user", "You are actor-main."), ("assistant", "<think>\nHm.\n</think>\n\nOn"), ("user", "Go on.")
    )
    assert SCRIPT.answer(cut)[0] == "main.1"


def test_a_summary_tells_how_far_its_actor_is():
    done = chat(("user", "You are actor-main."), ("assistant", "One. (main.1)"), ("user", "SUMMARISE this"))
    mark, said = SCRIPT.answer(done)
    assert mark == "summary"
    assert SCRIPT.answer(chat(("user", said)))[0] == "main.2"
    assert SCRIPT.answer(chat(("system", "You are a title generator."), ("user", "SUMMARISE")))[0] == "title"


def test_what_the_script_does_not_foresee_is_named():
    with pytest.raises(LookupError, match="main has no step 3"):
        SCRIPT.answer(chat(("user", "You are actor-main."), ("assistant", "main.2")))
    with pytest.raises(LookupError, match="nobody names an actor"):
        SCRIPT.answer(chat(("user", "You are actor-nobody.")))


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda each: each.name)
def test_every_script_ends_with_the_final_words_of_the_main_agent(harness):
    script = work(harness)
    assert FINAL in script.steps["main"][-1].text
    assert "main.1" in chains(script)


def test_a_harness_that_is_missing_is_skipped_here_and_fails_in_ci(monkeypatch, tmp_path):
    monkeypatch.setenv(harness_install.DIRECTORY_VARIABLE, str(tmp_path))
    assert "harness_install.py codex" in missing("codex")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="codex is not installed"):
        need(CODEX)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="codex is not installed"):
        need(CODEX)


def test_only_the_pinned_versions_count_as_installed(monkeypatch, tmp_path):
    monkeypatch.setenv(harness_install.DIRECTORY_VARIABLE, str(tmp_path))
    stamp = tmp_path / "codex" / STAMP
    stamp.parent.mkdir()
    for text in ("", json.dumps({"@openai/codex": "0.0.1"})):
        stamp.write_text(text)
        assert missing("codex") is not None
    stamp.write_text(json.dumps(dict(PACKAGES["codex"].versions)))
    assert missing("codex") is None
    assert harness_install.install("codex", stamp.parent) is False


def test_a_failed_installation_leaves_no_stamp_and_says_what_failed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match="npm is not on PATH"):
        harness_install.install("codex", tmp_path / "codex")
    assert not (tmp_path / "codex" / STAMP).exists()
