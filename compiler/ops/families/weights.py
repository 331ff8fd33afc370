"""Means by weight: `weighted_mean`, and which values have the weight of one.

The mean over what counts in a batch, labels or rows that are no padding, is a sum divided by a
weight. The mean of several such means is the mean over all that counts if each has its weight: so a
step of several batches weighs their gradients (`compiler.passes.autodiff`), and whoever reads
outputs of several batches weighs these, for which `with_weights` adds the weights to the outputs.

A value that is computed from one weighted mean, such as a loss with a penalty, has its weight. Of
several batches it is then the mean by weight of what each of them computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.contract.errors import CompileError
from compiler.contract.statistic import MEAN, Statistic, is_statistic
from compiler.contract.types import ValueId
from compiler.graph.graph import Graph, Output, mark_needed
from compiler.ops.language.define import fused_op
from compiler.ops.language.expressions import Expression


def _weighted_mean(total: Expression, weight: Expression, *, count: int) -> Expression:
    return total / (weight == 0).where(1, weight)


WEIGHTED_MEAN = fused_op("weighted_mean", "total, weight -> y", _weighted_mean)
"""total / weight, and total where the weight is 0: there it is 0, as nothing counts.

Attrs: count, the number of elements that the weight is the sum of: what it is where all count.
"""


@dataclass(frozen=True, slots=True)
class BatchWeight:
    """By what a batch counts among others: a float scalar, and the number it is a share of."""

    value: ValueId
    count: int


def weight_of(graph: Graph, value: ValueId) -> BatchWeight | None:
    """Return the weight of a value, None for one that follows from no weighted mean. O(nodes).

    Raises CompileError, with both lines, where it follows from two that are of different weights.
    """
    means = {node.outputs[0]: node for node in graph.nodes if node.op is WEIGHTED_MEAN}
    if not means:
        return None
    is_needed = mark_needed(graph, [value], ends_at=(WEIGHTED_MEAN,))
    pairs = zip(graph.nodes, is_needed, strict=True)
    read = [value, *[v for node, needed in pairs if needed for v in node.inputs]]
    sources = [means[v] for v in dict.fromkeys(read) if v in means]
    if not sources:
        return None
    first, *others = sources
    for other in others:
        if not _are_equal(graph, first.inputs[1], other.inputs[1]):
            raise CompileError(
                f"{other.source}: a loss or an output has two means of different weights, this one"
                f" and that of {first.source}, so its mean over batches is of neither; return them"
                ' as two outputs, or give one of the losses reduction="mean"'
            )
    return BatchWeight(first.inputs[1], first.attrs.int_("count"))


def _are_equal(graph: Graph, one: ValueId, other: ValueId) -> bool:
    """Whether two values are computed in the same way, as two traces of one expression are.

    O(nodes): each pair of values is looked at once.
    """
    made_by, todo, seen = graph.producers(), [(one, other)], {(one, other)}
    while todo:
        x, y = todo.pop()
        if x == y:
            continue
        a, b = graph.nodes[made_by[x]], graph.nodes[made_by[y]]
        is_same = (a.op, a.attrs, len(a.inputs)) == (b.op, b.attrs, len(b.inputs))
        if not is_same or a.outputs.index(x) != b.outputs.index(y):
            return False
        pairs = [pair for pair in zip(a.inputs, b.inputs, strict=True) if pair not in seen]
        seen.update(pairs)
        todo += pairs
    return True


def with_weights(graph: Graph) -> Graph:
    """Return the graph with outputs for the weights of its outputs (`compiler.contract.statistic`).

    Raises CompileError where an output has two weights.
    """
    values = [output for output in graph.outputs if not is_statistic(output.name)]
    weights = [(output, weight_of(graph, output.value)) for output in values]
    added = [Output(Statistic(MEAN, 1, o.name).name, w.value) for o, w in weights if w is not None]
    return replace(graph, outputs=(*graph.outputs, *added)) if added else graph
