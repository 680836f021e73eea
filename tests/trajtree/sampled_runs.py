"""Recorded runs whose samples and accounts are known: one worked out by hand, and random ones."""

from gyre_trajtree import Assessment, Call, Execution, RunLogWriter, executions
from hypothesis import strategies as st

MAIN = {"system": "S-main", "tools": "T-main", "first_user": "Do it.", "last_user": "Do it."}
TITLE = {"system": "S-title", "tools": None, "first_user": "Do it.", "last_user": "Do it.", "text": "A title"}


def call(name, execution, new, out, logprobs=None, version=3, **fields):
    logprobs = [-0.5] * len(out) if logprobs is None else logprobs
    spans = [[version, 0, len(out)]] if out else []
    evidence = fields.pop("evidence", MAIN)
    return Call(name, execution, new, out, logprobs=logprobs, versions=spans, evidence=evidence, **fields)


def opened(name, group):
    return Execution(name, "opened", group=group, task="task-" + group, harness="by-hand")


def hand_written_run():
    """Two groups: an unresolved execution, a placeholder, a late call, an auxiliary leaf, a missing log-prob."""
    return [
        *(opened(name, "g1") for name in ("x1", "x2", "x3")),
        *(opened(name, "g2") for name in ("y1", "y2")),
        call("x1-a", "x1", [1, 2, 3], [11, 12, 13], [-0.1, -0.2, -0.3]),
        call("x1-title", "x1", [7, 8], [71, 72, 73, 74, 75], evidence=TITLE),
        call("x1-b", "x1", [4, 5], [14, 15], [-0.4, -0.5], version=4, parent="x1-a"),
        Execution("x1", "closed"),
        call("x1-late", "x1", [6], [16, 17, 18, 19], parent="x1-b"),
        Assessment("x1", "valid", 1.0),
        call("x2-a", "x2", [1, 2, 3], [21, 22, 23, 24, 25, 26]),
        Execution("x2", "closed"),
        Assessment("x2", "unresolved", detail="the evaluator broke"),
        Execution("x3", "closed", termination="failed"),
        Assessment("x3", "placeholder"),
        call("y1-a", "y1", [1, 2], [31, 32, 33], [-0.1, None, -0.3]),
        Assessment("y1", "valid", 0.5),
        call("y2-a", "y2", [1, 2], [41, 42]),
        Assessment("y2", "valid", 0.0),
    ]


def write_log(path, records):
    with RunLogWriter(path) as log:
        for record in records:
            log.append(record)
    return path


def recorded(records):
    """What an index of the log of these records gives."""
    return list(executions(records).values())


@st.composite
def random_runs(draw, assessed=True):
    """Records of a run of several executions. Each output token occurs once, so it names its place."""
    records, fresh = [], iter(range(1_000, 1_000_000))
    for number in range(draw(st.integers(1, 5))):
        name = f"e{number}"
        records.append(opened(name, draw(st.sampled_from(["g1", "g2"]))))
        for index in range(draw(st.integers(0, 6))):
            logprobs = draw(st.lists(st.sampled_from([-0.5, -1.25, None]), max_size=4))
            parent = draw(st.none() | st.integers(0, index - 1)) if index else None
            if draw(st.integers(0, 9)) == 0:
                records.append(Execution(name, "closed"))
            records.append(
                call(
                    f"{name}-{index}",
                    name,
                    [1, 2],
                    [next(fresh) for _ in logprobs],
                    logprobs,
                    version=draw(st.integers(0, 3)),
                    parent=None if parent is None else f"{name}-{parent}",
                    finish=draw(st.sampled_from(["stop", "stop", "abort", "error"])),
                    evidence=draw(st.sampled_from([MAIN, MAIN, TITLE])),
                )
            )
        if assessed and draw(st.booleans()):
            records.append(
                draw(
                    st.sampled_from(
                        [
                            Assessment(name, "valid", 1.0),
                            Assessment(name, "valid", 0.25),
                            Assessment(name, "unresolved"),
                            Assessment(name, "placeholder"),
                        ]
                    )
                )
            )
    return records
