"""The order of samples: every one once in an epoch, near its neighbours where files ask for it."""

import numpy as np
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.data.order import Drawn, Mixed, Passes

BLOCKS = st.lists(st.integers(1, 30), min_size=1, max_size=12).map(tuple)


@given(blocks=BLOCKS, seed=st.integers(0, 5), window=st.integers(1, 90), epoch=st.integers(0, 3))
@settings(max_examples=tiers.examples(200), deadline=None)
def test_blocks_are_read_window_by_window_and_every_sample_once(blocks, seed, window, epoch):
    order = Passes(sum(blocks), blocks).shuffled(seed, window)
    numbers, epochs = order.at(epoch, 0, sum(blocks))
    assert sorted(numbers.tolist()) == list(range(sum(blocks)))
    assert (epochs == epoch).all()
    of_block = np.repeat(np.arange(len(blocks)), blocks)[numbers]
    last_of = {b: np.flatnonzero(of_block == b).max() for b in range(len(blocks))}
    first_of = {b: np.flatnonzero(of_block == b).min() for b in range(len(blocks))}
    # A reader that holds the blocks of one window never reads a block a second time.
    mean = max(1, sum(blocks) // len(blocks))
    open_at_once = max(
        sum(first_of[b] <= t <= last_of[b] for b in first_of) for t in last_of.values()
    )
    assert open_at_once <= max(1, window // mean)


@given(blocks=BLOCKS, seed=st.integers(0, 5), window=st.none() | st.integers(1, 90), data=st.data())
@settings(max_examples=tiers.examples(100), deadline=None)
def test_a_position_means_the_same_in_any_slice(blocks, seed, window, data):
    total = sum(blocks)
    order = Passes(total, blocks).shuffled(seed, window)
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    whole = Passes(total, blocks).shuffled(seed, window).at(2, 0, total)[0]
    order.at(1, 0, total)  # another epoch in between
    assert order.at(2, first, count)[0].tolist() == whole[first : first + count].tolist()


def test_a_window_of_all_samples_is_a_permutation_of_all():
    ranks = [Passes(50).shuffled(seed, 50).at(0, 0, 50)[0].tolist().index(0) for seed in range(200)]
    assert min(ranks) < 5
    assert max(ranks) >= 45


@given(first=st.integers(0, 900), count=st.integers(1, 400), seed=st.integers(0, 3))
def test_draws_and_turns_depend_on_the_position_alone(first, count, seed):
    drawn = Drawn(1300, tuple(np.arange(1300.0)), seed)
    parts = (Passes(700, epochs=None), Passes(600).shuffled(seed, None))
    mixed = Mixed(parts, (0, 700), (0.3, 0.7), seed)
    for order in (drawn, mixed):
        whole = [row.tolist() for row in order.at(0, 0, 1300)]
        part = [row.tolist() for row in order.at(0, first, count)]
        assert part == [row[first : first + count] for row in whole]


def test_turns_of_three_parts_follow_their_weights_for_ever():
    parts = (Passes(10), Passes(20), Passes(30))
    mixed = Mixed(parts, (0, 10, 30), (1.0, 0.0, 2.5), 0)
    begin = 10_000_000 // mixed.length
    numbers, epochs = mixed.at(begin, 0, 60)
    assert not ((numbers >= 10) & (numbers < 30)).any(), "a weight of 0 has no turn"
    many = np.concatenate([mixed.at(epoch, 0, 60)[0] for epoch in range(200)])
    assert abs((many < 10).sum() - 12_000 / 3.5) <= 256
    assert epochs.min() > 10_000
