import gc
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meetings import call, cut, placed, reduced, same_bits, type_of, values

from actors.collectives.segments import DTYPES, OwnSegments
from compiler.contract.errors import DeviceError, InternalError
from compiler.contract.types import DType, TensorType

SIZES = (0, 1, 2, 1000, 1023, 4099, 100_003)


def reductions():
    for dtype in DTYPES:
        yield from [(dtype, by) for by in ("sum", "max", "min")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_an_all_reduce_leaves_the_sum_by_a_tree_on_every_rank(together, ranks):
    cases = [(*kind, size) for kind in reductions() for size in SIZES]

    def do(communicator):
        bound = []
        for order, (dtype, by, size) in enumerate(cases):
            array = placed(communicator, values(dtype, (size,), (order, communicator.rank)))
            type_ = type_of(dtype, array)
            asked = call("all_reduce", type_, type_, order, num_ranks=ranks, by=by)
            bound.append((array, communicator.bind(asked, (array,), (array,))))
        communicator.ready()
        for _, meet in bound:
            meet()
        return [array for array, _ in bound]

    found = together((ranks,), do)
    for order, (dtype, by, size) in enumerate(cases):
        given_ = [values(dtype, (size,), (order, rank)) for rank in range(ranks)]
        wanted = reduced(dtype, given_, by)
        for rank in range(ranks):
            assert same_bits(dtype, found[rank][order], wanted), (dtype, by, size, rank)


@pytest.mark.parametrize("size", [1000, 100_003], ids=["aside", "in place"])
def test_ends_beside_one_meet_in_its_memory_when_it_is_closed_as_well(together, size):
    """They may have other collectives, whose operands lie anywhere in the same blocks."""
    type_ = TensorType(DType.FLOAT32, (size,))

    def do(communicator):
        rank = communicator.rank
        block = communicator.allocate(2 * type_.size_bytes, 64).view(np.float32)
        parts = block[:size], block[size:]

        def meets(end, order, array):
            asked = call("all_reduce", type_, type_, order, num_ranks=2, by="sum")
            return end.bind(asked, (array,), (array,))

        first = meets(communicator, 0, parts[0])
        communicator.ready()
        make, ends = communicator.beside(), []
        for number in range(3):
            end = make()
            launch = meets(end, number, parts[number % 2])
            end.ready()
            ends.append((end, launch))
        found = []
        for number, (end, launch) in enumerate([(communicator, first), *ends, *ends[1:]]):
            part = parts[0] if end is communicator else parts[[e for e, _ in ends].index(end) % 2]
            part[...] = number + rank
            launch()
            found.append({*part.tolist()})
            if number < 2:
                end.close()
        for end, _ in ends:
            end.close()
        return found

    wanted = [{2.0 * number + 1} for number in range(6)]
    assert together((2,), do) == [wanted, wanted]


def moved(op, whole, dtype, ranks, rank, axes):
    """Return attributes, what a rank gives, and what it must have afterwards."""
    axis, to_axis = axes
    if op == "reduce_scatter":
        total = reduced(dtype, list(whole), "sum")
        left = cut(total, axis, ranks, rank)
        return {"axis": axis, "rows": left.shape[axis], "by": "sum"}, whole[rank], left
    start = cut(whole, axis, ranks, rank)
    attrs = {"axis": axis, "rows": whole.shape[axis]}
    if op == "all_gather":
        return attrs, start, whole
    left = cut(whole, to_axis, ranks, rank)
    return attrs | {"to_axis": to_axis, "to_rows": left.shape[to_axis]}, start, left


def exchange(together, ranks, op, dtype, shape, axes):
    """Run one collective over a random whole, and compare what every rank has after it."""
    arrays = np.stack([values(dtype, shape, (5, rank)) for rank in range(ranks)])
    whole = arrays if op == "reduce_scatter" else arrays[0]

    def do(communicator):
        rank = communicator.rank
        attrs, start, wanted = moved(op, whole, dtype, ranks, rank, axes)
        start = placed(communicator, np.ascontiguousarray(start))
        left = placed(communicator, np.zeros_like(wanted))
        asked = call(op, type_of(dtype, start), type_of(dtype, left), num_ranks=ranks, **attrs)
        meet = communicator.bind(asked, (start,), (left,))
        communicator.ready()
        for _ in range(2):
            left[...] = 0
            meet()
            assert same_bits(dtype, left, wanted), (op, shape, axes, rank)

    together((ranks,), do)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("scale", [1, 40], ids=["aside", "in place"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "all_to_all"])
def test_parts_of_all_sizes_along_all_axes_arrive(together, op, ranks, scale):
    for shape in ((4, 5, 7), (8, 4, 12), (5, 6, 4)):
        for axis in range(3):
            others = [b for b in range(3) if b != axis] if op == "all_to_all" else [axis]
            for to_axis in others:
                large = (shape[0], shape[1] * scale, shape[2] * scale)
                exchange(together, ranks, op, DType.FLOAT32, large, (axis, to_axis))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_moves_may_have_any_type(together, dtype):
    for op in ("reduce_scatter", "all_gather", "all_to_all"):
        exchange(together, 3, op, dtype, (7, 5), (0, 1))
        exchange(together, 3, op, dtype, (70, 901), (1, 0))


@given(
    ranks=st.integers(2, 4),
    op=st.sampled_from(["reduce_scatter", "all_gather", "all_to_all"]),
    shape=st.lists(st.integers(0, 9), min_size=2, max_size=4),
    data=st.data(),
)
@settings(
    max_examples=tiers.examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_shape_moves(together, ranks, op, shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    others = [b for b in range(len(shape)) if b != axis]
    exchange(
        together, ranks, op, DType.INT16, tuple(shape), (axis, data.draw(st.sampled_from(others)))
    )


def test_groups_along_the_axes_of_a_mesh_meet_apart(together):
    def do(communicator):
        mesh, rank = communicator.mesh, communicator.rank
        found = []
        for order, (name, size) in enumerate([("data", 3), ("model", 9000), ("data", 9000)]):
            array = placed(communicator, np.full(size, 10.0**rank, np.float32))
            type_ = type_of(DType.FLOAT32, array)
            ranks = mesh.shape[mesh.axis(name)]
            attrs = {"group": name, "num_ranks": ranks, "by": "sum"}
            found.append((array, communicator.bind(
                call("all_reduce", type_, type_, order, **attrs), (array,), (array,)
            )))  # fmt: skip
        communicator.ready()
        for _, meet in found:
            meet()
        return [{*array.tolist()} for array, _ in found]

    rows = together((2, 2), do)
    assert rows[0] == [{101.0}, {11.0}, {101.0}]
    assert rows[1] == [{1010.0}, {11.0}, {1010.0}]
    assert rows[2] == [{101.0}, {1100.0}, {101.0}]
    assert rows[3] == [{1010.0}, {1100.0}, {1010.0}]


def test_streams_that_run_side_by_side_meet_apart(together):
    """One rank runs first what the other one runs last, on two streams each."""

    def do(communicator):
        found = []
        for stream in (0, 5):
            array = placed(communicator, np.full(6000, 1.0 + stream, np.float32))
            type_ = type_of(DType.FLOAT32, array)
            asked = call("all_reduce", type_, type_, stream, stream=stream, num_ranks=2, by="sum")
            found.append((array, communicator.bind(asked, (array,), (array,))))
        communicator.ready()
        first, last = [meet for _, meet in found][:: 1 - 2 * communicator.rank]
        thread = threading.Thread(target=last)
        waiting = threading.Thread(target=first)
        waiting.start()
        thread.start()
        thread.join()
        waiting.join()
        return [float(array.max()) for array, _ in found]

    assert together((2,), do) == [[2.0, 12.0]] * 2


def test_each_rank_has_its_own_slots(together):
    """Plans of ranks differ: one has three slots, one has two, and firings go round in both."""

    def do(communicator):
        slots = 2 + communicator.rank
        arrays = [placed(communicator, np.zeros(6000, np.float64)) for _ in range(slots)]
        type_ = type_of(DType.FLOAT64, arrays[0])
        meets = [
            communicator.bind(call("all_reduce", type_, type_, num_ranks=2, by="sum"), (x,), (x,))
            for x in arrays
        ]
        communicator.ready()
        for firing in range(25):
            own = arrays[firing % slots]
            own[...] = firing + 100 * communicator.rank
            meets[firing % slots]()
            assert (own == 2 * firing + 100).all()

    together((2,), do)


def test_ten_thousand_meetings_keep_step(together):
    """Small and large ones in turn: places aside are used again, and lines are read late."""

    def do(communicator):
        bound = []
        for order, size in enumerate((1, 4097, 70)):
            array = placed(communicator, np.zeros(size, np.int64))
            type_ = type_of(DType.INT64, array)
            asked = call("all_reduce", type_, type_, order, num_ranks=3, by="sum")
            bound.append((array, communicator.bind(asked, (array,), (array,))))
        communicator.ready()
        for firing in range(3334):
            for order, (array, meet) in enumerate(bound):
                array[...] = firing * (communicator.rank + 1) + order
                meet()
                assert array[0] == array[-1] == 6 * firing + 3 * order

    together((3,), do)


def test_what_cannot_be_met_for_is_refused_when_it_is_bound(together):
    row = TensorType(DType.FLOAT32, (5000,))
    part = TensorType(DType.FLOAT32, (2500,))

    def refused(communicator, asked, given_=None, left=None):
        given_ = np.zeros(asked.reads.shape, np.float32) if given_ is None else given_
        left = np.zeros(asked.makes.shape, np.float32) if left is None else left
        with pytest.raises(DeviceError) as caught:
            communicator.bind(asked, (given_,), (left,))
        return str(caught.value)

    def do(communicator):
        own = {"num_ranks": 1, "by": "sum"}
        assert "in shared memory" in refused(communicator, call("all_reduce", row, row, **own))
        asked = call("all_reduce", row, row, num_ranks=7, by="sum")
        assert "is for 7 ranks; the mesh of data=1 has 1" in refused(communicator, asked)
        asked = call("all_reduce", row, row, num_ranks=1, by="product")
        assert "cannot reduce by 'product'" in refused(communicator, asked)
        asked = call("all_reduce", row, row, num_ranks=1, group="rows", by="sum")
        assert "a group 'rows'; the mesh of data=1 has 'data'" in refused(communicator, asked)
        asked = call("all_gather", part, part, num_ranks=1, axis=0, rows=5000)
        assert "place 0 of 1 has float32[5000]" in refused(communicator, asked)
        asked = call("all_gather", part, part, num_ranks=1, axis=1, rows=5000)
        assert "has no axis 1" in refused(communicator, asked)
        asked = call("sort", part, part, num_ranks=1)
        assert "'sort' moves nothing between ranks here" in refused(communicator, asked)
        shared = placed(communicator, np.zeros((100, 100), np.float32))
        wide = TensorType(DType.FLOAT32, (100, 50))
        asked = call("all_reduce", wide, wide, **own)
        assert "rows that lie one after" in refused(
            communicator, asked, shared[:, ::2], shared[:, ::2]
        )

    together((1,), do)


def test_a_launch_needs_all_ranks_to_be_ready_and_its_transport_open(together):
    def do(communicator):
        array = placed(communicator, np.zeros(3, np.float32))
        type_ = type_of(DType.FLOAT32, array)
        meet = communicator.bind(
            call("all_reduce", type_, type_, num_ranks=1, by="sum"), (array,), (array,)
        )
        with raises(InternalError):
            meet()
        communicator.ready()
        meet()
        communicator.close()
        communicator.close()
        with raises(InternalError):
            meet()

    together((1,), do)


def test_who_looked_in_vain_sleeps_at_once_for_twice_as_many_meetings(together):
    blind = {1: 1, 3: 2, 6: 4, 11: 8}
    """By meeting in which the first rank looks: how many it will not look in after it."""
    states, connected = {}, threading.Event()

    def do(communicator):
        array = placed(communicator, np.zeros(3, np.float32))
        type_ = type_of(DType.FLOAT32, array)
        meet = communicator.bind(
            call("all_reduce", type_, type_, num_ranks=2, by="sum"), (array,), (array,)
        )
        communicator.ready()
        states[communicator.rank] = meet._group.struct
        if communicator.rank == 0:
            connected.set()
        assert connected.wait(60)
        for number in range(1, 12):
            while communicator.rank == 1 and states[0].num_blind < blind.get(number, 0):
                pass  # The first rank still looks: this one comes when it has seen enough.
            meet()

    together((2,), do)
    assert (states[0].num_blind, states[0].next_look) == (8, 20)


def test_a_part_without_elements_needs_no_memory(together):
    """More ranks than columns: large rows, which are exchanged where they lie."""
    whole = np.arange(20_000, dtype=np.float32).reshape(-1, 1)

    def do(communicator):
        start = placed(communicator, cut(whole, 0, 2, communicator.rank))
        left = placed(communicator, np.zeros_like(cut(whole, 1, 2, communicator.rank)))
        attrs = {"axis": 0, "rows": 20_000, "to_axis": 1, "to_rows": left.shape[1]}
        types = type_of(DType.FLOAT32, start), type_of(DType.FLOAT32, left)
        meet = communicator.bind(
            call("all_to_all", *types, num_ranks=2, **attrs), (start,), (left,)
        )
        communicator.ready()
        meet()
        return left

    first, second = together((2,), do)
    assert np.array_equal(first, whole)
    assert second.shape == (20_000, 0)


def test_mappings_keep_no_file_and_end_with_the_last_array(together):
    def files():
        return sum("memfd:actorflow" in target(number) for number in os.listdir("/proc/self/fd"))

    def target(number):
        try:
            return os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # another thread closed it after it was listed
            return ""

    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:actorflow")

    gc.collect()  # mappings of earlier tests must not end meanwhile
    before = mapped()
    seen = []

    def do(communicator):
        array = placed(communicator, np.zeros(9, np.float32))
        type_ = type_of(DType.FLOAT32, array)
        asked = call("all_reduce", type_, type_, num_ranks=2, by="sum")
        meet = communicator.bind(asked, (array,), (array,))
        communicator.ready()
        meet()
        seen.append(mapped())
        together.threads.gather(communicator.rank)(
            "seen", None
        )  # or one would count while one maps
        return files()

    assert together((2,), do) == [0, 0]
    gc.collect()
    assert max(seen) > before
    assert mapped() == before


def test_without_a_descriptor_it_is_said_what_is_missing():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        with raises(DeviceError):
            OwnSegments().allocate("registers", 64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
