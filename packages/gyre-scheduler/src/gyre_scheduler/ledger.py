"""The ledger of executions and groups: counters d, p, f and each group's life.

Invariants: 0 <= f <= p <= d; f rises exactly once for each launched execution; a group is consumed exactly
once; outstanding groups (dispatched, neither consumed nor dropped) never exceed Q_b.

    execution   queued -> launching -> running -> terminated -> (closed, forgotten with its group)
                surplus: the same, outside its group, which is ready without it; one still queued counts as
                launched and ended at once
    group       open -> ready -> admitted -> consumed
                  └-> dropped (fewer than two valid members, or the run is over)
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from .dispatch import group_of
from .errors import ProtocolError

_OPEN = ("queued", "launching", "running", "terminated")

TRAINABLE_MEMBERS = 2
"""A group-relative advantage needs two rewards."""


@dataclass
class Group:
    """One outstanding group. `version` is v_d."""

    version: int
    members: dict[str, str]
    """execution -> queued | launching | running | terminated | valid | invalid"""
    open: int
    """Members that are not assessed yet."""
    state: str = "open"


@dataclass
class Ledger:
    """Counters and outstanding groups. Plain data, changed only by its methods."""

    wanted: int
    """Valid members with which a group is complete [N]."""
    dispatched: int = 0
    launched: int = 0
    terminated: int = 0
    next_group: int = 0
    replaced: int = 0
    """Groups dropped as untrainable and replaced."""
    untrainable_run: int = 0
    """Untrainable groups since the last group became ready."""
    age_replaced: int = 0
    """Versions between the dropped groups' v_d and their replacements'; the identity's correction."""
    groups: dict[int, Group] = field(default_factory=dict)
    queue: deque[str] = field(default_factory=deque)
    surplus: dict[str, str] = field(default_factory=dict)
    """State of launched executions that their ready groups left behind (oversampling)."""
    ready: list[int] = field(default_factory=list)
    expected: dict[int, float] = field(default_factory=dict)
    """Durations that the environment expects of groups, outstanding or to come."""
    staleness: list[int] = field(default_factory=list)
    """v_t - v_d of every consumed group, in order of consumption; B entries a step."""

    def dispatch(self, version: int, names: list[str]) -> int:
        """Admit the next group; `names` are its executions. Returns its number."""
        group = self.next_group
        self.next_group += 1
        self.groups[group] = Group(version, dict.fromkeys(names, "queued"), len(names))
        self.queue.extend(names)
        self.dispatched += len(names)
        return group

    def expect(self, group: int, duration: float) -> None:
        """Note what a group's executions are expected to take; too late for one that is gone."""
        if group >= self.next_group or group in self.groups:
            self.expected[group] = duration

    def queue_longest_first(self) -> None:
        """Order the queue: older versions first, so that none waits for ever, then by falling expected duration.

        Groups of which nothing is expected count as average.
        """
        waiting = {group_of(execution) for execution in self.queue}
        known = [self.expected[group] for group in waiting if group in self.expected]
        average = sum(known) / len(known) if known else 0.0
        rank = {
            group: (self.groups[group].version, -self.expected.get(group, average), group)
            for group in waiting
        }
        self.queue = deque(sorted(self.queue, key=lambda execution: rank[group_of(execution)]))

    def launching(self) -> str:
        """Take the first execution of the queue."""
        execution = self.queue.popleft()
        self._member(execution, "queued", "launching")
        return execution

    def launch(self, execution: str) -> None:
        """p rises."""
        self._member(execution, "launching", "running")
        self.launched += 1

    def terminate(self, execution: str) -> None:
        """f rises."""
        self._member(execution, "running", "terminated")
        self.terminated += 1

    def assess(self, execution: str, valid: bool) -> int | None:
        """Close an execution. Returns its group if that has all members it can have or wants."""
        if execution in self.surplus:
            self._member(execution, "terminated", "invalid")
            del self.surplus[execution]
            return None
        group = self._member(execution, "terminated", "valid" if valid else "invalid")
        self.groups[group].open -= 1
        return None if self.groups[group].open and self.valid_members(group) < self.wanted else group

    def valid_members(self, group: int) -> int:
        return len(self.trainable(group))

    def trainable(self, group: int) -> tuple[str, ...]:
        """The group's executions with a valid reward, in the order of their numbers."""
        return tuple(name for name, state in self.groups[group].members.items() if state == "valid")

    def make_ready(self, group: int) -> list[str]:
        """Leave the members behind that are still open. Returns those of them that were launched and have not ended."""
        life = self.groups[group]
        life.state = "ready"
        self.ready.append(group)
        self.untrainable_run = 0
        open_members = {name: state for name, state in life.members.items() if state in _OPEN}
        for execution, state in open_members.items():
            del life.members[execution]
            life.open -= 1
            if state == "queued":
                self.queue.remove(execution)
                self.launched += 1
                self.terminated += 1
            else:
                self.surplus[execution] = state
        return [name for name, state in open_members.items() if state in ("launching", "running")]

    def admit(self) -> int:
        """Take the ready group of the oldest version, the first to become ready among equals."""
        group = min(self.ready, key=lambda number: self.groups[number].version)
        self.ready.remove(group)
        self.groups[group].state = "admitted"
        return group

    def consume(self, group: int, version: int) -> None:
        """`version` is v_t, the version just before the step."""
        life = self.groups.pop(group)
        self.expected.pop(group, None)
        if life.state != "admitted":
            raise ProtocolError(f"group {group} is consumed in state {life.state}")
        self.staleness.append(version - life.version)

    def drop_untrainable(self, group: int, version: int) -> int:
        """Drop a group whose replacement enters at `version`. Returns how many were dropped in a row."""
        self.age_replaced += version - self.groups.pop(group).version
        self.expected.pop(group, None)
        self.replaced += 1
        self.untrainable_run += 1
        return self.untrainable_run

    def _member(self, execution: str, expected: str, state: str) -> int:
        group = group_of(execution)
        members = self.groups[group].members if group in self.groups else {}
        if execution in self.surplus:
            members = self.surplus
        found = members.get(execution)
        if found != expected:
            raise ProtocolError(f"execution {execution} cannot become {state}: it is {found or 'unknown'}")
        members[execution] = state
        return group

    def to_state(self) -> dict[str, Any]:
        """JSON-able snapshot."""
        state = asdict(self)
        state["queue"] = list(self.queue)
        state["groups"] = {str(number): asdict(group) for number, group in self.groups.items()}
        state["expected"] = {str(group): duration for group, duration in self.expected.items()}
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Ledger:
        groups = {
            int(number): Group(**{**group, "members": dict(group["members"])})
            for number, group in state["groups"].items()
        }
        lists = {name: list(state[name]) for name in ("ready", "staleness")}
        expected = {int(group): duration for group, duration in state["expected"].items()}
        copies = {"queue": deque(state["queue"]), "surplus": dict(state["surplus"])}
        return cls(**{**state, **lists, **copies, "groups": groups, "expected": expected})
