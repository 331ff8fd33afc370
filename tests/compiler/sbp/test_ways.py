"""Every signature of every op, held against the op on the whole: cut, run on each rank, combine."""

import numpy as np
import pytest
from rank_graphs import OPS, ROWS, parts_of, run_ranks, types_of, whole_of

from compiler.contract.attrs import Attrs
from compiler.contract.placement import Mesh
from compiler.graph.columns import LocalCall
from compiler.graph.graph import UNKNOWN_SOURCE, GraphBuilder, Node
from compiler.graph.registry import infer_type, reference
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import ALL_REDUCE
from compiler.sbp.local_form import candidate_signatures, emit_part

TOLERANCE = {"float16": 2e-3, "float32": 1e-5}


def all_reduce(b, value, by, axis):
    order = sum(n.op is ALL_REDUCE for n in b.nodes)
    return b.emit_one(
        ALL_REDUCE, value, num_ranks=2, group="ranks", bucket=order, order=order, by=by.value
    )


def check(row, parts, way, rng):
    """Run one way of a call on so many ranks, and compare what they make with the whole."""
    op, attrs = OPS[row.op], Attrs(row.attrs)
    arrays = [np.asarray(x) for x in row.inputs]
    inputs = types_of(arrays)
    outputs = infer_type.get(op)(inputs, attrs)
    node = Node(op, (), (), attrs, "", UNKNOWN_SOURCE)
    words = way.signature
    cut = [parts_of(x, word, parts, rng) for x, word in zip(arrays, words.inputs, strict=True)]
    graphs, feeds, results = [], [], []
    for rank in range(parts):
        b = GraphBuilder()
        own = [part[rank] for part in cut]
        given = tuple([b.emit_one(INPUT, name="x", dtype=x.dtype.name, shape=x.shape) for x in own])
        mesh = Mesh(("ranks",), (parts,))
        call = LocalCall(node, given, inputs, outputs, (words,), mesh, (rank,))
        results.append(emit_part(b, call, [way], all_reduce))
        graphs.append(b.freeze())
        feeds.append(dict(zip(given, own, strict=True)))
    values = run_ranks(graphs, feeds, mesh)
    wanted = reference.get(op)(attrs, *arrays)
    for index, (word, want) in enumerate(zip(words.outputs, wanted, strict=True)):
        own = [v[made[index]] for v, made in zip(values, results, strict=True)]
        near = TOLERANCE.get(np.asarray(want).dtype.name, 1e-9)
        np.testing.assert_allclose(whole_of(own, word), want, rtol=near, atol=near)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_what_ranks_make_of_parts_is_what_one_makes_of_the_whole(name):
    rng = np.random.default_rng(len(name))
    for row in ROWS[name]:
        attrs, inputs = Attrs(row.attrs), types_of(row.inputs)
        outputs = infer_type.get(OPS[name])(inputs, attrs)
        for parts in (2, 3):
            for way in candidate_signatures(OPS[name], inputs, outputs, attrs, parts)[1:]:
                try:
                    check(row, parts, way, rng)
                except AssertionError as error:
                    raise AssertionError(f"{parts} ranks, {way.signature}: {row}") from error
