"""Owns the admission of one execution: whether it may train, what of it does, and the account of all its tokens.

Invariant: training, exports and inspection admit by this one rule, so that equal seeds give equal draws; what is not
trained has a reason, late and rejected calls included.
"""

from dataclasses import dataclass, field

from gyre_trajtree.conservation import OVER_J_MAX, Ledger, account
from gyre_trajtree.executions import RecordedExecution
from gyre_trajtree.roles import RoleDecision, infer_roles
from gyre_trajtree.sampling import Draw, draw, execution_rng
from gyre_trajtree.tree import RejectedCall, Tree


@dataclass(slots=True, eq=False)
class Admitted:
    """One execution's tree, and what of it trains."""

    recorded: RecordedExecution
    tree: Tree
    """Of the calls that can join one; empty when there are none."""
    refusal: str | None
    """Why the execution trains nothing, a key of REASONS; None when it may train."""
    rejected: list[RejectedCall] = field(default_factory=list)
    roles: dict[str, RoleDecision] = field(default_factory=dict)
    """By call id of the leaf."""
    draws: list[Draw] = field(default_factory=list)
    """In the order in which they were drawn."""
    ledger: Ledger = field(default_factory=Ledger)
    """Where every sampled token of the execution went."""


def admit(
    recorded: RecordedExecution,
    j_max: int | None = 5,
    seed: int = 0,
    refusal: str | None = None,
    train_auxiliary: bool = False,
    task_prompt: str | None = None,
) -> Admitted:
    """Draw from one execution (paper section 5.3), unless `refusal` says why it trains nothing.

    `j_max` (None: all trajectories), `seed` and `train_auxiliary` as for `draw` and `execution_rng`; `task_prompt` as
    for `infer_roles`, None takes the one that the log records. Raises TrajtreeError for a negative `j_max`,
    AccountError when a token would be lost or trained twice.
    """
    found = Admitted(recorded, Tree(recorded.id), refusal)
    found.ledger.exclude(recorded.late, "late")
    if recorded.calls:
        found.tree = Tree.from_calls(recorded.calls, found.rejected, recorded.id)
        found.ledger.exclude((each.call for each in found.rejected), "rejected")
    if not found.tree.nodes:
        return found
    found.roles = infer_roles(found.tree, recorded.prompt if task_prompt is None else task_prompt)
    if refusal is None:
        generator = execution_rng(seed, recorded.id)
        found.draws = draw(found.tree, found.roles, j_max, generator, train_auxiliary)
    # where auxiliary leaves may train, being one is no reason to be left out
    left_out_by_role = None if train_auxiliary else found.roles
    found.ledger.add(account(found.tree, found.draws, left_out_by_role, unselected=refusal or OVER_J_MAX))
    found.ledger.roles.update(drawn.role for drawn in found.draws)
    return found


def refusal_of(recorded: RecordedExecution, require_reward: bool) -> str | None:
    """Why an execution trains nothing, a key of REASONS; None when it may train.

    A failure placeholder counts in its group's baseline and has no target (paper section 5.2). `require_reward` refuses
    executions without a valid reward: "unresolved" when they were assessed, "unassessed" when they were not.
    """
    designated = recorded.designated
    if designated and designated.status == "placeholder":
        return "placeholder"
    if require_reward and recorded.reward is None:
        return "unresolved" if designated else "unassessed"
    return None
