"""Harnesses as `gyre train` runs them: as executions, in a prefix, with nothing left of them."""

import asyncio

import harness_scenarios
from gyre_scheduler.executions import ExecutionFolder, run_harness
from gyre_scheduler.harnesses import Model
from harness_all import each_harness, need
from harness_policy import FINAL
from harness_scenarios import PROMPT
from harness_stage import CONTEXT, RUN_DEADLINE_S, SEALED, TAG
from harness_trial import Trial


@each_harness
def test_an_execution_leaves_its_work_and_no_process(harness, harness_stage, tmp_path):
    need(harness)
    script = harness_scenarios.leaves_a_server(harness)
    trial = Trial(harness_stage, harness, script, tmp_path)
    folder = ExecutionFolder(tmp_path)
    ready = harness.preset.harness(
        Model("scripted", CONTEXT),
        harness.program(),
        env={**SEALED, TAG: str(tmp_path), "TMPDIR": str(tmp_path / "tmp")},
        prefix=("nice", "-n", "1"),
    )
    ready.check()
    task = {"id": "t", "prompt": PROMPT}
    end = asyncio.run(
        run_harness(ready, folder, task, trial.access.base_url, trial.access.key, RUN_DEADLINE_S)
    )
    said = folder.stdout.read_text(errors="replace")
    assert end.termination == "completed", f"{end.error}\n{said[-3000:]}"
    assert FINAL in harness.final(said, tmp_path)
    assert (folder.workspace / "server").read_text().strip().isdigit()
    assert not trial.process.stragglers()
