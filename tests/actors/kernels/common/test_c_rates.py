import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.common import cost
from actors.kernels.common.cost import (
    ATTENTION_ROWS,
    ATTENTION_WIDTHS,
    C_DISTANCES_BYTES,
    C_EXTENTS,
    HELPERS_SPIN_NS,
    CRates,
    Price,
)
from actors.kernels.common.kernel import BytePass, CWork, MatrixProduct

NUM_HEADS = len(ATTENTION_ROWS) * len(ATTENTION_WIDTHS)


def rates_of(**changes):
    """Rates that are easily multiplied: a byte takes 1 ns, 10 flops take 1 ns."""
    given = {
        "num_threads": 2,
        "call_ns": 5.0,
        "open_ns": 7.0,
        "wake_ns": 50.0,
        "pass_speedup": 2.0,
        "miss_speedup": 1.5,
        "product_speedup": 1.8,
        "pass_ns": (1.0,) * len(BytePass),
        "miss_ns": (0.0, 1.0, 2.0, 4.0),
        "flops_per_ns": (10.0,) * len(C_EXTENTS) ** 3,
        "forward": (10.0,) * NUM_HEADS,
        "backward": (5.0,) * NUM_HEADS,
    }
    return CRates(**given | changes)


def test_one_piece_takes_one_thread_and_opens_no_pool():
    work = CWork(((BytePass.SIMPLE, 100.0),), (MatrixProduct(1, 10, 10, 10),))
    assert rates_of().price(work, 0.0) == Price(5 + 100 + 200, 5 + 100 + 200)


def test_pieces_enough_run_at_what_all_threads_gain():
    work = CWork(((BytePass.SIMPLE, 100.0),), (MatrixProduct(1, 10, 10, 9),), pieces=8)
    price = rates_of().price(work, 0.0)
    assert price.duration_ns == pytest.approx(5 + 7 + 100 / 2 + 180 / 1.8)
    assert price.busy_ns == 5 + 100 + 180


@pytest.mark.parametrize(("pieces", "ideal"), [(2, 2), (3, 3 / 2), (5, 5 / 3), (9, 9 / 5)])
def test_the_thread_with_the_most_pieces_ends_last(pieces, ideal):
    work = CWork(((BytePass.SIMPLE, 90.0),), pieces=pieces)
    assert rates_of().price(work, 0.0).duration_ns == pytest.approx(12 + 90 / ideal)


def test_helpers_that_have_been_idle_for_long_are_woken_first():
    rates, shared = rates_of(), CWork(((BytePass.SIMPLE, 90.0),), pieces=2)
    awake = rates.price(shared, 0.0)
    assert rates.price(shared, 0.0, HELPERS_SPIN_NS) == awake
    asleep = rates.price(shared, 0.0, HELPERS_SPIN_NS + 1)
    assert asleep == Price(awake.duration_ns + 50, awake.busy_ns)
    alone = CWork(((BytePass.SIMPLE, 90.0),))
    assert rates.price(alone, 0.0, math.inf) == rates.price(alone, 0.0)


def test_helpers_spin_for_as_long_as_the_runtime_says():
    text = (Path(cost.__file__).parents[1] / "native" / "runtime.c").read_text()
    assert f"#define SPIN_NS {HELPERS_SPIN_NS:.0f}\n" in text


def test_instructions_run_while_bytes_are_moved():
    work = CWork(((BytePass.SIMPLE, 100.0), (BytePass.EXP, 30.0), (BytePass.PLAIN, 50.0)))
    assert rates_of().price(work, 0.0).busy_ns == 5 + 100
    assert rates_of().price(work, 20.0).busy_ns == 5 + 120
    more = CWork((*work.passes, (BytePass.ROOT, 70.0)))
    assert rates_of().price(more, 20.0).busy_ns == 5 + 150


def test_where_rows_are_reduced_nothing_is_moved_meanwhile():
    passes = ((BytePass.SIMPLE, 100.0), (BytePass.REDUCE, 60.0))
    assert rates_of().price(CWork(passes, reduces_rows=True), 20.0).busy_ns == 5 + 120 + 60


def test_what_waits_for_memory_gains_what_memory_allows():
    work = CWork(((BytePass.SIMPLE, 10.0),), pieces=4)
    assert rates_of().price(work, 140.0).duration_ns == pytest.approx(12 + 150 / 1.5)


def test_a_machine_of_one_thread_gains_nothing():
    work = CWork(((BytePass.SIMPLE, 100.0),), pieces=8)
    alone = rates_of(num_threads=1).price(work, 0.0)
    assert alone == Price(105.0, 105.0)


def test_threads_that_do_not_help_do_not_harm():
    work = CWork(((BytePass.SIMPLE, 100.0),), pieces=8)
    same = rates_of(pass_speedup=1.0).price(work, 0.0)
    assert same.duration_ns == pytest.approx(112)


def test_attention_has_rates_of_its_own_each_way():
    item = MatrixProduct(1, 64, 64, 64)
    found = [rates_of().price(CWork(**{way: (item,)}), 0.0) for way in ("forward", "backward")]
    assert [x.busy_ns - 5 for x in found] == [item.flops / 10, item.flops / 5]


@given(*[st.integers(1, 2000)] * 3)
def test_a_rate_in_between_lies_between_its_neighbours(m, n, k):
    rng, size = Random(1), len(C_EXTENTS)
    grid = tuple([rng.uniform(1, 100) for _ in range(size**3)])
    item = MatrixProduct(1, m, n, k)
    rate = item.flops / rates_of(flops_per_ns=grid).products_ns(CWork(products=(item,)))
    near = []
    for corner in product(range(size), repeat=3):
        is_near = [
            max(0, p - 1) <= sum([e <= x for e in C_EXTENTS]) - 1 <= p
            for p, x in zip(corner, (m, n, k), strict=True)
        ]
        if all(is_near):
            near.append(grid[(corner[0] * size + corner[1]) * size + corner[2]])
    assert min(near) * (1 - 1e-9) <= rate <= max(near) * (1 + 1e-9)


def test_misses_are_as_measured_at_the_measured_distances():
    rates = rates_of()
    assert [rates.miss_ns_at(d) for d in C_DISTANCES_BYTES] == pytest.approx(rates.miss_ns)
    assert rates.miss_ns_at(0) == 0.0
    assert rates.miss_ns_at(1 << 40) == rates.miss_ns[-1]
    middle = math.sqrt(C_DISTANCES_BYTES[1] * C_DISTANCES_BYTES[2])
    assert rates.miss_ns_at(middle) == pytest.approx(1.5)


def test_half_of_what_two_threads_share_lies_in_the_cache_of_the_other():
    rates = rates_of()
    assert rates.shared_miss_ns_at(0) == rates.miss_ns_at(C_DISTANCES_BYTES[1]) / 2
    assert rates.shared_miss_ns_at(1 << 40) == rates.miss_ns[-1]
    assert rates_of(num_threads=1).shared_miss_ns_at(0) == 0.0


def test_the_work_of_two_launches_is_the_work_of_both():
    one = CWork(((BytePass.SIMPLE, 1.0),), (MatrixProduct(1, 2, 3, 4),), pieces=3)
    other = CWork(((BytePass.EXP, 2.0),), pieces=5, openings=2)
    both = one.then(other)
    assert both.passes == (*one.passes, *other.passes)
    assert (both.products, both.pieces, both.openings) == (one.products, 5, 3)
    assert not both.reduces_rows
    assert one.then(replace(other, reduces_rows=True)).reduces_rows
