"""The command `gyre`. Each command composes packages; heavy imports happen inside the command that needs them.

Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted. With `--json` the last line of standard output is one JSON object.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from gyre_cli.errors import CommandError, MisuseError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(help="Models that come with Gyre.", no_args_is_help=True)
proxy_app = typer.Typer(help="The black-box token-in/token-out proxy.", no_args_is_help=True)
engine_app = typer.Typer(help="The embedded rollout engine (SGLang's HTTP API).", no_args_is_help=True)
tree_app = typer.Typer(help="Trajectory trees of a run log.", no_args_is_help=True)
schedule_app = typer.Typer(help="The scheduler on a virtual clock.", no_args_is_help=True)
for name, sub in (
    ("model", model_app),
    ("proxy", proxy_app),
    ("engine", engine_app),
    ("tree", tree_app),
    ("schedule", schedule_app),
):
    app.add_typer(sub, name=name)

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on the last line of standard output.")
]
SetSimulated = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Override a setting of the preset, costs.NAME or workload.NAME."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override one setting of --dry-run; repeatable."),
]
RunLog = Annotated[Path, typer.Argument(metavar="RUN.jsonl", help="A run log; .gz and .zst are read too.")]
JMax = Annotated[
    int, typer.Option("--j-max", min=0, help="Most trajectories drawn of an execution; 0 takes all.")
]
SampleSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")]
Normalise = Annotated[
    str, typer.Option("--normalise", metavar="NAME", help="Advantages within a group: mean or mean_std.")
]
Auxiliary = Annotated[
    bool, typer.Option("--auxiliary", help="Let titles, probes and other side requests train too.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file that is written.")]


def emit(result: dict[str, Any]) -> None:
    """Print a machine-readable result as one line."""
    print(
        orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode(), flush=True
    )


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"gyre {version('gyre-cli')}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Elastic reinforcement learning for agents that work for hours through unmodified harnesses.

    Start with `gyre train`; look at the result with `gyre report` and `gyre tree inspect`.
    """


@app.command()
def train(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of the run.")] = None,
    set_: Set = None,
    scheduler: Annotated[str | None, typer.Option(help="elastic, async or colocate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of tasks and sampling.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="New or empty folder of the run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration and stop: a start for --config.")
    ] = False,
    json: Json = False,
) -> None:
    """Train an agent end to end. Without options: a tiny model learns in one to two minutes on two CPU cores."""
    from gyre_cli.config import load_config, to_toml

    assignments = [*(set_ or []), *([f"schedule.policy={scheduler}"] if scheduler else [])]
    resolved = load_config(config, assignments, seed=seed, run_dir=run_dir)
    if dry_run:
        emit(resolved.dump()) if json else print(to_toml(resolved.dump()), end="")
        return
    from gyre_cli.summary import show_summary
    from gyre_cli.train import run_training

    summary = run_training(resolved)
    emit(summary) if json else show_summary(summary)


@model_app.command("tiny")
def model_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    seed: Annotated[int, typer.Option(help="Seed of initial weights and of the synthetic transcripts.")] = 0,
    json: Json = False,
) -> None:
    """Make the quickstart's tiny Qwen3 model: tokenizer, chat template, warm-started weights."""
    from rich.progress import Progress as Bar

    from gyre_cli.quickstart.tiny import build

    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise MisuseError(f"{out} already holds something; name a new folder")
    except (OSError, ValueError) as error:
        raise MisuseError(f"{out} cannot be made a folder: {error}") from None
    from rich.console import Console

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("warm start", total=None)
        build(out, seed=seed, progress=lambda done, total: bar.update(task, completed=done, total=total))
    emit({"model": str(out), "seed": seed}) if json else print(out)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Where to write; report.html in the folder if absent.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a page with the reward curve and the role timeline of the cells."""
    from gyre_cli.report import write_report

    path = write_report(run_dir, html)
    emit({"report": str(path)}) if json else print(path)


@proxy_app.command(
    "serve",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Serve Messages, Chat Completions and Responses in front of engines, recording exact tokens.",
)
def proxy_serve(context: typer.Context) -> None:
    """Serve harnesses; all arguments are those of `python -m gyre_proxy`."""
    from gyre_proxy.__main__ import run_command
    from gyre_proxy.errors import ProxyError

    try:
        run_command(context.args, "gyre proxy serve")
    except ProxyError as error:
        raise MisuseError(str(error)) from None


@engine_app.command("serve")
def engine_serve(
    model: Annotated[Path, typer.Option(help="Hugging Face directory of a dense Qwen3 model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free port.")] = 0,
    max_running: Annotated[int, typer.Option(help="Sequences in one step.")] = 32,
    context_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
) -> None:
    """Serve a model with the embedded engine, through SGLang's HTTP API."""
    from gyre_trainer.engine_server import serve
    from gyre_trainer.errors import TrainerError

    try:
        serve(
            model=str(model),
            host=host,
            port=port,
            max_running=max_running,
            context_length=context_length,
            threads=threads,
            device=device,
        )
    except TrainerError as error:
        raise MisuseError(str(error)) from None


