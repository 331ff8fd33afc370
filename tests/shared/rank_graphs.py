"""Graphs of many ranks in one process: cut tensors, run all ranks in step, put parts together.

Numpy and the references of ops alone; a collective is done when every rank has come to it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from op_table import ROWS_OF_OPS

import compiler.ops.families.embedding  # registers an op of the table
import compiler.pipeline.standard_ops  # noqa: F401
from compiler.contract.sbp import Partial, ReduceOp, Split, local_slices, shard_range, shard_slices
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import all_ops, infer_type, is_comm, reference
from compiler.ops.primitives.sources import (
    CONSTANT,
    INPUT,
    NUMBERS,
    VARIABLE,
    constant_array,
    declared_part,
)
from compiler.ops.primitives.transfer import OVER_STAGES, RECEIVE, SEND

OPS = {op.name: op for op in all_ops()}
ROWS = defaultdict(list)
for _row in ROWS_OF_OPS:
    ROWS[_row.op].append(_row)

JOINED = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}


def types_of(arrays):
    """Return the types of arrays."""
    return tuple([TensorType(DType(a.dtype.name), a.shape) for a in map(np.asarray, arrays)])


def parts_of(array, word, parts, rng):
    """Return what each rank has of a tensor along one axis of a mesh."""
    if isinstance(word, Split):
        shape = array.shape
        return [array[local_slices(shape, (word,), (parts,), (i,))].copy() for i in range(parts)]
    if not isinstance(word, Partial):
        return [array] * parts
    if word.by is not ReduceOp.SUM:
        holder, away = [rng.integers(0, n, array.shape) for n in (parts, 3)]
        away = (away if word.by is ReduceOp.MIN else -away).astype(array.dtype)
        return [np.where(holder == i, array, array + away) for i in range(parts)]
    is_float = array.dtype.kind == "f"
    draw = rng.standard_normal if is_float else lambda shape: rng.integers(-3, 4, shape)
    others = [np.asarray(draw(array.shape)).astype(array.dtype) for _ in range(parts - 1)]
    return [*others, np.asarray(array - sum(others))]


def whole_of(parts, word):
    """Return the tensor of its parts; equal parts must be equal to the bit."""
    if isinstance(word, Split):
        return np.concatenate(parts, word.axis)
    if isinstance(word, Partial):
        return JOINED[word.by].reduce(parts, dtype=np.asarray(parts[0]).dtype)
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0])
    return parts[0]


def run_ranks(graphs, feeds, mesh):
    """Return the values of every rank's graph, by rank; `feeds` are those of its sources."""
    values = [dict(rank_values) for rank_values in feeds]
    for rank, (graph, rank_values) in enumerate(zip(graphs, values, strict=True)):
        rank_values.update(numbers_of(graph, mesh, rank))
    walks = [_walk(graph, rank_values) for graph, rank_values in zip(graphs, values, strict=True)]
    waiting, mail = [next(walk) for walk in walks], {}
    while any(x is not None for x in waiting):
        news = _done(waiting, mesh, mail)
        assert news, "the ranks wait for each other"
        for rank, new in news.items():
            waiting[rank] = walks[rank].send(new)
    assert not mail, "a tensor was sent that nobody received"
    return values


def numbers_of(graph, mesh, rank):
    """Return the values of variables that hold a rank's numbers of rows."""
    numbers = {}
    for node in graph.nodes:
        if node.op is VARIABLE and node.attrs["role"] == NUMBERS:
            rows = shard_slices(declared_part(node.attrs), mesh, rank)[0]
            numbers[node.outputs[0]] = np.arange(rows.start, rows.stop)
    return numbers


def _done(waiting, mesh, mail):
    """Return what comes of the transfers that can be done now, by rank."""
    news = {}
    for rank, (node, *operands) in [(r, w) for r, w in enumerate(waiting) if w is not None]:
        group = mesh.group(rank, mesh.axis(node.attrs["group"]))
        peer, order = group[node.attrs.get("peer", 0)], node.attrs["order"]
        if node.op is SEND:
            assert (rank, peer, order) not in mail
            mail[rank, peer, order], news[rank] = operands[0], np.zeros(0, np.uint8)
        elif node.op is RECEIVE:
            if (peer, rank, order) in mail:
                news[rank] = mail.pop((peer, rank, order))
                assert types_of([news[rank]]) == infer_type.get(RECEIVE)((), node.attrs)
        elif all(waiting[other] is not None for other in group):
            at = {(waiting[r][0].op, waiting[r][0].attrs["order"]) for r in group}
            if len(at) == 1:
                news[rank] = _met(waiting, rank, mesh)
    return news


def _walk(graph, values):
    """Run a graph; yield every collective with its operand, and be sent its result."""
    for node in graph.nodes:
        if node.op in (INPUT, VARIABLE):
            continue
        operands = [values[v] for v in node.inputs]
        if is_comm.get(node.op) and node.op is not OVER_STAGES:
            values[node.outputs[0]] = yield node, *operands
            continue
        outputs = (constant_array(node),) if node.op is CONSTANT else None
        outputs = outputs or reference.get(node.op)(node.attrs, *operands)
        values.update(zip(node.outputs, map(np.asarray, outputs), strict=True))
    yield None


def _met(waiting, rank, mesh):
    """Return what a collective makes on a rank."""
    node = waiting[rank][0]
    group = mesh.group(rank, mesh.axis(node.attrs["group"]))
    parts, index = [waiting[other][1] for other in group], group.index(rank)
    if "by" in node.attrs:
        total = whole_of(parts, Partial(ReduceOp(node.attrs["by"])))
        cut = node.attrs.get("axis")
    else:
        total, cut = np.concatenate(parts, node.attrs["axis"]), node.attrs.get("to_axis")
    if cut is None:
        return total
    rows = shard_range(total.shape[cut], len(group), index)
    return np.take(total, np.arange(rows.start, rows.stop), cut)
