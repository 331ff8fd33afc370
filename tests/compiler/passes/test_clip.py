"""What updates read where gradients are clipped, and that it takes no launches of its own."""

import numpy as np
import pytest
from graphs import adam, descend, variable, weighted_sum

from compiler.fusion.join_updates import update_programs
from compiler.graph.graph import GraphBuilder
from compiler.graph.target import CompileOptions
from compiler.ops.families.along import SQUARE_SUM
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.families.updates import ADAMW_UPDATE, is_update
from compiler.ops.language.program_ops import program_of
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check

NORM = CompileOptions("job", clip_norm=0.5)
VALUE = CompileOptions("job", clip_value=0.25)
BOTH = CompileOptions("job", clip_norm=0.5, clip_value=0.25)


def clipped(graph, options=NORM):
    graph = simplify.simplify_graph(autodiff.differentiate(graph))
    return check(autodiff.clip_gradients(graph, options), "clip")


def lowered(graph):
    return check(
        update_programs(batches.copy_outputs(batches.split_rates(graph))), "update_programs"
    )


@pytest.fixture
def job(sketch):
    """The loss sum(a * x) + sum(t(m) * y), whose gradients are x and y."""
    b = sketch.b
    x, y = sketch.input("x", (3,)), sketch.input("y", (4, 2))
    a, m = sketch.variable("a", (3,)), sketch.variable("m", (2, 4))
    turned = b.emit_one(MUL, b.emit_one(TRANSPOSE, m, perm=(1, 0)), y)
    loss = b.emit_one(
        ADD,
        b.emit_one(SUM, b.emit_one(MUL, a, x), axes=(0,), keepdims=False),
        b.emit_one(SUM, turned, axes=(0, 1), keepdims=False),
    )
    descend(b, loss, [a, m], rate=1.0)
    return b.freeze()


def feeds(scale=1.0):
    x, y = np.arange(3.0) * scale, np.arange(8.0).reshape(4, 2) * scale
    return {"x": x, "y": y, "a": np.zeros(3), "m": np.zeros((2, 4))}


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e200])
@pytest.mark.parametrize("rewrite", [lambda graph: graph, lowered], ids=["ops", "programs"])
@pytest.mark.parametrize("options", [NORM, VALUE, BOTH], ids=["norm", "value", "both"])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_updates_read_what_the_formula_says(job, evaluate, options, rewrite, scale):
    given = feeds(scale)
    g = [given["x"], given["y"].T]
    if options.clip_value:
        g = [np.clip(x, -0.25, 0.25) for x in g]
    norm = np.sqrt(sum(np.sum(x * x) for x in g)) if scale < 1e9 or options.clip_value else np.inf
    if options.clip_norm:
        g = [x * min(1.0, 0.5 / (norm + 1e-6)) for x in g]
    out, written = evaluate(rewrite(clipped(job, options)), given)
    assert out.get("grad_norm", norm) == pytest.approx(norm, rel=1e-12)
    np.testing.assert_allclose(written["a"], -g[0], rtol=1e-12)
    np.testing.assert_allclose(written["m"], -g[1], rtol=1e-12)


def test_the_share_is_a_number_that_the_updates_own_programs_read():
    plain, graph = (
        lowered(made) for made in (
            simplify.simplify_graph(autodiff.differentiate(weighted_sum([(3, 4), (5,)]))),
            clipped(weighted_sum([(3, 4), (5,)])),
        )
    )  # fmt: skip
    before, after = ([n for n in g.nodes if n.op is ADAMW_UPDATE] for g in (plain, graph))
    for old, new in zip(before, after, strict=True):
        assert len(new.inputs) == len(old.inputs) + 1 == len(program_of(new.attrs).inputs)
        assert graph.types[new.inputs[-1]].shape == ()
    assert len({n.inputs[-1] for n in after}) == 1
    full = [n for n in graph.nodes if n.op is MUL and n.scope == "optimizer"]
    assert full == []


def test_a_flag_to_skip_stays_behind_the_share(evaluate):
    graph = autodiff.skip_updates(
        simplify.simplify_graph(autodiff.differentiate(weighted_sum([(3,)])))
    )
    graph = lowered(autodiff.clip_gradients(graph, BOTH))
    (node,) = [n for n in graph.nodes if n.op is ADAMW_UPDATE]
    assert len(node.inputs) == len(program_of(node.attrs).inputs) + 1
    given = {"x": np.array(2.0, np.float32), "w0": np.ones(3, np.float32), "step": np.array(0)}
    given |= {"skipped": np.array(0), "m0": np.zeros(3, np.float32), "v0": np.zeros(3, np.float32)}
    _, written = evaluate(graph, given)
    np.testing.assert_allclose(written["m0"], 0.1 * 0.25, rtol=1e-6)
    _, written = evaluate(graph, {**given, "x": np.array(np.inf, np.float32)})
    np.testing.assert_array_equal(written["m0"], given["m0"])


def test_a_transposed_gradient_is_squared_as_it_lies(job):
    graph = clipped(job)
    makers = graph.producers()
    squared = [graph.nodes[makers[n.inputs[0]]].op for n in graph.nodes if n.op is SQUARE_SUM]
    assert len(squared) == 2
    assert TRANSPOSE not in squared


def test_an_empty_parameter_has_no_part_in_the_norm():
    b = GraphBuilder()
    w, e = variable(b, "w", (2,)), variable(b, "e", (0, 3))
    summed = [b.emit_one(SUM, v, axes=axes, keepdims=False) for v, axes in ((w, (0,)), (e, (0, 1)))]
    adam(b, b.emit_one(ADD, *summed), [w, e])
    graph = clipped(b.freeze())
    assert len([n for n in graph.nodes if n.op is SQUARE_SUM]) == 1


def test_a_graph_without_updates_stays_as_it_is(sketch):
    graph = sketch.b.freeze()
    assert autodiff.clip_gradients(graph, BOTH) is graph
    assert not [n for n in graph.nodes if is_update(n)]
