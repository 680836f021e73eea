"""The page of `gyre tree inspect --html` in a real browser: it opens, folds, searches, and shows what the log holds."""

from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pytest
from cli_trees import gyre, long_log, two_executions
from gyre_cli import treepage
from gyre_cli.quickstart import model_path
from gyre_cli.treepage import tree_page
from gyre_trajtree import Call, Execution, RunLogIndex, RunLogWriter, inspect
from playwright.sync_api import expect, sync_playwright

HOSTILE = (
    "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>'\"&amp;\u202egnp\u0000\x1b[2J 👩‍🚀"
)


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        reason = f"no browser: none of {', '.join(names)} is on the PATH; install the package chromium"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Opens a page file; at the end nothing may have been said, thrown, asked of the network or asked of the user."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page, trouble = context.new_page(), []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda each: None if each.is_navigation_request() else trouble.append(each.url))

    def opened(path):
        page.goto(path.as_uri())
        return page

    opened.trouble = trouble
    yield opened
    context.close()
    assert trouble == []


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A log of 2,000 calls and about a million tokens, and its page."""
    folder = tmp_path_factory.mktemp("long")
    log = long_log(folder / "long.jsonl", 2000, given=440, sampled=60)
    result = gyre("tree", "inspect", log, "--html", folder / "long.html", "--json")
    assert result.returncode == 0, result.stderr
    return log, folder / "long.html"


def page_of(log, folder, *options):
    result = gyre("tree", "inspect", log, "--html", folder / "page.html", "--json", *options)
    assert result.returncode == 0, result.stderr
    return folder / "page.html"


def rows(page):
    """How many rows the list has: those out of view have no element."""
    return page.evaluate("list.rows.length")


def shown_tokens(page):
    """Every token element in order: (id, log-prob or None, fate, version or None)."""
    return page.eval_on_selector_all(
        ".tokens .t", "all => all.map(({token: t}) => [t.id, t.logprob ?? null, t.fate, t.version ?? null])"
    )


def find(page, text):
    page.fill("#find", text)
    page.press("#find", "Enter")


def test_a_page_of_2000_calls_opens_with_few_elements(long, visit):
    log, file = long
    found = inspect(RunLogIndex(log).load("x-long"))
    page = visit(file)
    expect(page.locator("#title")).to_have_text("x-long")
    figures = page.locator("#figures")
    expect(figures).to_contain_text(f"{len(found.tree):,}")
    expect(figures).to_contain_text(f"trained {found.ledger.trained:,}")
    assert len(found.tree) >= 2000 and rows(page) == len(found.strands)
    assert page.locator("#rows .row").count() < 80
    page.get_by_role("button", name="calls", exact=True).click()
    assert rows(page) == len(found.strands) + len(found.tree)
    assert page.locator("#rows .row").count() < 80


def test_every_call_is_reached_by_keys_alone(long, visit):
    log, file = long
    found = inspect(RunLogIndex(log).load("x-long"))
    page = visit(file)
    page.get_by_role("button", name="calls", exact=True).click()
    page.focus("#tree")
    page.keyboard.press("End")
    last = rows(page) - 1
    expect(page.locator(f"#row-{last}")).to_have_class(re.compile("picked"))
    assert page.get_attribute("#tree", "aria-activedescendant") == f"row-{last}"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#panel h2")).to_have_text(found.tree.nodes[0].id)
    page.keyboard.press("/")
    expect(page.locator("#find")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#tree")).to_be_focused()


def test_strands_fold_and_unfold(long, visit):
    page = visit(long[1])
    found = inspect(RunLogIndex(long[0]).load("x-long"))
    outermost = [strand for strand in found.strands if strand.above is None]
    page.get_by_role("button", name="contexts").click()
    assert rows(page) == len(outermost)
    at = next(i for i, strand in enumerate(outermost) if strand.below)
    row = page.locator(f"#row-{at}")
    expect(row).to_have_attribute("aria-expanded", "false")
    row.locator(".twist").click()
    expect(row).to_have_attribute("aria-expanded", "true")
    assert rows(page) == len(outermost) + len(outermost[at].below)
    row.click()
    page.keyboard.press("ArrowRight")
    assert rows(page) == len(outermost) + len(outermost[at].below) + len(outermost[at].nodes)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert rows(page) == len(outermost)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("call-01234", lambda found: [found.tree["call-01234"]]),
        ("MAIN-SUMMARY", lambda f: [s.leaf for s in f.strands if f.roles[s.leaf.id].role == "main-summary"]),
        ("taken back", lambda f: [n for n in f.tree.nodes if "taken back" in n.call.evidence["text"]]),
        ("aborted", lambda f: [n for n in f.tree.nodes if n.id in f.dead]),
        ("no such text", lambda f: []),
    ],
)
def test_search_finds_id_role_text_and_fate(long, visit, query, expected):
    page = visit(long[1])
    nodes = expected(inspect(RunLogIndex(long[0]).load("x-long")))
    page.fill("#find", query)
    expect(page.locator("#hits")).to_have_text(f"{len(nodes)} found")
    for node in nodes[:2]:
        page.press("#find", "Enter")
        expect(page.locator("#panel h2")).to_have_text(node.id)
        expect(page.locator(".row.picked.hit.call")).to_be_in_viewport()


def test_a_call_shows_exactly_what_the_log_holds(long, visit):
    log, file = long
    found = inspect(RunLogIndex(log).load("x-long"))
    page = visit(file)
    drawn = next(node for node in found.tree.nodes if found.trained(node))
    lost = next(node for node in found.tree.nodes if node.id in found.dead)
    for node in (found.tree.nodes[0], drawn, lost, found.tree.nodes[-1]):
        find(page, node.id)
        expect(page.locator("#panel h2")).to_have_text(node.id)
        while page.locator("#panel .more", has_text="given tokens").count():
            page.locator("#panel .more", has_text="given tokens").click()
        tokens = shown_tokens(page)
        given, sampled = tokens[: len(node.call.input_ids)], tokens[len(node.call.input_ids) :]
        assert given == [[token, None, "given", None] for token in node.call.input_ids.tolist()]
        assert [token[0] for token in sampled] == node.call.output_ids.tolist()
        assert np.array_equal(np.float32([token[1] for token in sampled]), node.call.logprobs)
        assert {token[2] for token in sampled} == {found.fates[node.index]}
        assert [token[3] for token in sampled] == node.call.token_versions().tolist()
    page.locator(".tokens .t").last.hover()
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"token {tokens[-1][0]}")
    assert float(re.search(r"log-prob (\S+)", tip.inner_text())[1]) == pytest.approx(tokens[-1][1], rel=1e-5)


def test_a_leaf_shows_why_it_has_its_role(long, visit):
    found = inspect(RunLogIndex(long[0]).load("x-long"))
    strand = next(strand for strand in found.strands if strand.cause == "compaction")
    page = visit(long[1])
    find(page, strand.leaf.id)
    decision = found.roles[strand.leaf.id]
    reasons = page.locator("#panel .why li")
    assert reasons.all_inner_texts() == list(decision.evidence)
    expect(page.locator("#panel")).to_contain_text(f"confidence {decision.confidence:.2f}")


def test_each_token_names_its_own_reason(tmp_path, visit):
    log = tmp_path / "r.jsonl"
    with RunLogWriter(log) as writer:
        writer.append(Call("a", "x", [1], [2, 3, 4], logprobs=[-1.0, None, -1.0]))
        writer.append(Call("e", "x", [1], [2, 3], logprobs=[-1.0, -2.0], finish="error"))
        writer.append(Call("r", "x", [1], [2], parent="nowhere", logprobs=[-1.0]))
        writer.append(Execution("x", "closed"))
        writer.append(Call("l", "x", [1], [2], logprobs=[-1.0]))
    page = visit(page_of(log, tmp_path))
    page.get_by_role("button", name="calls", exact=True).click()
    fates = {}
    for name in "aerl":
        page.locator(".row.call", has=page.locator(f".id:text-is('{name}')")).click()
        expect(page.locator("#panel h2")).to_have_text(name)
        fates[name] = [token[2] for token in shown_tokens(page) if token[2] != "given"]
    find(page, "late")
    expect(page.locator("#hits")).to_have_text("1 of 1")
    expect(page.locator("#panel h2")).to_have_text("l")
    assert fates == {
        "a": ["trained", "no-logprob", "trained"], "e": ["error"] * 2, "r": ["rejected"], "l": ["late"],
    }  # fmt: skip


def test_nothing_in_a_log_can_act(tmp_path, visit):
    log = tmp_path / "hostile.jsonl"
    evidence = {
        "text": HOSTILE,
        "last_user": HOSTILE,
        "first_user": HOSTILE,
        "system": HOSTILE,
        "tools": HOSTILE,
    }
    with RunLogWriter(log, meta={"note": HOSTILE}) as writer:
        writer.append(Execution(HOSTILE, "opened", group=HOSTILE, task=HOSTILE, harness=HOSTILE))
        for name, parent in ((HOSTILE, None), ("b", HOSTILE), ("c", "b")):
            writer.append(
                Call(name, HOSTILE, [1], [2], parent=parent, logprobs=[-1.0], engine=HOSTILE, digest=HOSTILE,
                     evidence=evidence, hints={"agent": HOSTILE}, sampling={HOSTILE: HOSTILE})
            )  # fmt: skip
    page = visit(page_of(log, tmp_path))
    page.get_by_role("button", name="calls", exact=True).click()
    page.click("#row-1")
    harmless = HOSTILE.replace("\u202e", "\\u{202e}").replace("\0", "\\u{0}").replace("\x1b", "\\u{1b}")
    title, answer = page.text_content("#panel h2"), page.locator("#panel .said").last.text_content()
    assert title.replace("\\u{200d}", "\u200d") == answer.replace("\\u{200d}", "\u200d") == harmless
    expect(page.locator("#panel")).to_contain_text("engine")
    find(page, "onerror=alert")
    expect(page.locator("#hits")).to_contain_text("of 3")
    assert page.locator("img, script:not([type]):not(:last-of-type)").count() == 0


def test_the_page_may_run_no_script_but_its_own(tmp_path, visit):
    page = visit(page_of(two_executions(tmp_path / "r.jsonl"), tmp_path))
    policy = page.get_attribute("meta[http-equiv]", "content")
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    blocked = page.evaluate(
        """() => new Promise((done) => {
            document.addEventListener('securitypolicyviolation', (event) => done(event.effectiveDirective));
            const script = document.createElement('script');
            script.textContent = 'window.intruded = true';
            document.body.append(script);
        })"""
    )
    assert blocked == "script-src-elem" and page.evaluate("window.intruded") is None
    assert len(visit.trouble) == 1 and "Content Security Policy" in visit.trouble.pop()


def test_a_log_of_many_executions_is_a_list_to_choose_from(tmp_path, visit):
    page = visit(page_of(two_executions(tmp_path / "r.jsonl"), tmp_path))
    expect(page.locator("#title")).to_have_text("All executions")
    find(page, "one-b")
    expect(page.locator("#hits")).to_have_text("1 of 1")
    page.locator(".row.hit").click()
    expect(page.locator("#title")).to_have_text("one-b")
    expect(page.locator("#figures")).to_contain_text("unresolved")
    page.click("#all")
    page.focus("#tree")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("one-a")


def test_executions_beyond_the_size_of_a_page_are_listed(tmp_path, visit, monkeypatch):
    monkeypatch.setattr(treepage, "MOST_TOKENS", 10)
    index = RunLogIndex(two_executions(tmp_path / "r.jsonl"))
    with tree_page(tmp_path / "page.html", "r.jsonl", None, False) as written:
        for recorded in index:
            written.add(inspect(recorded))
    page = visit(tmp_path / "page.html")
    expect(page.locator("#row-1")).to_contain_text("figures only")
    page.click("#row-1")
    expect(page.locator("#panel")).to_contain_text("--execution 'one-b' --html")


@pytest.mark.parametrize("with_header", [True, False])
def test_logs_without_calls_have_a_page(tmp_path, visit, with_header):
    log = tmp_path / "r.jsonl"
    with RunLogWriter(log) as writer:
        if with_header:
            writer.append(Execution("x", "closed", termination="failed"))
    page = visit(page_of(log, tmp_path))
    expected = "x" if with_header else "The log holds no executions"
    expect(page.locator("#title")).to_have_text(expected)


def test_a_tokenizer_turns_ids_into_text(tmp_path, visit):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    prompt, answer = "read hooks=green", "write hooks=green"
    log = tmp_path / "r.jsonl"
    with RunLogWriter(log) as writer:
        output = tokenizer.encode(answer, add_special_tokens=False).ids
        given = tokenizer.encode(prompt, add_special_tokens=False).ids
        writer.append(Call("a", "x", given, [*output, 2_000_000_000], logprobs=[-1.0] * (len(output) + 1)))
    page = visit(page_of(log, tmp_path, "--tokenizer", model_path()))
    find(page, answer)
    expect(page.locator("#panel h2")).to_have_text("a")
    pieces = page.locator(".tokens .t").all_text_contents()
    assert "".join(pieces[: len(given)]) == prompt
    assert "".join(pieces[len(given) : -1]) == answer and pieces[-1] == "[2000000000]"


def test_a_page_that_fails_leaves_nothing(tmp_path):
    index = RunLogIndex(two_executions(tmp_path / "r.jsonl"))
    with (
        pytest.raises(KeyboardInterrupt),
        tree_page(tmp_path / "page.html", "r.jsonl", None, False) as written,
    ):
        written.add(inspect(index.load("one-a")))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
