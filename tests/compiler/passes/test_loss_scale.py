import numpy as np
import pytest

from compiler.contract.attrs import Attrs
from compiler.graph.graph import Output, UpdateRule, Write
from compiler.graph.registry import reference
from compiler.ops.families.arithmetic import MUL
from compiler.ops.families.updates import ADAMW_UPDATE, RESCALE, SGD_UPDATE
from compiler.ops.primitives.reduce import SUM
from compiler.passes import autodiff, simplify
from compiler.pipeline.rewrites import check

ADAMW = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


@pytest.fixture
def scaled(sketch):
    """The graph of a job whose loss, the sum of w * x, is scaled; its rewritten form."""
    b = sketch.b
    x, w = sketch.input("x", (3,)), sketch.variable("w", (3,))
    scale = sketch.variable("loss_scale", (), "float32", "counter")
    good = sketch.variable("loss_scale/good_steps", (), "int64", "counter")
    loss = b.emit_one(SUM, b.emit_one(MUL, w, x), axes=(0,), keepdims=False)
    objective = b.emit_one(MUL, loss, autodiff.cast_to(b, scale, b.type_of(loss).dtype))
    b.outputs = [Output("loss", loss), Output("loss_scale", scale)]
    news = b.emit(RESCALE, (scale, good, sketch.constant(np.int64(0))), Attrs(SETTINGS))
    b.writes += [Write(old, new) for old, new in zip((scale, good), news, strict=True)]
    m, v = (sketch.variable(name, (3,), role="optimizer") for name in "mv")
    scalars = (sketch.constant(np.float64(0.1)), sketch.variable("step", (), "int64", "counter"))
    b.updates.append(UpdateRule(ADAMW_UPDATE, w, (m, v), scalars, Attrs(ADAMW), objective))
    graph = autodiff.unscale(simplify.simplify_graph(autodiff.differentiate(b.freeze())))
    return check(autodiff.rescale(autodiff.skip_updates(check(graph, "unscale"))), "rescale")


def feeds(x, **more):
    given = {"x": x, "w": np.arange(3.0), "m": np.full(3, 0.5), "v": np.full(3, 0.25)}
    counters = {"step": 7, "skipped": 3, "loss_scale": np.float32(64), "loss_scale/good_steps": 2}
    return given | {name: np.array(n) for name, n in (counters | more).items()}


def test_an_update_reads_the_gradient_itself_and_the_count_of_updates(scaled, evaluate):
    x = np.array([1.0, 2.0, -3.0])
    out, written = evaluate(scaled, feeds(x))
    given = feeds(x)
    arrays = [given["w"], x, given["m"], given["v"], np.array(0.1), np.array(7 - 3)]
    wanted = reference.get(ADAMW_UPDATE)(Attrs(ADAMW), *arrays)
    for name, array in zip(("w", "m", "v"), wanted, strict=True):
        np.testing.assert_allclose(written[name], array, rtol=1e-14)
    assert out["loss"] == pytest.approx(x @ np.arange(3.0))
    assert (out["loss_scale"], written["loss_scale"]) == (64.0, 128.0)
    assert (written["loss_scale/good_steps"], written["skipped"]) == (0, 3)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
def test_a_step_that_overflows_halves_the_scale_and_changes_nothing_else(scaled, evaluate):
    given = feeds(np.array([1.0, np.inf, 1.0]))
    _, written = evaluate(scaled, given)
    assert (written["loss_scale"], written["loss_scale/good_steps"]) == (32.0, 0)
    assert written["skipped"] == 4
    for name in "wmv":
        np.testing.assert_array_equal(written[name], given[name])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_scale_does_not_grow_to_infinity():
    scale = np.array(2.0**127, np.float32)
    grown, good = reference.get(RESCALE)(Attrs(SETTINGS), scale, np.array(2), np.array(0))
    assert (grown, good) == (scale, 0)


def test_a_graph_without_updates_stays_as_it_is(sketch):
    sketch.b.outputs = [Output("y", sketch.input("x", (3,)))]
    graph = sketch.b.freeze()
    assert autodiff.unscale(graph) is graph
    assert autodiff.rescale(graph) is graph


def test_an_update_without_a_count_of_steps_gets_none(sketch):
    w, x = sketch.variable("w", (3,)), sketch.input("x", (3,))
    scale = sketch.constant(np.float32(8.0))
    loss = sketch.b.emit_one(SUM, sketch.b.emit_one(MUL, w, x), axes=(0,), keepdims=False)
    sketch.b.outputs = [Output("loss", loss), Output("loss_scale", scale)]
    rate = sketch.constant(np.float64(0.1))
    rule = UpdateRule(SGD_UPDATE, w, (), (rate,), Attrs({"weight_decay": 0.0}), loss)
    sketch.b.updates.append(rule)
    graph = autodiff.unscale(autodiff.differentiate(sketch.b.freeze()))
    graph = check(autodiff.rescale(autodiff.skip_updates(graph)), "rescale")
    (update,) = [node for node in graph.nodes if node.op is SGD_UPDATE]
    assert len(update.inputs) == 4
