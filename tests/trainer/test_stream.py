"""The packing buffer and the ledger, without torch and without waiting."""

import numpy as np
import pytest
from gyre_trainer.errors import LedgerError, TrainerError
from gyre_trainer.rows import TrainingExecution, TrainingRow
from gyre_trainer.statistics import TrainStatistics
from gyre_trainer.stream import MicroStepQueue
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

BUDGET = 20


def execution(name: str, size: int, advantage: float = 1.0) -> TrainingExecution:
    """An execution of `size` tokens; of one token it has no target."""
    targets = np.zeros(size, bool)
    targets[1:] = True
    row = TrainingRow(name, np.ones(size), targets, np.where(targets, -1.0, np.nan), np.where(targets, 0, -1))
    return TrainingExecution(name, advantage, (row,))


def measured(micro_step) -> TrainStatistics:
    return TrainStatistics(targets=micro_step.target_count, micro_steps=1)


def test_micro_steps_keep_to_the_budget_and_an_oversize_execution_sits_alone():
    queue = MicroStepQueue(1, BUDGET)
    queue.admit(execution(f"e{i}", size) for i, size in enumerate([7, 9, 50, 11, 4, 13]))
    taken = []
    while (micro_step := queue.claim(0)) is not None:
        taken.append(micro_step)
    assert sorted(e.id for m in taken for e in m.executions) == [f"e{i}" for i in range(6)]
    assert all(m.token_count <= BUDGET or len(m.executions) == 1 for m in taken)
    assert queue.oversize == ["e2"]


def test_late_executions_fill_a_bin_that_was_not_taken():
    queue = MicroStepQueue(1, BUDGET)
    queue.admit([execution("a", 18), execution("b", 8)])
    assert [e.id for e in queue.claim(0).executions] == ["a"]
    queue.admit([execution("c", 12)])
    assert sorted(e.id for e in queue.claim(0).executions) == ["b", "c"]


def test_an_execution_without_targets_counts_in_the_scale_and_gives_no_work():
    queue = MicroStepQueue(1, BUDGET)
    queue.admit([execution("a", 5), execution("none", 1), TrainingExecution("bare", -1.0)])
    queue.close()
    assert queue.scale == pytest.approx(1 / 3)
    micro_step = queue.claim(0)
    assert [e.id for e in micro_step.executions] == ["a"]
    queue.done(0, micro_step.id, measured(micro_step))
    assert queue.drained


def test_an_execution_without_advantage_counts_but_is_not_computed():
    queue = MicroStepQueue(1, BUDGET)
    queue.admit([execution("a", 5), execution("even", 8, 0.0), execution("huge", 90, -0.0)])
    queue.close()
    assert queue.scale == pytest.approx(1 / 3) and queue.oversize == []
    micro_step = queue.claim(0)
    assert [e.id for e in micro_step.executions] == ["a"]
    result = TrainStatistics(
        targets=4, executions=1, clipped_high=1, ratio_sum=1.25, entropy_sum=2.0, micro_steps=1
    )
    queue.done(0, micro_step.id, result)
    assert queue.drained
    statistics = queue.commit()
    assert (statistics.targets, statistics.executions, statistics.micro_steps) == (4 + 7 + 89, 3, 1)
    assert (statistics.skipped_targets, statistics.skipped_executions) == (7 + 89, 2)
    assert (statistics.clip_share, statistics.ratio_mean, statistics.entropy) == (1.0, 1.25, 0.5)


def test_a_failed_cell_gives_back_what_it_did_and_held():
    queue = MicroStepQueue(1, BUDGET)
    queue.admit(execution(f"e{i}", 15) for i in range(3))
    queue.close()
    first, second, third = queue.claim(1), queue.claim(1), queue.claim(0)
    queue.done(1, first.id, measured(first))
    queue.done(0, third.id, measured(third))
    assert sorted(queue.fail(1)) == sorted([first.id, second.id])
    assert queue.unclaimed == 2 and not queue.drained
    with pytest.raises(LedgerError, match="does not hold"):
        queue.done(1, second.id, measured(second))
    while (micro_step := queue.claim(0)) is not None:
        queue.done(0, micro_step.id, measured(micro_step))
    assert queue.commit() == TrainStatistics(targets=3 * 14, micro_steps=3)
    with pytest.raises(LedgerError, match="committed already"):
        queue.fail(0)


def test_misuse_is_named():
    queue = MicroStepQueue(7, BUDGET)
    queue.admit([execution("a", 5)])
    with pytest.raises(LedgerError, match="a was admitted before"):
        queue.admit([execution("a", 5)])
    with pytest.raises(LedgerError, match="before the stream is drained"):
        queue.commit()
    queue.close()
    with pytest.raises(LedgerError, match="step 7: the stream is closed"):
        queue.admit([execution("b", 5)])
    with pytest.raises(TrainerError, match="at least 1"):
        MicroStepQueue(1, 0)


def test_a_closed_empty_stream_is_drained():
    queue = MicroStepQueue(1, BUDGET)
    assert not queue.drained
    queue.close()
    assert queue.drained and queue.scale == 0.0 and queue.commit() == TrainStatistics()


def test_watchers_hear_of_every_change():
    queue, heard = MicroStepQueue(1, BUDGET), []
    queue.watch(lambda: heard.append(queue.unclaimed))
    queue.admit([execution("a", 5)])
    queue.claim(0)
    queue.close()
    assert heard == [1, 0, 0]


class Ledger(RuleBasedStateMachine):
    """Any order of admissions, claims, ends and failures of four cells: each is trained once."""

    def __init__(self):
        super().__init__()
        self.queue = MicroStepQueue(1, BUDGET)
        self.admitted: list[str] = []
        self.held: dict[int, list] = {cell: [] for cell in range(4)}
        self.summed: dict[int, list[str]] = {cell: [] for cell in range(4)}

    @precondition(lambda self: not self.queue.closed)
    @rule(sizes=st.lists(st.integers(2, 30), min_size=1, max_size=4))
    def admit(self, sizes):
        names = [f"e{len(self.admitted) + i}" for i in range(len(sizes))]
        self.queue.admit(execution(name, size) for name, size in zip(names, sizes, strict=True))
        self.admitted += names

    @rule(cell=st.integers(0, 3))
    def claim(self, cell):
        supply = self.queue.unclaimed
        micro_step = self.queue.claim(cell)
        assert (micro_step is None) == (supply == 0)
        if micro_step is not None:
            self.held[cell].append(micro_step)

    @rule(cell=st.integers(0, 3))
    def finish(self, cell):
        if self.held[cell]:
            micro_step = self.held[cell].pop()
            self.queue.done(cell, micro_step.id, measured(micro_step))
            self.summed[cell] += [e.id for e in micro_step.executions]

    @rule(cell=st.integers(0, 3))
    def fail(self, cell):
        self.queue.fail(cell)
        self.held[cell], self.summed[cell] = [], []

    @rule()
    def close(self):
        self.queue.close()

    @invariant()
    def nothing_is_summed_twice(self):
        everything = [name for names in self.summed.values() for name in names]
        assert len(everything) == len(set(everything))

    @invariant()
    def drained_means_all_summed(self):
        if self.queue.drained:
            everything = sorted(name for names in self.summed.values() for name in names)
            assert everything == sorted(self.admitted)

    def teardown(self):
        self.queue.close()
        for cell in range(4):
            while self.held[cell]:
                self.finish(cell)
        while not self.queue.drained:
            self.claim(0)
            self.finish(0)
        assert sorted(n for names in self.summed.values() for n in names) == sorted(self.admitted)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