@tree_app.command("inspect")
def tree_inspect(
    log: RunLog,
    execution: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Only this execution, drawn as a tree; the beginning of its id will do."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Draw every strand of the tree instead of counting the small ones.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Also write a page: tree, search, text, tokens, masks, log-probs of each call.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder with the tokenizer.json that turns the page's token ids into text."
        ),
    ] = None,
    force: Force = False,
    j_max: JMax = 5,
    seed: SampleSeed = 0,
    json: Json = False,
) -> None:
    """Show what a run log holds: trees, roles, why branches begin, and what training would take of them.

    A strand is one conversation from its first call to a leaf. Its line tells: calls; tokens that no other strand
    stores; the share of them that other paths read too; tokens the model sampled; the shares of these that train and
    that are masked; role of the leaf and how sure it is; ◆n for the n-th trajectory drawn; why the strand begins.
    """
    from gyre_cli.trees import Look, inspect_log

    result = inspect_log(Look(log, execution, j_max, seed, full, html, force, tokenizer), json)
    if json:
        emit(result)


@tree_app.command("sample")
def tree_sample(
    log: RunLog,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="JSON Lines, a trajectory each; without it, only counts."
        ),
    ] = None,
    j_max: JMax = 5,
    seed: SampleSeed = 0,
    normalise: Normalise = "mean",
    auxiliary: Auxiliary = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Draw the trajectories that training takes of a run log, and account for every token the model sampled.

    By role priority, at most --j-max of each execution; an output that two trajectories share trains in one of them.
    Executions without a valid reward are left out if the log assesses any.
    """
    from gyre_cli.trees import Sampling, sample_log

    result = sample_log(Sampling(log, "jsonl", output, j_max, seed, normalise, auxiliary, force), json)
    if json:
        emit(result)


@tree_app.command("export")
def tree_export(
    log: RunLog,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")],
    format: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="parquet or jsonl; trl, verl or slime: what that project loads."
        ),
    ],
    j_max: JMax = 5,
    seed: SampleSeed = 0,
    normalise: Normalise = "mean",
    auxiliary: Auxiliary = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the same trajectories in a format that other projects load; docs/exports.md has the schemas."""
    from gyre_cli.trees import Sampling, sample_log

    result = sample_log(Sampling(log, format, output, j_max, seed, normalise, auxiliary, force), json)
    if json:
        emit(result)


WorkloadFile = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        metavar="FILE",
        help="Durations instead of the preset's: a run log, or a .json file with a list of hours for each query.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Workloads to simulate; hours are their mean.")]


@schedule_app.command("simulate")
def schedule_simulate(
    preset: Annotated[str, typer.Option(help="A named run; an unknown name lists them.")] = "quickstart",
    set_: SetSimulated = None,
    workload: WorkloadFile = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write roles and waterlevel as a page.")
    ] = None,
    json: Json = False,
) -> None:
    """Run the scheduler of `gyre train` on a virtual clock."""
    from gyre_cli.schedule import check_page, run_simulation
    from gyre_cli.scheduleview import figures, show_simulation, write_simulation

    check_page(html, workload)
    chosen, result = run_simulation(preset, set_ or [], seed, workload)
    if html:
        write_simulation(html, preset, chosen, result)
    named = {"preset": preset, "paper_hours": chosen.paper_hours}
    emit(named | figures(result)) if json else show_simulation(preset, chosen, result)


@schedule_app.command("compare")
def schedule_compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="table1, nl2repo, deepswe or 2.4t (the paper's comparisons), or presets."
        ),
    ],
    set_: SetSimulated = None,
    workload: WorkloadFile = None,
    seeds: Seeds = 4,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write figures and roles as a page.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate runs side by side: the rows of the paper's Table 1, its other comparisons, or presets of your choice."""
    from gyre_cli.schedule import check_page, run_comparison
    from gyre_cli.scheduleview import comparison_figures, show_comparison, write_comparison

    check_page(html, workload)
    rows = run_comparison(names, set_ or [], seeds, workload)
    if html:
        write_comparison(html, ", ".join(names), rows)
    calibrated = names in (["table1"], ["nl2repo"]) and not set_ and workload is None
    emit(comparison_figures(rows, fitted=calibrated)) if json else show_comparison(rows)


@schedule_app.command("plan")
def schedule_plan(
    preset: Annotated[
        str, typer.Option(help="A named run whose cells, batch, workload and costs to plan for.")
    ] = "nl2repo-e0",
    set_: SetSimulated = None,
    workload: WorkloadFile = None,
    staleness: Annotated[
        float | None,
        typer.Option(min=0, max=20, help="Mean staleness to keep; the preset's where not given."),
    ] = None,
    seeds: Seeds = 3,
    json: Json = False,
) -> None:
    """Search policy, phi, mu, split and launch order of the fastest run; say what limits it and what nothing can beat."""
    from gyre_cli.schedule import chosen_preset, refuse_searched, run_plan
    from gyre_cli.scheduleview import plan_figures, show_plan

    refuse_searched(set_ or [])
    target = float(chosen_preset(preset, []).settings.staleness_target) if staleness is None else staleness
    chosen = chosen_preset(
        preset, ["phi=0", *(set_ or [])], workload
    )  # the batch need not suit the preset's phi
    found = run_plan(chosen, target, seeds)
    emit(plan_figures(found)) if json else show_plan(found)


class Terminated(CommandError):
    """SIGTERM outside a command that handles it itself."""

    exit_code = 130


def _terminate(number: int, frame: object) -> None:
    raise Terminated("SIGTERM received")


def main() -> None:
    """Entry point: a failure is one line on standard error and an exit code as above."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without a sign shows a question mark
    try:
        app()
        sys.stdout.flush()
    except CommandError as error:
        print(f"gyre: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be written at exit
        print(f"gyre: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
