"""What a user reads who asks for a layout that cannot be."""

import pytest

from compiler.contract.errors import CompileError
from compiler.contract.placement import MeshLink
from compiler.contract.sbp import BROADCAST, PARTIAL, Split
from compiler.contract.types import Phase
from compiler.graph.graph import GraphBuilder, Output, SourceLocation
from compiler.ops.families.along import ARGSORT
from compiler.ops.families.arithmetic import EXP
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import TO_SBP
from compiler.sbp.infer import MeshAxis, Speed, choose


def axis(parts):
    return MeshAxis(parts, MeshLink(), Speed(), "model")


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


def said(graph, fixed, parts, earlier=()):
    with pytest.raises(CompileError) as caught:
        choose(graph, earlier, axis(parts), fixed)
    return str(caught.value)


def test_an_axis_shorter_than_the_ranks_are_many():
    graph, (x,) = built((3, 8))
    assert said(graph, {x: Split(0)}, 4) == (
        "train.py:41: batch['x'] cannot lie as S(0) along the axis 'model' of the mesh, of 4"
        " ranks: it is float32[3, 8], whose axis 0 has extent 3, less than there are ranks; split"
        " a longer axis, lay it out whole (B), or take 3 along this one"
    )


def test_an_axis_that_another_axis_of_the_mesh_has_cut_short():
    graph, (x,) = built((5, 8), role="parameter")
    outer = choose(graph, (), axis(2), {x: Split(0)})
    text = said(graph, {x: Split(0)}, 3, [(2, outer)])
    assert "parameter 'x' cannot lie as S(0)" in text
    assert "axis 0 has extent 5 (2 where other axes of the mesh split it, too), less" in text
    assert text.endswith("or take 2 along this one")


@pytest.mark.parametrize(
    ("shape", "has"), [((3, 8), "axes 0..1"), ((6,), "axis 0 alone"), ((), "no axes")]
)
def test_an_axis_beyond_the_rank(shape, has):
    graph, (x,) = built(shape)
    text = said(graph, {x: Split(2)}, 2)
    assert f"which has {has}; split one that there is, or lay it out whole (B)" in text


def test_what_comes_from_outside_is_no_share_of_a_sum():
    graph, (x,) = built((4, 8))
    assert "whole or in slices; lay it out as a whole" in said(graph, {x: PARTIAL}, 2)


def test_a_node_that_has_no_such_way_says_which_it_has_and_what_it_reads():
    graph, (x, y) = built((4, 8), (ARGSORT, {"descending": False}))
    assert said(graph, {x: BROADCAST, y: Split(1)}, 2) == (
        "train.py:41: argsort cannot make int64[4, 8] as S(1) along the axis 'model' of the mesh,"
        " of 2 ranks. It reads batch['x'] as B. It can: B -> B; S(0) -> S(0). Lay it out as one of"
        " these, or leave its layout open by taking its sbp away"
    )


def test_of_many_ways_some_are_listed():
    graph, (x, y) = built((2,) * 14, (EXP, {}))
    text = said(graph, {x: BROADCAST, y: PARTIAL}, 2)
    assert "float32" in text
    assert text.count(" -> ") == 12
    assert "; and 3 more." in text


def test_a_layout_by_word_of_the_job_is_refused_by_its_line():
    graph, (_, y) = built((3, 8), (TO_SBP, {"sbp": (("model", "S(0)"),)}))
    text = said(graph, {y: Split(0)}, 4)
    assert text.startswith("train.py:41: to_sbp cannot make float32[3, 8] as S(0)")
