import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.common import cost
from actors.kernels.common.cost import (
    DISTANCES_BYTES,
    HELPERS_SPIN_NS,
    OPEN_NS,
    REFERENCE,
    Price,
    Rates,
)
from actors.kernels.common.kernel import BytePass, MatrixProduct, Operand, Work
from actors.kernels.host import catalogue
from compiler.contract.types import DType, TensorType, contiguous_strides

extents = st.integers(1, 5000)
LONG = 1e7
"""Bytes that take long enough to be shared."""

PIECE_BYTES = cost.PIECE_NS / REFERENCE.pass_ns_of(BytePass.ADD)


def dense(*shape):
    return Operand(TensorType(DType.FLOAT32, shape), 0, contiguous_strides(shape, 4))


def rates_of(**changes):
    """Rates that are easily multiplied: a byte takes 1 ns, 10 flops take 1 ns."""
    usual = {
        "call_ns": 5.0,
        "loop_ns": 3.0,
        "pass_ns": (1.0,) * len(BytePass),
        "miss_ns": (0.0, 1.0, 2.0, 4.0, 4.0),
        "flops_per_ns": (10.0, 8.0),
        "num_threads": 2,
        "compute_gain": 1.8,
        "move_gain": 1.5,
        "wake_ns": 50.0,
    }
    return Rates(**usual | changes)


@pytest.mark.parametrize(("elements", "rate"), [(1 << 14, 10), (1 << 18, 9), (1 << 24, 8)])
def test_a_large_product_takes_its_flops_at_the_rate_of_its_second_factor(elements, rate):
    side = math.isqrt(elements)
    item = MatrixProduct(7, 1 << 12, side, side)
    assert rates_of().product_ns(item) == pytest.approx(item.flops / rate, rel=0.04)


@given(extents, extents, extents)
def test_a_product_never_takes_less_for_one_more_row_column_or_term(m, n, k):
    times = [
        REFERENCE.product_ns(MatrixProduct(1, *more))
        for more in ((m, n, k), (m + 1, n, k), (m, n + 1, k), (m, n, k + 1))
    ]
    assert times[0] <= min(times) * (1 + 1e-9)


def test_columns_fill_whole_vectors():
    times = [rates_of().product_ns(MatrixProduct(1, 8, n, 8)) for n in (1, 16, 17, 32)]
    assert times == pytest.approx([times[0], times[0], 2 * times[0], 2 * times[0]])


def test_an_empty_product_takes_no_time():
    assert REFERENCE.product_ns(MatrixProduct(1, 0, 4, 4)) == 0.0


@given(st.floats(0, 1e9))
def test_the_price_of_a_miss_never_falls_with_the_distance(distance):
    assert REFERENCE.miss_ns_at(distance) <= REFERENCE.miss_ns_at(distance * 2 + 1)


def test_misses_are_free_nearby_and_as_measured_at_the_measured_distances():
    assert REFERENCE.miss_ns_at(100_000) == 0.0
    measured = [REFERENCE.miss_ns_at(distance) for distance in DISTANCES_BYTES]
    assert measured == pytest.approx(REFERENCE.miss_ns)
    assert REFERENCE.miss_ns_at(1e12) == REFERENCE.miss_ns[-1]
    middle = math.sqrt(DISTANCES_BYTES[1] * DISTANCES_BYTES[2])
    assert rates_of().miss_ns_at(middle) == pytest.approx(1.5)


def test_calls_and_products_come_before_the_longer_of_computing_and_moving():
    passes = ((BytePass.MOVE, 100.0), (BytePass.ADD, 30.0), (BytePass.EXP, 40.0))
    work = Work(10, 4, passes, is_native=True)
    assert rates_of().price(work, 0.0) == Price(50 + 100, 50 + 100)
    assert rates_of().price(work, 20.0) == Price(50 + 120, 50 + 120)
    more = replace(work, passes=(*passes, (BytePass.ROOT, 70.0)))
    assert rates_of().price(more, 20.0).busy_ns == 50 + 140 + 4 * 3
    item = MatrixProduct(1, 64, 64, 64)
    products = replace(more, products=(item,))
    assert rates_of().price(products, 20.0).busy_ns == 50 + rates_of().product_ns(item) + 152


def test_calls_of_numpy_compute_after_they_have_moved():
    work = Work(10, 4, ((BytePass.PLAIN, 100.0), (BytePass.EXP, 40.0)))
    assert rates_of().price(work, 20.0) == Price(50 + 20 + 140 + 4 * 3, 50 + 20 + 140 + 4 * 3)


