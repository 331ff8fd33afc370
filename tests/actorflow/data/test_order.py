import itertools

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from actorflow.data import arrays as order_module
from actorflow.data.arrays import EpochOrder
from actorflow.data.source import DataError


@given(
    length=st.integers(1, 600),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
@settings(max_examples=tiers.examples(200))
def test_every_item_comes_exactly_once_in_an_epoch(length, seed, epoch, shuffle):
    items = EpochOrder(length, seed, shuffle=shuffle).items(epoch, 0, length)
    assert sorted(items.tolist()) == list(range(length))


@given(length=st.integers(1, 5000), seed=st.integers(0, 9), epoch=st.integers(0, 5), data=st.data())
def test_an_item_does_not_depend_on_the_slice_it_is_asked_in(length, seed, epoch, data):
    first = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(0, length - first))
    whole = EpochOrder(length, seed).items(epoch, 0, length)
    part = EpochOrder(length, seed).items(epoch, first, count)
    assert part.tolist() == whole[first : first + count].tolist()


def test_a_huge_epoch_costs_no_array():
    order = EpochOrder(2**52 + 3, 1)
    items = order.items(7, 2**51, 1000)
    assert len(set(items.tolist())) == 1000
    assert 0 <= items.min() <= items.max() < 2**52 + 3


def test_without_shuffle_the_items_keep_their_order():
    assert EpochOrder(10, 3, shuffle=False).items(4, 2, 5).tolist() == [2, 3, 4, 5, 6]


def test_seeds_and_epochs_give_different_orders():
    orders = [
        tuple(EpochOrder(100, seed).items(epoch, 0, 100).tolist())
        for seed, epoch in itertools.product((0, 1, 2**32, 2**64), (0, 1, 2**32))
    ]
    assert len(set(orders)) == len(orders)


def test_asking_for_epochs_in_turn_gives_what_each_gives_alone():
    order = EpochOrder(50, 9)
    in_turn = [order.items(epoch, 0, 50).tolist() for epoch in (0, 1, 0, 1)]
    assert in_turn[0] == in_turn[2] == EpochOrder(50, 9).items(0, 0, 50).tolist()
    assert in_turn[1] == in_turn[3] != in_turn[0]


@pytest.mark.parametrize("length", [5, 16, 50])
def test_over_many_seeds_every_item_is_equally_likely_at_every_position(length):
    """Chi-square of the item-by-position counts, at five standard deviations."""
    rounds = 2000
    counts = np.zeros((length, length))
    for seed in range(rounds):
        counts[np.arange(length), EpochOrder(length, seed).items(0, 0, length)] += 1
    chi_square = ((counts - rounds / length) ** 2 / (rounds / length)).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together():
    items = EpochOrder(10_000, 0).items(0, 0, 10_000)
    steps = np.abs(np.diff(items))
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.05)  # of a uniform random permutation


def test_draws_cover_their_range_and_repeat():
    order = EpochOrder(10, 5)
    draws = [order.draw(epoch, 8) for epoch in range(200)]
    assert set(draws) == set(range(8))
    assert draws == [EpochOrder(10, 5).draw(epoch, 8) for epoch in range(200)]


def test_the_order_is_the_same_in_every_version():
    """A changed order would break the resume of every run that exists."""
    assert EpochOrder(12, 42).items(3, 0, 12).tolist() == [
        2, 8, 4, 11, 9, 5, 7, 1, 10, 6, 0, 3,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True, None])
def test_a_seed_that_is_no_natural_number_is_refused(seed):
    with raises(DataError):
        EpochOrder(10, seed)


@pytest.mark.parametrize(("length", "count"), [(512, 16), (1000, 8), (5000, 32)])
def test_a_block_is_made_in_shares_while_the_one_before_is_given_out(monkeypatch, length, count):
    made = []
    mixed = order_module._mixed
    monkeypatch.setattr(order_module, "_mixed", lambda *given: made.append(1) or mixed(*given))
    order = EpochOrder(length, 3)
    order.items(0, 0, count)
    for epoch in range(3):
        for first in range(count if epoch == 0 else 0, length - count + 1, count):
            made.clear()
            items = order.items(epoch, first, count)
            assert len(made) <= 2 * order_module._ROUNDS_AHEAD
            assert items.tolist() == EpochOrder(length, 3).items(epoch, first, count).tolist()


def test_a_jump_away_from_the_block_that_was_begun_gives_the_same_items():
    order, rng = EpochOrder(3000, 3), np.random.default_rng(0)
    for _ in range(200):
        epoch, first = int(rng.integers(0, 3)), int(rng.integers(0, 2990))
        expected = EpochOrder(3000, 3).items(epoch, first, 10)
        assert order.items(epoch, first, 10).tolist() == expected.tolist()
