"""Prefix groups between members that are threads here: the groups do not know the difference."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from gyre_trainer.errors import CollectiveError
from gyre_trainer.membership import Membership, host_store, join_store

HOST = "127.0.0.1"


class Cells:
    """`count` members on threads, with one store."""

    def __init__(self, count: int, timeout_s: float = 5.0):
        self.timeout_s = timeout_s
        self.store = host_store(HOST, timeout_s)
        self.stores = [self.store] + [join_store(HOST, self.store.port, timeout_s) for _ in range(count - 1)]
        self.threads = ThreadPoolExecutor(count)

    def join(self, generation: int, members: list[int]) -> dict[int, Membership]:
        def build(cell):
            return Membership(self.stores[cell], generation, members, cell, HOST, self.timeout_s)

        return dict(zip(members, self.threads.map(build, members), strict=True))

    def all(self, memberships, action):
        return list(self.threads.map(lambda item: action(*item), memberships.items()))


@pytest.fixture
def cells():
    made = []

    def make(count, timeout_s=5.0):
        made.append(Cells(count, timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.threads.shutdown(wait=True)


def test_every_prefix_sums_to_the_core_and_leaves_each_gradient_as_it_was(cells):
    group = cells(3)
    members = group.join(1, [0, 1, 2])
    own = {cell: torch.full((5,), float(10**cell)) for cell in members}
    for count, total in ((2, 11.0), (3, 111.0), (2, 11.0)):
        prefix = {cell: members[cell] for cell in range(count)}
        sums = group.all(prefix, lambda cell, m, count=count: m.reduce([own[cell]], count))
        assert torch.equal(sums[0][0], torch.full((5,), total)) and sums[1:] == [None] * (count - 1)
    assert all(torch.equal(own[cell], torch.full((5,), float(10**cell))) for cell in members)


def test_nothing_listens_beyond_the_host_given(cells):
    group = cells(2)
    group.join(1, [0, 1])
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert group.store.port in {connection.laddr.port for connection in listening}
    assert {connection.laddr.ip for connection in listening} == {HOST}


def test_progress_is_told_after_each_of_many_collectives(cells, monkeypatch):
    monkeypatch.setattr("gyre_trainer.membership.CHUNK", 5)
    group, told = cells(2), []
    members = group.threads.map(
        lambda cell: Membership(
            group.stores[cell], 1, [0, 1], cell, HOST, 5.0, lambda: told.append(cell) if cell == 0 else None
        ),
        (0, 1),
    )
    members = dict(enumerate(members))
    assert len(told) == 1
    group.all(members, lambda cell, m: m.reduce([torch.ones(20), torch.ones(3)], 2))
    assert len(told) == 1 + 5
    weights = {cell: [torch.full((4, 3), float(cell))] for cell in members}
    group.all(members, lambda cell, m: m.broadcast(weights[cell], 2))
    assert len(told) == 1 + 5 + 3 and not weights[1][0].any()


def test_large_gradients_go_in_chunks(cells, monkeypatch):
    monkeypatch.setattr("gyre_trainer.membership.CHUNK", 7)
    group = cells(2)
    members = group.join(1, [0, 1])
    own = {0: torch.arange(20.0), 1: torch.ones(20)}
    sums = group.all(members, lambda cell, m: m.reduce([own[cell]], 2))
    assert torch.equal(sums[0][0], torch.arange(20.0) + 1)


def test_the_cores_weights_reach_the_prefix_only(cells):
    group = cells(3)
    members = group.join(1, [0, 1, 2])
    weights = {cell: [torch.full((2, 3), float(cell)), torch.full((4,), float(cell))] for cell in members}
    prefix = {cell: members[cell] for cell in (0, 1)}
    group.all(prefix, lambda cell, m: m.broadcast(weights[cell], 2))
    assert [w[0].flatten()[0].item() for w in weights.values()] == [0.0, 0.0, 2.0]


def test_a_missing_member_fails_by_the_deadline_and_names_the_prefix(cells):
    group = cells(2, timeout_s=0.5)
    members = group.join(1, [0, 1])
    own = torch.ones(3)
    with pytest.raises(
        CollectiveError, match=r"summing gradients over cells \(0, 1\) failed \(generation 1\)"
    ):
        members[0].reduce([own], 2)
    assert torch.equal(own, torch.ones(3))


def test_a_group_that_failed_is_replaced_by_a_new_generation(cells):
    group = cells(3, timeout_s=0.5)
    members = group.join(1, [0, 1, 2])
    with pytest.raises(CollectiveError):
        members[0].reduce([torch.ones(3)], 3)
    survivors = group.join(2, [0, 2])
    sums = group.all(survivors, lambda cell, m: m.reduce([torch.ones(3)], 2))
    assert torch.equal(sums[0][0], torch.full((3,), 2.0))


def test_a_member_that_never_joins_is_a_named_failure(cells):
    group = cells(2, timeout_s=0.5)
    with pytest.raises(CollectiveError, match=r"building the group of cells \(0, 1\)"):
        Membership(group.store, 1, [0, 1], 0, HOST, 0.5)


def test_switching_prefixes_many_times_keeps_the_groups(cells):
    group = cells(3)
    members = group.join(1, [0, 1, 2])
    before = threading.active_count()
    for turn in range(30):
        count = 2 + turn % 2
        prefix = {cell: members[cell] for cell in range(count)}
        sums = group.all(prefix, lambda cell, m, count=count: m.reduce([torch.ones(1)], count))
        assert sums[0][0].item() == count
    assert len(members[0]._groups) == 2 and threading.active_count() <= before + 3
