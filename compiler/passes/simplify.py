"""Simplification: an exact cleanup, attention by the block, scans without unread parts.

`simplify_graph` prunes, folds constants, merges common subexpressions and applies each op's own
algebra. One walk in topological order copies the graph into a fresh builder: a node is replaced by
what its `simplify` column says, folded through its `reference` when the op `is_exact`, all inputs
are constants and the result is small, or merged with an equal node emitted before. Then everything
no root needs is dropped.

Results stay bit-identical: exp, gelu, a sum over an axis and their like are not folded, because
the bits of a kernel that approximates, or adds in another order, are not the reference's. The one
exception is a power with the constant exponent 1 or 2, which becomes x or its square: these are
correctly rounded, and a kernel's pow may be a unit in the last place beside them.

Guarantees of `simplify_graph`: no unused node, no two equal pure nodes on one device and stage, no
foldable node under FOLD_LIMIT_BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from compiler.contract.attrs import Attrs
from compiler.contract.errors import InternalError
from compiler.contract.types import HALVES, DType, TensorType, ValueId, encoded
from compiler.graph.graph import (
    Graph,
    GraphBuilder,
    Node,
    needed_nodes,
    prune,
    simplify,
    sole_readers,
)
from compiler.graph.registry import Op, infer_type, input_output_aliases, is_exact, reference, view
from compiler.ops.families.arithmetic import DIV, MUL
from compiler.ops.families.attention import ATTENTION
from compiler.ops.families.loops import SCAN, ScanParts
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.primitives.body import needed_operands, prune_body
from compiler.ops.primitives.matmul import KEEPS_PRECISION, MATMUL
from compiler.ops.primitives.shape import CAST, cast_to, swap_last_axes
from compiler.ops.primitives.sources import CONSTANT, constant_array

FOLD_LIMIT_BYTES = 1 << 16
"""Larger constants cost more to store and load than to compute."""

_Same = tuple[Op, tuple[ValueId, ...], Attrs, int, int]
"""What two nodes have in common that are one: op, inputs, attributes, device and stage."""

MAX_ROUNDS = 8
"""A rewrite may uncover another; real graphs settle in two or three rounds."""


def simplify_graph(graph: Graph) -> Graph:
    """Return an equivalent graph with fewer nodes. O(nodes) per round."""
    for _ in range(MAX_ROUNDS):
        settled, graph = graph, _walk(graph)
        if len(graph.nodes) == len(settled.nodes) and graph.nodes == settled.nodes:
            break
    return graph


def _walk(graph: Graph) -> Graph:
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    expressions: dict[_Same, tuple[ValueId, ...]] = {}
    for node in needed_nodes(graph):
        inputs = tuple([new_id[v] for v in node.inputs])
        outputs = _replaced(b, node, inputs)
        if outputs is None:
            outputs = _copied(b, node, inputs, [graph.types[v] for v in node.outputs], expressions)
        else:
            _check_types(graph, b, node, outputs)
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return prune(b.freeze_as(graph, new_id))


def _replaced(
    b: GraphBuilder, node: Node, inputs: tuple[ValueId, ...]
) -> tuple[ValueId, ...] | None:
    """Return what stands for the outputs of a node by its op's algebra or by folding, or None."""
    if simplify.has(node.op):
        with b.like_node(node):
            replaced = simplify.get(node.op)(b, node, inputs)
        if replaced is not None:
            return replaced
    if not inputs:
        return None
    # Almost always the first operand settles it, so that no list of all is made.
    for value in inputs:
        if b.producer_of(value).op is not CONSTANT:
            return None
    with b.like_node(node):
        return _fold(b, node, inputs)


def _copied(
    b: GraphBuilder,
    node: Node,
    inputs: tuple[ValueId, ...],
    types: list[TensorType],
    seen: dict[_Same, tuple[ValueId, ...]],
) -> tuple[ValueId, ...]:
    """Copy a node, or find the equal one that was copied before."""
    if node.writes:
        return b.copy(node, inputs, types)
    key = (node.op, inputs, node.attrs, node.device, node.stage)
    outputs = seen.get(key)
    if outputs is None:
        outputs = seen[key] = b.copy(node, inputs, types)
    return outputs


def _check_types(graph: Graph, b: GraphBuilder, node: Node, outputs: tuple[ValueId, ...]) -> None:
    for old, new in zip(node.outputs, outputs, strict=True):
        if b.types[new] != graph.types[old]:
            raise InternalError(
                f"{node.source}: {node.op} makes {graph.types[old]}, but what its simplify column"
                f" puts in its place makes {b.types[new]}"
            )


