"""Owns one trial: a harness that works through a script behind a strict proxy, and what must hold of any such run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gyre_trajtree import RunLogIndex
from gyre_trajtree.inspection import Inspection, inspect
from harness_adapter import Access, Harness
from harness_policy import FINAL, Script
from harness_scenarios import PROMPT
from harness_stage import CONTEXT, HarnessProcess, HarnessStage, PolicyEngine, admit, furnish, ids_key

EXECUTION = "trial"


class Trial:
    """Engines (weight versions 1, 2, ...), proxy, and the harness's process, which `run` starts and ends."""

    def __init__(
        self,
        stage: HarnessStage,
        harness: Harness,
        script: Script,
        folder: Path,
        engines: int = 1,
        window: int = CONTEXT,
        prompts: int = 1,
        own_process: bool = False,
        **settings: object,
    ) -> None:
        """`settings`: of a proxy in this process; one of its `own_process` has none but its defaults."""
        self._stage, self._script, self._harness = stage, script, harness
        self.folder, self.record = furnish(folder), folder / "run.jsonl"
        self.engines = [stage.policy_engine(script, folder, version) for version in range(1, engines + 1)]
        self.proxy = (
            stage.proxy_process(self.record) if own_process else stage.strict_proxy(self.record, **settings)
        )
        admit(self.proxy, *self.engines)
        opened = self.proxy.admin("POST", "executions", {"id": EXECUTION})
        self.access = Access(opened["base_url"], opened["key"], window)
        launch = harness.launch(folder, [PROMPT] * prompts, self.access)
        self.process = HarnessProcess(folder, launch.argv, launch.environment)

    def run(
        self, on_news: Callable[[object], None] | None = None, code: int = 0, last: str = FINAL
    ) -> "Result":
        """Let the harness work to its end, handing over news meanwhile. Fails unless it ends as with the real API.

        That is with this exit code and this in its last words.
        """
        self._end(code, on_news)
        assert last in self._harness.final(self.process.output, self.folder), self.process.told()
        with RunLogIndex(self.record) as runs:
            assert list(runs.ids) == [EXECUTION]
            found = inspect(runs.load(EXECUTION))
        return Result(found, self._script, self._stage, self.engines)

    def run_to_failure(self) -> str:
        """Let the harness work until it gives up, with exit code 1; what it printed."""
        self._end(1)
        return self.process.output + self.process.errors

    def _end(self, expected: int, on_news: Callable[[object], None] | None = None) -> None:
        with self.process:
            code = self.process.ended(on_news)
        puzzles = [line for engine in self.engines for line in engine.puzzled]
        assert not puzzles, "\n".join(puzzles)
        assert code == expected, f"exit code {code}\n{self.process.told()}"

    def hold(self, tokens: int, marks: set[str] | None = None) -> None:
        """Engines stop requests, or the first one for each of the marks, after so many tokens, and are news then."""
        for engine in self.engines:
            engine.hold(tokens, self.process.news, marks)

    def kill(self, engine: PolicyEngine) -> None:
        """End an engine with every connection cut. It holds nothing any more, also when it is revived."""
        self._stage.do(engine.stop())
        self._stage.do(engine.release())

    def revive(self, engine: PolicyEngine) -> None:
        self._stage.do(engine.start())

    def replace_proxy(self) -> None:
        """Kill a proxy of its own process, and start another on its port and log."""
        self.proxy.kill()
        self.proxy.start()
        admit(self.proxy, *self.engines)

    def move_all(self, source: PolicyEngine) -> None:
        """Reroute everything from one of two engines to the other."""
        (other,) = (engine for engine in self.engines if engine is not source)
        admit(self.proxy, *self.engines)
        self.proxy.admin("POST", "reroute", {"source": source.url, "moves": {EXECUTION: other.url}})


class Result:
    """What a run left in the log, its calls named by the marks of the script.

    A mark that was asked for again, after an attempt that failed, is primed.
    """

    def __init__(
        self, found: Inspection, script: Script, stage: HarnessStage, engines: list[PolicyEngine]
    ) -> None:
        self.found, self._script, self._stage = found, script, stage
        names: dict[str, str] = {}
        asked = {ids_key(given["input_ids"]) for engine in engines for given in engine.requests}
        for node in found.tree.nodes:
            whole = found.tree.path_tokens(node)
            prompt = whole[: len(whole) - len(node.call.output_ids)]
            assert ids_key(prompt) in asked, "the recorded prompt is none that an engine was asked"
            mark, _ = script.answer(stage.decoded(prompt.tolist()))
            while mark in names.values():
                mark += "'"
            names[node.id] = mark
        self.calls = {names[node.id]: node.call for node in found.tree.nodes}
        self.tree = {names[n.id]: n.call.parent and names[n.call.parent] for n in found.tree.nodes}
        """{mark: mark of the call that it extends, None where a conversation begins}."""
        self.roles = {names[leaf]: decision.role for leaf, decision in found.roles.items()}
        """{mark of a leaf: role}."""
        self.dead = {names[leaf] for leaf in found.dead}
        """Marks of attempts that were given up."""
        self.ends = {names[node.id]: node.call.finish for node in found.tree.nodes}

    def sound(self) -> None:
        """What holds of every run.

        Nothing is rejected, every sampled token has its log-prob and version, tools show what they must.
        """
        assert not self.found.rejected and not self.found.recorded.late
        for mark, call in self.calls.items():
            assert not np.isnan(call.logprobs).any(), mark
            assert (call.token_versions() > 0).all(), mark
        for actor, steps in self._script.steps.items():
            for number, step in enumerate(steps, 1):
                for text in step.shows:
                    new = self._stage.decoded(self.calls[f"{actor}.{number + 1}"].input_ids.tolist())
                    assert text in new, f"{actor}.{number} does not show {text!r} but {new[:2000]!r}"
