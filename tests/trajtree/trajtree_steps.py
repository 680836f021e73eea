"""Random executions with failed, aborted and repeated calls, whose sampled tokens each occur once."""

from gyre_trajtree import RoleDecision
from hypothesis import strategies as st

step = st.fixed_dictionaries(
    {
        "target": st.integers(-1, 20),
        "logprobs": st.lists(st.sampled_from([-0.5, -1.0, None]), max_size=4),
        "finish": st.sampled_from(["stop", "stop", "length", "abort", "error"]),
        "new": st.sampled_from([[1], [2], [1, 2]]),
        "retries": st.booleans(),
    }
)
steps = st.lists(step, min_size=1, max_size=14)


def record(recorder, steps):
    """The tree of calls that extend an earlier one (or none, -1), or repeat its request."""
    for i, s in enumerate(steps):
        earlier = f"c{s['target'] % i}" if s["target"] >= 0 and i else None
        parent = recorder.calls[int(earlier[1:])].parent if earlier and s["retries"] else earlier
        recorder.call(
            f"c{i}",
            parent,
            s["new"],
            recorder.fresh(len(s["logprobs"])),
            s["logprobs"],
            finish=s["finish"],
            attempt_of=earlier if s["retries"] else None,
        )
    return recorder.tree()


def as_roles(**given):
    """Decisions for leaves, "_" in a name standing for "-"."""
    return {leaf.replace("_", "-"): RoleDecision(role, 1.0, ()) for leaf, role in given.items()}
