from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.kernels.common import cost
from actors.kernels.common.cost import DISTANCES_BYTES, EXTENTS, REFERENCE, Rates
from actors.kernels.common.kernel import BytePass, MatrixProduct, Operand, Work
from actors.kernels.host import catalogue
from compiler.contract.types import DType, TensorType, contiguous_strides

extents = st.integers(1, 5000)


def dense(*shape):
    return Operand(TensorType(DType.FLOAT32, shape), 0, contiguous_strides(shape, 4))


def test_a_measured_product_takes_its_flops_at_its_rate():
    for place, (m, n, k) in enumerate(product(EXTENTS, repeat=3)):
        expected = 2 * 7 * m * n * k / REFERENCE.flops_per_ns[place]
        assert REFERENCE.product_ns(MatrixProduct(7, m, n, k)) == pytest.approx(expected)


@given(extents, extents, extents)
def test_a_rate_in_between_lies_between_its_neighbours(m, n, k):
    corners = [
        (
            max(e for e in EXTENTS if e <= x),
            min([e for e in EXTENTS if e >= x], default=EXTENTS[-1]),
        )
        for x in (m, n, k)
    ]
    size = len(EXTENTS)
    near = [
        REFERENCE.flops_per_ns[
            (EXTENTS.index(a) * size + EXTENTS.index(b)) * size + EXTENTS.index(c)
        ]
        for a, b, c in product(*corners)
    ]
    item = MatrixProduct(1, m, n, k)
    rate = item.flops / REFERENCE.product_ns(item)
    assert min(near) * (1 - 1e-9) <= rate <= max(near) * (1 + 1e-9)


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


def test_work_costs_the_sum_of_its_parts():
    rates = Rates(
        2.0, 3.0, (0.0, 5.0) + (0.0,) * (len(BytePass) - 2), REFERENCE.miss_ns, (1.0,) * 125
    )
    work = Work(10, 4, ((BytePass.PLAIN, 7.0),), (MatrixProduct(1, 2, 2, 2),))
    assert rates.work_ns(work) == pytest.approx(10 * 2 + 4 * 3 + 7 * 5 + 16)


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