def _fold(b: GraphBuilder, node: Node, inputs: tuple[ValueId, ...]) -> tuple[ValueId, ...] | None:
    """Evaluate a node of constants. Views stay views: a broadcast constant costs no bytes."""
    if not is_exact.get(node.op) or view.has(node.op) or input_output_aliases.get(node.op):
        return None
    if not reference.has(node.op):
        return None
    arrays = [constant_array(b.producer_of(v)) for v in inputs]
    with np.errstate(all="ignore"):
        results = [np.asarray(r) for r in reference.get(node.op)(node.attrs, *arrays)]
    if sum(r.nbytes for r in results) > FOLD_LIMIT_BYTES:
        return None
    types = infer_type.get(node.op)(tuple([b.type_of(v) for v in inputs]), node.attrs)
    return tuple(
        b.emit_one(CONSTANT, dtype=t.dtype.value, shape=t.shape, data=encoded(r, t.dtype))
        for r, t in zip(results, types, strict=True)
    )


# Let a softmax between two products compute its scores block by block.
#
#     softmax(q @ kT, scale, causal) @ v  ->  attention(q, k, v, scale, causal)
#
# with a product with a positive constant, or a quotient by one, before the softmax taken into the
# scale. Only scores and probabilities that nothing else reads are replaced: where a job returns
# them, or drops some of them out, they have to exist. Operands with other leading axes than each
# other's are left alone, too: one key for all heads is one large product as it is.
#
# Functions compute 16-bit floats in float32, and attention does so inside: where operands are cast
# up and the result down again, the new op reads the operands, and makes the result, as they were.
#
# Runs before autodiff, so that the gradient is of the new op, and in every job: what a plan may
# spend on memory never changes its results.
#
# Guarantees: no softmax is left that only a product reads, as its left operand, and that reads only
# a product of equal leading axes; scope and source of the new node are those of the softmax.


@dataclass(frozen=True, slots=True)
class _Scores:
    """Where attention gets its scores from: operands, scale, and the nodes that go with them."""

    q: ValueId
    k_swapped: ValueId
    scale: float
    softmax: Node
    nodes: tuple[int, ...]
    low: DType | None
    """The type of 16 bits that the result is rounded to, if it is read so alone."""
    keeps_precision: bool = False
    """Whether one of the two products is to be in float32."""


def fuse_attention(graph: Graph) -> Graph:
    """Return the graph with attention in place of products around a softmax. O(nodes)."""
    matches = _find(graph)
    if not matches:
        return graph
    dropped = {index for scores in matches.values() for index in scores.nodes}
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        if index in dropped:
            continue
        scores = matches.get(index)
        if scores is None:
            inputs = tuple([new_id[v] for v in node.inputs])
            outputs = b.copy(node, inputs, [graph.types[v] for v in node.outputs])
        else:
            outputs = _emit(b, scores, new_id, new_id[node.inputs[1]])
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return b.freeze_as(graph, new_id)


def _find(graph: Graph) -> dict[int, _Scores]:
    """Return, by the index of the product with v, the scores whose probabilities it alone reads."""
    if not any([node.op is SOFTMAX for node in graph.nodes]):
        return {}
    producers, readers = graph.producers(), sole_readers(graph)
    is_kept = [reader < 0 for reader in readers]
    matches: dict[int, _Scores] = {}
    for index, node in enumerate(graph.nodes):
        if node.op is not MATMUL or is_kept[node.inputs[0]]:
            continue
        p, v = node.inputs
        made_by = producers[p]
        if graph.nodes[made_by].op is SOFTMAX and p != v and _is_same_batch(graph, p, v):
            scores = _trace_back(graph, made_by, producers, is_kept)
            # One launch runs on one device and stage, and each of these where the user put it.
            if scores is not None and _is_in_one_place(graph, (index, *scores.nodes)):
                reader = readers[node.outputs[0]]
                is_kept_wide = any(
                    [graph.nodes[i].attrs.get(KEEPS_PRECISION) for i in (index, *scores.nodes)]
                )
                low = _rounded_to(graph, reader)
                matches[index] = replace(scores, low=low, keeps_precision=is_kept_wide)
    return matches


def _rounded_to(graph: Graph, reader: int) -> DType | None:
    """Return the type of 16 bits that a value's only reader rounds it to, or None."""
    if reader < 0 or graph.nodes[reader].op is not CAST:
        return None
    dtype = graph.types[graph.nodes[reader].outputs[0]].dtype
    return dtype if dtype in HALVES else None


def _trace_back(
    graph: Graph, softmax: int, producers: tuple[int, ...], is_kept: list[bool]
) -> _Scores | None:
    """Walk from the softmax back to the product of q and kT, past a constant factor."""
    node = graph.nodes[softmax]
    value, scale = node.inputs[0], node.attrs.float_("scale")
    passed = [softmax]
    while not is_kept[value]:
        passed.append(producers[value])
        producer = graph.nodes[passed[-1]]
        if producer.op is MATMUL:
            q, k_swapped = producer.inputs
            if not _is_same_batch(graph, q, k_swapped) or graph.types[value].shape[-1] == 0:
                return None
            return _Scores(q, k_swapped, scale, node, tuple(passed), None)
        factored = _without_factor(graph, producer, producers)
        if factored is None:
            return None
        value, scale = factored[0], scale * factored[1]
        if not 0.0 < scale < np.inf:
            return None
    return None


