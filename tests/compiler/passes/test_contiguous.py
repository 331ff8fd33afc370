"""Collectives of parts along any axis, as those of parts along the first one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meetings import cut
from rank_graphs import run_ranks

from actorflow.compile.cuda_target import CudaTarget
from actorflow.compile.targets import HostTarget
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST, Device, DeviceKind, Mesh
from compiler.contract.types import DType
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import Hardware
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    is_collective,
)
from compiler.passes.contiguous import move_parts_first

GPU = Device(DeviceKind.CUDA)
ON_GPU = Hardware((GPU,), (CudaTarget(GPU, "h200"),))
COMMON = {"group": "data", "bucket": 0, "order": 0}


def graph_of(op, array, attrs, dtype=DType.FLOAT32):
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", shape=array.shape, dtype=dtype.value)
    (y,) = b.emit(op, (x,), Attrs(COMMON | attrs))
    b.outputs = [Output("y", y)]
    return b.freeze(), x, y


def collective(op, whole, ranks, rank, axis, to_axis):
    """Return what a rank gives, its attributes, and what it must have then."""
    attrs = {"num_ranks": ranks}
    if op is REDUCE_SCATTER:
        left = cut(whole.sum(0), axis, ranks, rank)
        return whole[rank], attrs | {"axis": axis, "rows": left.shape[axis], "by": "sum"}, left
    start = cut(whole, axis, ranks, rank)
    attrs |= {"axis": axis, "rows": whole.shape[axis]}
    if op is ALL_GATHER:
        return start, attrs, whole
    left = cut(whole, to_axis, ranks, rank)
    return start, attrs | {"to_axis": to_axis, "to_rows": left.shape[to_axis]}, left


def lies_in_one_piece(graph):
    """Whether what each rank gives to or gets from another is a range of its operands."""
    for node in graph.nodes:
        if is_collective(node.op) and node.op is not ALL_REDUCE:
            axis, shape = node.attrs["axis"], graph.types[node.inputs[0]].shape
            if node.op is ALL_TO_ALL:
                rest = (axis, node.attrs["to_axis"], node.attrs["to_rows"])
                if rest != (1, 0, 1) or shape[0] != node.attrs["num_ranks"]:
                    return False
            elif math.prod(shape[:axis]) != 1:
                return False
    return True


@given(
    ranks=st.integers(2, 3),
    op=st.sampled_from([ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL]),
    shape=st.lists(st.integers(3, 7), min_size=2, max_size=4),
    data=st.data(),
)
def test_a_collective_of_any_axis_gives_the_same_values(ranks, op, shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    to_axis = data.draw(st.sampled_from([i for i in range(len(shape)) if i != axis]))
    terms = (ranks, *shape) if op is REDUCE_SCATTER else shape
    whole = np.arange(math.prod(terms), dtype=np.float32).reshape(terms)
    graphs, feeds, wanted = [], [], []
    for rank in range(ranks):
        given_, attrs, left = collective(op, whole, ranks, rank, axis, to_axis)
        graph, x, y = graph_of(op, given_, attrs)
        graphs.append(move_parts_first(graph, ON_GPU))
        feeds.append({x: given_})
        wanted.append(left)
    assert all(map(lies_in_one_piece, graphs))
    for found, left in zip(
        run_ranks(graphs, feeds, Mesh(("data",), (ranks,))), wanted, strict=True
    ):
        np.testing.assert_array_equal(found[y], left)


def test_what_lies_in_one_piece_and_what_the_host_moves_stays_as_it_is():
    rows = np.zeros((1, 4, 3), np.float32)
    whole, _, _ = graph_of(ALL_GATHER, rows, {"num_ranks": 2, "axis": 1, "rows": 8})
    assert move_parts_first(whole, ON_GPU) == whole
    columns, _, _ = graph_of(ALL_GATHER, rows, {"num_ranks": 2, "axis": 2, "rows": 6})
    assert move_parts_first(columns, Hardware((HOST,), (HostTarget(),))) == columns
    assert move_parts_first(columns, ON_GPU) != columns


@pytest.mark.parametrize("op", [ALL_REDUCE, REDUCE_SCATTER])
def test_a_sum_of_what_nccl_has_no_type_for_is_refused(op):
    attrs = {"num_ranks": 2, "by": "sum"} | ({"axis": 0, "rows": 2} if op is REDUCE_SCATTER else {})
    graph, _, _ = graph_of(op, np.zeros((4, 3), np.int16), attrs, DType.INT16)
    with pytest.raises(CompileError, match=rf"{op} of int16\[4, 3\]: GPUs of several ranks reduce"):
        move_parts_first(graph, ON_GPU)
