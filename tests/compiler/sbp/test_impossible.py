"""What a user reads who asks for a layout that cannot be."""

import pytest
from error_texts import raises

from compiler.contract.errors import CompileError
from compiler.contract.placement import AxisLinks, MeshLink
from compiler.contract.sbp import BROADCAST, PARTIAL, Split
from compiler.contract.types import Phase
from compiler.graph.graph import GraphBuilder, Output, SourceLocation
from compiler.ops.families.along import ARGSORT
from compiler.ops.families.arithmetic import EXP
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import TO_SBP
from compiler.sbp.infer import MeshAxis, Speed, choose


def axis(parts):
    return MeshAxis(parts, AxisLinks.alike(MeshLink()), Speed(), "model")


def built(shape, *ops, role=None):
    """Return a graph whose source and ops stand in lines of a user's file, and their values."""
    b, values = GraphBuilder(), []
    with b.at("job", SourceLocation("train.py", 41), Phase.FORWARD, 0):
        attrs = {"name": "x", "dtype": "float32", "shape": shape}
        more = {} if role is None else {"role": role, "init": ()}
        values.append(b.emit_one(INPUT if role is None else VARIABLE, **attrs, **more))
        for op, own in ops:
            values.append(b.emit_one(op, values[-1], **own))
    b.outputs = [Output("y", values[-1])]
    return b.freeze(), values


def refused(graph, fixed, parts, earlier=()):
    with raises(CompileError):
        choose(graph, earlier, axis(parts), fixed)


def test_an_axis_shorter_than_the_ranks_are_many():
    graph, (x,) = built((3, 8))
    refused(graph, {x: Split(0)}, 4)


def test_an_axis_that_another_axis_of_the_mesh_has_cut_short():
    graph, (x,) = built((5, 8), role="parameter")
    outer = choose(graph, (), axis(2), {x: Split(0)})
    refused(graph, {x: Split(0)}, 3, [(2, outer)])


@pytest.mark.parametrize("shape", [(3, 8), (6,), ()])
def test_an_axis_beyond_the_rank(shape):
    graph, (x,) = built(shape)
    refused(graph, {x: Split(2)}, 2)


def test_what_comes_from_outside_is_no_share_of_a_sum():
    graph, (x,) = built((4, 8))
    refused(graph, {x: PARTIAL}, 2)


def test_a_node_that_has_no_such_way_says_which_it_has_and_what_it_reads():
    graph, (x, y) = built((4, 8), (ARGSORT, {"descending": False}))
    refused(graph, {x: BROADCAST, y: Split(1)}, 2)


def test_of_many_ways_some_are_listed():
    graph, (x, y) = built((2,) * 14, (EXP, {}))
    refused(graph, {x: BROADCAST, y: PARTIAL}, 2)


def test_a_layout_by_word_of_the_job_is_refused_by_its_line():
    graph, (_, y) = built((3, 8), (TO_SBP, {"sbp": (("model", Split(0)),)}))
    refused(graph, {y: Split(0)}, 4)