def _without_factor(
    graph: Graph, node: Node, producers: tuple[int, ...]
) -> tuple[ValueId, float] | None:
    """Return x and c of a node x * c, c * x or x / (1/c) with a constant c of one element."""
    if node.op not in (MUL, DIV):
        return None
    pairs = ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0]))
    for x, factor in pairs if node.op is MUL else pairs[:1]:
        source = graph.nodes[producers[factor]]
        is_one = graph.types[factor].num_elements == 1
        if source.op is CONSTANT and is_one and graph.types[x] == graph.types[node.outputs[0]]:
            number = float(constant_array(source).reshape(()))
            if number > 0:
                return x, number if node.op is MUL else 1.0 / number
    return None


def _is_in_one_place(graph: Graph, nodes: tuple[int, ...]) -> bool:
    return len({(graph.nodes[index].device, graph.nodes[index].stage) for index in nodes}) == 1


def _is_same_batch(graph: Graph, a: ValueId, b: ValueId) -> bool:
    return graph.types[a].shape[:-2] == graph.types[b].shape[:-2]


def _emit(
    b: GraphBuilder, scores: _Scores, new_id: list[ValueId], v: ValueId
) -> tuple[ValueId, ...]:
    """Emit attention and return y, the one output that the product had."""
    node = scores.softmax
    attrs = {"scale": scores.scale, "causal": node.attrs.bool_("causal")}
    attrs |= {KEEPS_PRECISION: True} if scores.keeps_precision else {}
    with b.like_node(node):
        k = swap_last_axes(b, new_id[scores.k_swapped])
        operands = (new_id[scores.q], k, v)
        low = tuple([_before_cast(b, x) for x in operands])
        is_low = all([b.type_of(x).dtype is scores.low for x in low])
        y, *_ = b.emit(ATTENTION, low if is_low else operands, attrs)
        return (cast_to(b, y, b.type_of(operands[0]).dtype),)


def _before_cast(b: GraphBuilder, value: ValueId) -> ValueId:
    node = b.producer_of(value)
    return node.inputs[0] if node.op is CAST else value


# Leave out of scans what nobody reads: ys, carries, and operands that served those only.
#
# A gradient computes what might be asked for, and a user stacks what she may not use. A carry stays
# where it is read after the last step, or where another result that stays depends on it. Of equal
# ys one is read for all: the gradient of a sum is that of each of its parts.
#
# Guarantees: every y of a scan is read, and every operand but carries by its body.


def narrow_bodies(graph: Graph) -> Graph:
    """Return the graph with narrower scans. O(nodes), and those of the bodies per carry."""
    if not any([node.op is SCAN for node in graph.nodes]):
        return graph
    graph = _reading_one(graph)
    needed: set[ValueId] = set(graph.roots())
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not any([v in needed for v in node.outputs]):
            continue
        if node.op is SCAN:
            node = _narrowed(node, needed)
        nodes.append(node)
        needed.update(node.inputs)
    return prune(replace(graph, nodes=tuple(nodes[::-1])))


def _reading_one(graph: Graph) -> Graph:
    """Return the graph with the first of several equal ys read in place of the others."""
    firsts: dict[ValueId, ValueId] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if any([v in firsts for v in node.inputs]):
            node = replace(node, inputs=tuple([firsts.get(v, v) for v in node.inputs]))
        nodes.append(node)
        if node.op is SCAN:
            cut, first_of = ScanParts.of(node.attrs), dict[ValueId, ValueId]()
            outputs = simplify_graph(cut.body.graph).outputs  # equal ones are one value there
            for output, value in list(zip(outputs, node.outputs, strict=True))[cut.carries :]:
                if first_of.setdefault(output.value, value) != value:
                    firsts[value] = first_of[output.value]
    return replace(graph, nodes=tuple(nodes))


def _narrowed(node: Node, needed: set[ValueId]) -> Node:
    """Return a scan without the results that are not needed, and what these alone read."""
    cut = ScanParts.of(node.attrs)
    results = [i for i, value in enumerate(node.outputs) if value in needed]
    while True:
        read = needed_operands(cut.body, results)
        more = [i for i in read if i < cut.carries and i not in results]
        if not more:
            break
        results = sorted([*results, *more])
    operands = sorted(read | {i for i in results if i < cut.carries})
    if len(operands) == len(node.inputs) and len(results) == len(node.outputs):
        return node
    attrs = {
        **node.attrs,
        "body": prune_body(cut.body, operands, results),
        "carries": sum([i < cut.carries for i in operands]),
        "xs": sum([cut.carries <= i < cut.first_constant for i in operands]),
    }
    return replace(
        node,
        inputs=tuple([node.inputs[i] for i in operands]),
        outputs=tuple([node.outputs[i] for i in results]),
        attrs=Attrs(attrs),
    )
