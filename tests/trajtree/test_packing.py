import pytest
from gyre_trajtree import TrajtreeError, pack
from hypothesis import given
from hypothesis import strategies as st

sizes = st.lists(st.integers(0, 30), max_size=40)


@given(sizes, st.integers(1, 20))
def test_every_item_is_in_one_bin_and_only_lone_giants_pass_the_budget(sizes, budget):
    bins = pack(sizes, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    for members in bins:
        total = sum(sizes[i] for i in members)
        assert members == sorted(members) and (total <= budget or len(members) == 1)


@given(sizes, st.integers(1, 20))
def test_no_two_bins_could_be_one(sizes, budget):
    totals = sorted(sum(sizes[i] for i in members) for members in pack(sizes, budget))
    assert len(totals) < 2 or totals[0] + totals[1] > budget


def test_the_tightest_bin_that_fits_is_chosen():
    assert pack([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert pack([7, 6, 3], 10) == [[0, 2], [1]]


def test_giants_sit_alone():
    assert pack([3, 25, 3], 10) == [[1], [0, 2]]


def test_bad_input_is_refused():
    with pytest.raises(TrajtreeError, match="budget"):
        pack([1], 0)
    with pytest.raises(TrajtreeError, match="negative"):
        pack([1, -2], 10)
