"""Let attention read heads where a projection left them, and write them where the next one reads.

    x [B, T, 3 H D] -> cut, reordered -> q, k, v [B, H, T, D] -> attention(q, k, v)
    ->  packed_attention(x as [B, T, 3, H, D]) -> [B, T, H, D], seen as [B, H, T, D]

However a model writes the cut (split, slices, transposes, reshapes, in any order), what counts is
where the elements of q, k and v lie in x; so the layouts that the views would have are compared.
The way back of a model, transpose and reshape, is then a view as well. Other readers of the parts
keep what they read.

Runs before autodiff, so that the gradient of x is written as one tensor.

Guarantees: no attention is left whose operands lie in one value as [B, T, 3, H, D]; scope and
source of the new nodes are those of the attention.
"""

from __future__ import annotations

from compiler.graph import Graph, GraphBuilder, Node
from compiler.lowering.storage import dense_layout
from compiler.ops.attention import ATTENTION
from compiler.ops.packed_attention import PACKED_ATTENTION
from compiler.ops.shape import RESHAPE, TRANSPOSE, reshape_to
from compiler.ops.slicing import SLICE
from compiler.ops.split import SPLIT
from compiler.registry import Layout, view
from compiler.types import TensorType, ValueId

_VIEWS = (RESHAPE, TRANSPOSE, SLICE)
"""What is followed; not stop_gradient, where nothing flows back."""


def run(graph: Graph) -> Graph:
    """Return the graph with packed attention where operands lie as one projection made them."""
    found = _find(graph)
    if not found:
        return graph
    b = GraphBuilder()
    new_id: list[ValueId] = [ValueId(-1)] * len(graph.types)
    for index, node in enumerate(graph.nodes):
        with b.at(node.scope, node.source):
            if index in found:
                outputs = _emit(b, node, new_id[found[index]], graph.types[node.inputs[0]])
            else:
                outputs = b.emit(node.op, [new_id[v] for v in node.inputs], node.attrs)
        for old, new in zip(node.outputs, outputs, strict=True):
            new_id[old] = new
    return b.freeze_as(graph, new_id)


def _find(graph: Graph) -> dict[int, ValueId]:
    """Return, by the index of an attention node, the value that holds q, k and v."""
    attentions = [i for i, node in enumerate(graph.nodes) if node.op is ATTENTION]
    if not attentions:
        return {}
    producers = graph.producers()
    found: dict[int, ValueId] = {}
    for index in attentions:
        q, k, v = graph.nodes[index].inputs
        if graph.types[q] == graph.types[k] == graph.types[v] and graph.types[q].rank == 4:
            ways = [_way_to(graph, producers, value) for value in (q, k, v)]
            for whole, _ in ways[0]:
                if _is_packed(graph, whole, ways, graph.types[q]):
                    found[index] = whole
                    break
    return found


Way = list[tuple[ValueId, tuple[Node, ...]]]
"""The values a value is cut from, the farthest first, each with the nodes from there to it."""


def _way_to(graph: Graph, producers: tuple[int, ...], value: ValueId) -> Way:
    way: Way = [(value, ())]
    while True:
        value, nodes = way[0]
        node = graph.nodes[producers[value]]
        if node.op is not SPLIT and node.op not in _VIEWS:
            return way
        way.insert(0, (node.inputs[0], (node, *nodes)))


def _is_packed(graph: Graph, whole: ValueId, ways: list[Way], one: TensorType) -> bool:
    """Whether the ends of the ways lie in `whole` as q, k and v of [B, T, 3, H, D]."""
    _, heads, rows, width = one.shape
    item = one.dtype.itemsize
    if graph.types[whole].num_elements != 3 * one.num_elements or not one.num_elements:
        return False
    row = 3 * heads * width * item
    strides = (rows * row, width * item, row, item)
    for place, way in enumerate(ways):
        layout = _layout_in(graph, whole, way)
        if layout is None or layout.offset_bytes != place * heads * width * item:
            return False
        for extent, expected, step in zip(one.shape, strides, layout.strides_bytes, strict=True):
            if extent > 1 and step != expected:
                return False
    return True


def _layout_in(graph: Graph, whole: ValueId, way: Way) -> Layout | None:
    """Return where the end of a way lies in a dense value on it; None where elements would move."""
    nodes = dict(way).get(whole)
    if nodes is None:
        return None
    layout: Layout | None = dense_layout(graph.types[whole])
    values = [value for value, path in way if len(path) < len(nodes)]
    for node, value in zip(nodes, values, strict=True):
        if layout is None:
            return None
        source = graph.types[node.inputs[0]]
        if node.op is SPLIT:
            layout = _part(layout, node, value, graph.types[value])
        else:
            layout = view.get(node.op)(source, layout, graph.types[value], node.attrs)
    return layout


def _part(layout: Layout, split: Node, value: ValueId, part: TensorType) -> Layout:
    axis = split.attrs.int_("axis")
    start = split.outputs.index(value) * part.shape[axis]
    return Layout(layout.offset_bytes + start * layout.strides_bytes[axis], layout.strides_bytes)


def _emit(b: GraphBuilder, node: Node, whole: ValueId, one: TensorType) -> tuple[ValueId, ...]:
    """Emit packed attention and return y as [B, H, T, D], and lse."""
    batch, heads, rows, width = one.shape
    qkv = reshape_to(b, whole, (batch, rows, 3, heads, width))
    y, lse = b.emit(PACKED_ATTENTION, (qkv,), node.attrs)
    return b.one(TRANSPOSE, y, perm=(0, 2, 1, 3)), lse
