"""Random nets over several devices, and the rule that copies between them follow."""

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from compiler.contract.types import DType
from compiler.graph.registry import is_source, view
from compiler.ops.families.activation import GELU
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.shape import BROADCAST_TO, TRANSPOSE
from compiler.ops.primitives.sources import scalar
from compiler.ops.primitives.transfer import COPY_TO


def lies(graph):
    """Return where each value lies; a value of a view lies where what it shows does."""
    places = {}
    for node in graph.nodes:
        if node.op is COPY_TO:
            place = node.attrs["to"]
        elif view.has(node.op):
            place = places[node.inputs[0]]
        else:
            place = node.device
        places |= dict.fromkeys(node.outputs, place)
    return places


def check_edges(graph):
    """Check that nodes read what lies with them, and that no copy is made twice, or for nothing."""
    place = lies(graph)
    copies = Counter()
    for node in graph.nodes:
        if node.op is COPY_TO:
            (value,) = node.inputs
            assert place[value] != node.attrs["to"]
            copies[value, node.attrs["to"]] += 1
        elif not is_source.get(node.op):
            assert {place[v] for v in node.inputs} <= {node.device}, node.op
    assert {*copies.values()} <= {1}
    buckets = [n.attrs["bucket"] for n in graph.nodes if n.op is COPY_TO]
    assert len({*buckets}) == len(buckets)


def check_same(graph, after, feeds, evaluate):
    for got, expected in zip(evaluate(after, feeds), evaluate(graph, feeds), strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)


LAYERS = st.lists(
    st.tuples(
        st.sampled_from(("product", "gelu", "residual", "scale", "turn", "bias", "reuse")),
        st.integers(0, 2),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
)


def layer(net, kind, earlier, weights, pick):
    """Emit one layer on the device of the builder; all values are [4, 4]."""
    b, h = net.b, earlier[-1]
    if kind == "product":
        weights.append(net.variable(4, 4, dtype="float32"))
        return b.emit_one(MATMUL, h, weights[-1])
    if kind == "gelu":
        return b.emit_one(GELU, h)
    if kind == "residual":
        return b.emit_one(ADD, h, earlier[pick % len(earlier)])
    if kind == "scale":
        return b.emit_one(
            MUL, h, b.emit_one(BROADCAST_TO, scalar(b, 0.5, DType.FLOAT32), shape=(4, 4))
        )
    if kind == "turn":
        return b.emit_one(TRANSPOSE, h, perm=(1, 0))
    if kind == "bias":
        weights.append(net.variable(4, dtype="float32"))
        return b.emit_one(ADD, h, b.emit_one(BROADCAST_TO, weights[-1], shape=(4, 4)))
    to = pick % 3
    return b.emit_one(COPY_TO, h, to=to, bucket=0)
