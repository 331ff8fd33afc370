"""Let a cross entropy on top of a linear layer compute the logits by the chunk.

    cross_entropy(x @ weight.T + bias, labels)  ->  linear_cross_entropy(x, weight, bias, labels)

with any reshapes in between that keep the classes the last axis, such as [rows, classes] to [batch,
tokens, classes] and back. Only logits that nothing else reads are replaced: where a job returns
them, or an accuracy from them, they have to exist. Small logits are left alone.

Runs before autodiff, so that the gradient is of the new op, and in every job: what a plan may spend
on memory never changes its results.

Guarantees: of logits above the limit, those that only a cross entropy reads are gone; scope and
source of the new node are those of the cross entropy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compiler.graph import Graph, GraphBuilder, Node, consumers
from compiler.ops.binary import ADD
from compiler.ops.linear_loss import LINEAR_CROSS_ENTROPY
from compiler.ops.loss import CROSS_ENTROPY
from compiler.ops.matmul import MATMUL
from compiler.ops.shape import RESHAPE, reshape_to, swap_last_axes
from compiler.types import TensorType, ValueId

MIN_LOGITS_BYTES = 8 << 20
"""Logits up to here stay: they fit into a cache, and other tensors set the peak."""

CHUNK_ROWS = 512
"""Rows of a chunk, if their bytes allow: each chunk reads the weight twice and its gradient once.

Against the unfused graph, all rows at once take 0.94 of its time, 512 rows 0.98, 256 rows 1.03, 128
rows 1.13, 64 rows 1.27 (one thread, 2,048 rows of width 384, 8,192 classes).
"""

LEAST_CHUNK_BYTES = 4 << 20
"""Bytes of a chunk at least, so that its calls cost nothing beside its work."""

MOST_CHUNK_BYTES = 48 << 20
"""Bytes of a chunk at most, so that all scratch stays below 64 MiB with 50,257 classes.

These have 250 rows then: 1.03 of the time of the unfused graph (128 rows 1.12, 192 rows 1.06).
"""


@dataclass(frozen=True, slots=True)
class _Linear:
    """The layer that makes logits: its operands, and the nodes that go with the logits."""

    x: ValueId
    weight: ValueId
    bias: ValueId | None
    nodes: tuple[int, ...]


def run(
    graph: Graph, min_logits_bytes: int = MIN_LOGITS_BYTES, chunk_rows: int | None = None
) -> Graph:
    """Return the graph with linear_cross_entropy in place of large logits. O(nodes).

    `chunk_rows` is chosen from the extents when it is None.
    """
    layers = _find_layers(graph, min_logits_bytes)
    if not layers:
        return graph
    dropped = {index for layer in layers.values() for index in layer.nodes}
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        if index in dropped:
            continue
        with b.at(node.scope, node.source):
            if index in layers:
                logits = graph.types[node.inputs[0]]
                rows = chunk_rows or choose_chunk_rows(logits)
                outputs = _emit(b, layers[index], new_id, new_id[node.inputs[1]], rows)
            else:
                outputs = b.emit(node.op, [new_id[v] for v in node.inputs], node.attrs)
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return b.freeze_as(graph, new_id)


def choose_chunk_rows(logits: TensorType) -> int:
    """Return how many rows of logits exist at a time; the chunks are as even as can be."""
    rows, classes = logits.shape
    row_bytes = classes * logits.dtype.itemsize
    wanted = max(CHUNK_ROWS, LEAST_CHUNK_BYTES // row_bytes)
    most = max(1, min(wanted, MOST_CHUNK_BYTES // row_bytes))
    num_chunks = -(-rows // most)
    return -(-rows // num_chunks)


def _find_layers(graph: Graph, min_logits_bytes: int) -> dict[int, _Linear]:
    """Return, by the index of a cross entropy, the layer whose logits it alone reads."""
    large = [
        index
        for index, node in enumerate(graph.nodes)
        if node.op is CROSS_ENTROPY and graph.types[node.inputs[0]].size_bytes > min_logits_bytes
    ]
    if not large:
        return {}
    producers, readers = graph.producers(), consumers(graph)
    is_shared = [len(nodes) > 1 for nodes in readers]
    for value in graph.roots():
        is_shared[value] = True
    found = {i: _trace_back(graph, graph.nodes[i], producers, is_shared) for i in large}
    return {index: layer for index, layer in found.items() if layer is not None}


def _trace_back(
    graph: Graph, node: Node, producers: tuple[int, ...], is_shared: list[bool]
) -> _Linear | None:
    """Walk from the logits back to their product; each value on the way has the same rows."""
    value = node.inputs[0]
    classes = graph.types[value].shape[-1:]
    bias: ValueId | None = None
    passed: list[int] = []
    while not is_shared[value] and graph.types[value].shape[-1:] == classes:
        passed.append(producers[value])
        producer = graph.nodes[passed[-1]]
        if producer.op is MATMUL:
            x, weight = producer.inputs
            is_linear = graph.types[weight].rank == 2
            return _Linear(x, weight, bias, tuple(passed)) if is_linear else None
        if producer.op is RESHAPE:
            value = producer.inputs[0]
            continue
        added = _added_row(graph, producer) if producer.op is ADD and bias is None else None
        if added is None:
            return None
        value, bias = added
    return None


def _added_row(graph: Graph, node: Node) -> tuple[ValueId, ValueId] | None:
    """Return the operands of an addition as (rows, vector that is added to each row)."""
    a, b = node.inputs
    result = graph.types[node.outputs[0]]
    for rows, vector in ((a, b), (b, a)):
        if result.rank > 1 and graph.types[vector].shape == result.shape[-1:]:
            return rows, vector
    return None


def _emit(
    b: GraphBuilder, layer: _Linear, new_id: list[ValueId], labels: ValueId, chunk_rows: int
) -> tuple[ValueId, ...]:
    x = new_id[layer.x]
    *leading, width = b.type_of(x).shape
    x = reshape_to(b, x, (math.prod(leading), width))
    weight = swap_last_axes(b, new_id[layer.weight])
    bias = () if layer.bias is None else (new_id[layer.bias],)
    return b.emit(LINEAR_CROSS_ENTROPY, (x, weight, *bias, labels), {"chunk_rows": chunk_rows})
