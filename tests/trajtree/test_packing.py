import numpy as np
import pytest
from gyre_trajtree import TrajtreeError, pack
from hypothesis import given
from hypothesis import strategies as st

sizes = st.lists(st.integers(0, 30), max_size=40)


@given(sizes, st.integers(1, 20))
def test_every_item_is_in_one_bin_and_only_lone_giants_pass_the_budget(sizes, budget):
    oversize = []
    bins = pack(sizes, budget, oversize)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    for members in bins:
        total = sum(sizes[i] for i in members)
        assert members == sorted(members) and (total <= budget or len(members) == 1)
    assert oversize == [index for index, size in enumerate(sizes) if size > budget]


@given(sizes, st.integers(1, 20))
def test_the_same_sizes_give_the_same_bins(sizes, budget):
    assert pack(sizes, budget) == pack(np.array(sizes, np.int64), budget) == pack(tuple(sizes), budget)


def fewest(sizes, budget):
    """The least number of bins, by trying every assignment."""
    best = len(sizes)

    def place(rest, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if not rest:
            best = len(rooms)
            return
        for i in {room: i for i, room in enumerate(rooms) if room >= rest[0]}.values():
            place(rest[1:], [*rooms[:i], rooms[i] - rest[0], *rooms[i + 1 :]])
        place(rest[1:], [*rooms, budget - rest[0]])

    place(sorted(sizes, reverse=True), [])
    return best


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(12, 20))
def test_few_items_are_at_most_one_bin_over_the_fewest(sizes, budget):
    """Best-fit decreasing needs at most 11/9 of the fewest bins and 6/9 more."""
    least = fewest(sizes, budget)
    assert least <= len(pack(sizes, budget)) <= (11 * least + 6) // 9


def lognormal(rng):
    return rng.lognormal(9.2, 0.9, 2560)


def uniform(rng):
    return rng.uniform(500, 60_000, 2560)


def short_and_long(rng):
    return np.concatenate((rng.normal(30_000, 4_000, 1280), rng.normal(5_000, 1_500, 1280)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "mix, budget",
    [(lognormal, 65_536), (lognormal, 131_072), (uniform, 131_072), (short_and_long, 131_072)],
)
def test_rows_of_a_training_step_reach_the_lower_bound(mix, budget, seed):
    sizes = np.clip(mix(np.random.default_rng(seed)), 1, 65_536).astype(int).tolist()
    assert len(pack(sizes, budget)) == -(-sum(sizes) // budget)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 9))
def test_what_filled_whole_bins_is_packed_with_little_more(parts, seed):
    """Bins cut into pieces at random: a perfect packing exists."""
    budget = 60
    pieces = []
    for part in parts:
        pieces += [part, budget - part]
    order = np.random.default_rng(seed).permutation(len(pieces))
    shuffled = [pieces[i] for i in order]
    assert len(pack(shuffled, budget)) == len(parts)  # two to a bin: best fit is exact


def test_the_tightest_bin_that_fits_is_chosen():
    assert pack([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert pack([7, 6, 3], 10) == [[0, 2], [1]]


def test_a_bin_is_closed_by_the_pair_that_fills_it():
    """The largest that fits beside 44 is 30; 29 and 27 fill the bin, and then everything fits into three."""
    sizes = [44, 30, 30, 40, 29, 27, 28, 28, 44]
    assert sum(sizes) == 300
    assert len(pack(sizes, 100)) == 3


def test_giants_sit_alone_and_are_reported():
    oversize = []
    assert pack([3, 25, 3, 11], 10, oversize) == [[1], [3], [0, 2]]
    assert oversize == [1, 3]


def test_nothing_needs_no_bin():
    assert pack([], 10) == [] and pack([0, 0], 10) == [[0, 1]]


def test_bad_input_is_refused():
    with pytest.raises(TrajtreeError, match="budget"):
        pack([1], 0)
    with pytest.raises(TrajtreeError, match="negative"):
        pack([1, -2], 10)
