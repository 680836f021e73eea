"""Owns what the model does in these tests, once for all harnesses, and the tree that must come of it.

A tree is written as {mark: mark of the call that it extends, or None where a conversation begins}.
"""

from collections.abc import Mapping, Sequence

from harness_adapter import Harness
from harness_policy import FINAL, Script, Step, Use
from harness_stage import MARKS, PICTURE

PROMPT = "- You are actor-main. Do what is needed, then report."

_WAIT = "timeout 20 sh -c 'until [ -e {} ]; do sleep 0.02; done'"


def work(harness: Harness) -> Script:
    """A tool loop, parallel tools, a tool that is none, an image, sub-agents of every kind: whatever the harness has."""
    main: list[Step] = [
        Step(
            "I look around.\n\n  Indented, ünïcödé 😀, \u2028 and \u200b.",
            [harness.shell("ls -la")],
            "First the files.\n",
            [PICTURE],
        ),
        Step("Two at once.", _pair(harness), "They do not depend on each other.", ["first", "second"]),
        # Some harnesses show nothing of an output with such bytes.
        Step("", [harness.shell("printf 'main.3 a\\0b\\377 \\033[31mred\\033[0m\\r\\n'; exit 3")]),
        *harness.peculiar(),
    ]
    if not harness.forgets:
        main.append(Step("Nobody has this.", [Use("NoSuchTool", {"b": [1.0, None, "é"], "a": {}})]))
    steps = {"main": main}

    def delegates(text: str, how: str, *names: str) -> None:
        main.append(Step(text, [harness.delegate(_brief(name), how) for name in names]))

    def collects(how: str, *names: str) -> None:
        """Each goes on only when the main agent has turned to waiting for it, so that reports come one by one."""
        waits = harness.collect(how, names)
        marks = [f"main.{len(main) + n}" for n in range(1, len(waits) + 1)] or [None] * len(names)
        steps.update({name: _errand(harness, name, mark) for name, mark in zip(names, marks, strict=True)})
        main.extend(waits)

    if "image" in harness.abilities:
        main.append(Step("A picture.", [harness.image(PICTURE)], shows=["[image image/"]))
    if "foreground" in harness.abilities:
        delegates("Others can do this.", "foreground", "first", "second")
        steps |= {name: _errand(harness, name) for name in ("first", "second")}
    if "fork" in harness.abilities:
        delegates("A copy of mine can do this.", "fork", "copy")
        collects("fork", "copy")
    if "background" in harness.abilities:
        delegates("These can take their time.", "background", "third", "fourth")
        collects("background", "third", "fourth")
    main.append(harness.finish(f"All is done. {FINAL}", "Enough."))
    return _script(harness, steps)


def work_tree(harness: Harness, script: Script) -> dict[str, str | None]:
    """The tree that must come of `work`."""
    return chains(script, **{actor: mark_of(script, text) for actor, text in harness.origins.items()})


def mark_of(script: Script, text: str) -> str:
    """The mark of the main agent's step that begins with this text."""
    (number,) = (n for n, step in enumerate(script.steps["main"], 1) if step.text.startswith(text))
    return f"main.{number}"


def compaction(harness: Harness) -> Script:
    """A conversation that grows past the harness's window by its third answer."""
    main = [Step(f"Part {i}.", [harness.shell("seq 1 3000")], "More.") for i in range(1, 4)]
    if harness.compacts_between_prompts:
        main[2] = Step("Part 3. That was the first prompt.")
    main += [Step("Part 4.", [harness.shell("echo 4")], "Less."), harness.finish(f"All is done. {FINAL}")]
    return _script(harness, {"main": main})


def long_errand(harness: Harness) -> Script:
    """A sub-agent whose conversation grows past the harness's window by its fourth answer."""
    how = "foreground" if "foreground" in harness.abilities else "background"
    main = [Step("Another can do this.", [harness.delegate(_brief("first"), how)])]
    if how == "background":
        main += harness.collect(how, ["first"])
    first = [Step(f"Part {i}.", [harness.shell("seq 1 3000")], "More.") for i in range(1, 5)]
    first.append(Step("Report of first: all is well."))
    return _script(harness, {"main": [*main, harness.finish(f"All is done. {FINAL}")], "first": first})


def errands(harness: Harness) -> Script:
    """A short tool loop."""
    main = [
        Step(f"Part {i}, with some words to be cut in.", [harness.shell(f"echo {i}")], "Well.")
        for i in (1, 2, 3)
    ]
    return _script(harness, {"main": [*main, harness.finish(f"All is done. {FINAL}")]})


def leaves_a_server(harness: Harness) -> Script:
    """The main agent starts something that is to go on, in a session of its own."""
    server = "setsid sh -c 'echo $$ > server; exec sleep 600' > /dev/null 2>&1 & "
    main = [
        Step("I start it.", [harness.shell(f"{server} until [ -s server ]; do sleep 0.02; done; echo up")])
    ]
    return _script(harness, {"main": [*main, harness.finish(f"All is done. {FINAL}")]})


def chains(script: Script, **origins: str | None) -> dict[str, str | None]:
    """The tree in which every actor extends its own answers and begins at its origin, by default anew.

    What the harness asks beside that begins anew.
    """
    tree: dict[str, str | None] = dict.fromkeys(script.asides)
    for actor, steps in script.steps.items():
        above = origins.get(actor)
        for number in range(1, len(steps) + 1):
            mark = f"{actor}.{number}"
            tree[mark] = above
            above = mark
    return tree


def roles(script: Script) -> dict[str, str]:
    """The role of every actor's last answer, and of what the harness asks beside that."""
    last = {f"{a}.{len(steps)}": "main" if a == "main" else "sub-agent" for a, steps in script.steps.items()}
    return {**script.asides, **last}


def leaf_roles(
    script: Script, tree: Mapping[str, str | None], summary: str = "main-summary"
) -> dict[str, str]:
    """The role of every leaf of a tree: that of its actor, of what the harness asks beside that, or of the summary."""
    known = {**script.asides, "summary": summary}
    leaves = tree.keys() - set(tree.values())
    return {mark: known.get(mark, "main" if mark.startswith("main.") else "sub-agent") for mark in leaves}


def _script(harness: Harness, steps: dict[str, Sequence[Step]]) -> Script:
    return Script(steps, harness.summary_request, harness.title_request, harness.asides)


def _pair(harness: Harness) -> list[Use]:
    """Two commands; where harnesses run them at the same time the first ends after the second."""
    return [harness.shell("sleep 0.3; echo first"), harness.shell("echo second")]


def _brief(name: str) -> str:
    return f"You are actor-{name}. Look around and report what you find."


def _errand(harness: Harness, name: str, waits_for: str | None = None) -> list[Step]:
    """A sub-agent's work: a tool, then a report."""
    command = (
        f"echo {name}" if waits_for is None else f"{_WAIT.format(f'../{MARKS}/{waits_for}')}; echo {name}"
    )
    return [
        Step("I look.", [harness.shell(command)], "A small thing."),
        Step(f"Report of {name}: all is well."),
    ]