def test_a_long_launch_in_c_is_shared_by_what_all_threads_gain():
    computes = Work(1, 0, ((BytePass.ADD, LONG),), is_native=True)
    moves = replace(computes, passes=((BytePass.MOVE, LONG),))
    assert rates_of().price(computes, 0.0) == Price(5 + OPEN_NS + LONG / 1.8, 5 + LONG, True)
    assert rates_of().price(moves, 0.0) == Price(5 + OPEN_NS + LONG / 1.5, 5 + LONG, True)


@pytest.mark.parametrize(
    ("rates", "work"),
    [
        ({}, Work(1, 0, ((BytePass.ADD, LONG),))),
        ({}, Work(1, 0, ((BytePass.ADD, 1.9 * PIECE_BYTES),), is_native=True)),
        ({"num_threads": 1}, Work(1, 0, ((BytePass.ADD, LONG),), is_native=True)),
    ],
    ids=["by numpy", "short", "one thread"],
)
def test_what_one_thread_does_opens_no_pool(rates, work):
    (_, size), *_ = work.passes
    assert rates_of(**rates).price(work, 0.0, math.inf) == Price(5 + size, 5 + size)


def test_few_pieces_gain_less_than_many_threads_would():
    work = Work(0, 0, ((BytePass.ADD, 2 * PIECE_BYTES),), is_native=True)
    price = rates_of(num_threads=8, compute_gain=8.0).price(work, 0.0)
    assert price.duration_ns == pytest.approx(OPEN_NS + PIECE_BYTES)


def test_helpers_that_have_been_idle_for_long_are_woken_first():
    rates, shared = rates_of(), Work(1, 0, ((BytePass.ADD, LONG),), is_native=True)
    awake = rates.price(shared, 0.0)
    assert rates.price(shared, 0.0, HELPERS_SPIN_NS) == awake
    asleep = rates.price(shared, 0.0, HELPERS_SPIN_NS + 1)
    assert asleep == replace(awake, duration_ns=awake.duration_ns + 50)


def test_helpers_spin_for_as_long_as_the_runtime_says():
    text = (Path(cost.__file__).parents[1] / "native" / "runtime.c").read_text()
    assert f"#define SPIN_NS {HELPERS_SPIN_NS:.0f}\n" in text


def test_products_of_numpy_keep_the_threads_of_its_library_busy():
    item = MatrixProduct(1, 64, 64, 64)
    price = rates_of(blas_threads=3.0).price(Work(0, products=(item,)), 0.0)
    assert price.busy_ns == pytest.approx(3 * price.duration_ns)


def test_cores_that_no_launch_uses_add_to_what_threads_gain():
    assert rates_of().capacity_of(2) == 1.8
    assert rates_of().capacity_of(4) == pytest.approx(1.8 + 2 * 0.9)


def test_what_is_not_swept_costs_no_misses():
    x, table = dense(1 << 20), dense(1 << 26)
    work = Work(unswept=(1,))
    assert cost.swept((x, table, x), work) == (x, x)
    needs = cost.needs((x, table), (x,), work)
    assert needs.duration_ns < cost.needs((x, table), (x,), Work()).duration_ns


def test_a_repeated_axis_is_touched_once():
    x = dense(64, 64)
    assert cost.footprint_bytes(x) == 4 * 64 * 64
    assert cost.footprint_bytes(replace(x, strides_bytes=(0, 4))) == 4 * 64


@pytest.mark.parametrize("op", ["copy", "matmul"])
def test_an_estimate_grows_with_the_call_and_says_what_work_it_is_of(op):
    attrs = {}
    durations = []
    for side in (32, 128, 512):
        x = dense(side, side)
        inputs = (x, x) if op == "matmul" else (x,)
        needs = catalogue.select_kernel(op, attrs, inputs, (x,))[1]
        assert needs.duration_ns == cost.duration_ns((*inputs, x), needs.work, REFERENCE)
        durations.append(needs.duration_ns)
    assert durations == sorted(set(durations))


def test_the_work_of_two_launches_is_the_work_of_both():
    one = Work(1, 2, ((BytePass.ADD, 1.0),), (MatrixProduct(1, 2, 3, 4),), is_native=True)
    other = Work(3, 4, ((BytePass.EXP, 2.0),), is_native=True)
    both = one.then(other)
    assert (both.calls, both.loops, both.products) == (4, 6, one.products)
    assert both.passes == (*one.passes, *other.passes)
    assert both.is_native
    assert not one.then(Work()).is_native
