"""Executions of any shape, for properties that must hold whatever a log says."""

from gyre_trajtree import Call, RecordedExecution
from hypothesis import strategies as st


@st.composite
def executions_of_any_shape(draw):
    """Calls at any earlier parent or none, with failures, retries, delegations, summaries and side requests."""
    calls = []
    for i in range(draw(st.integers(1, 12))):
        earlier = st.sampled_from([None, *(call.id for call in calls)])
        size = draw(st.integers(0, 3))
        calls.append(
            Call(
                f"c{i}",
                "x",
                [100 + i] * draw(st.integers(1, 2)),
                [draw(st.integers(0, 1)) for _ in range(size)],
                parent=draw(earlier),
                logprobs=[draw(st.sampled_from([-1.0, None])) for _ in range(size)],
                finish=draw(st.sampled_from(["stop", "abort", "error"])),
                attempt_of=draw(earlier),
                evidence={
                    "tools": draw(st.sampled_from([None, "t"])),
                    "first_user": draw(st.sampled_from(["", "do the first part of the work"])),
                    "last_user": draw(st.sampled_from(["", "do the first part of the work", "summarise it"])),
                    "spawns": draw(st.sampled_from([[], ["do the first part of the work"]])),
                },
            )
        )
    return RecordedExecution("x", calls=calls)
