import numpy as np
import pytest
from error_texts import raises

from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.graph.graph import Accumulation, Output, UpdateRule
from compiler.ops.families.along import NON_FINITE
from compiler.ops.families.arithmetic import ADD, MUL, SQRT
from compiler.ops.families.updates import ADAMW_UPDATE, MOMENTUM_UPDATE, SGD_UPDATE
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import SCRATCH
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check
from compiler.storage.order import needed_per_step

ADAMW = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
PLAIN = {"weight_decay": 0.1}
OPTIMIZERS = {
    SGD_UPDATE: (PLAIN, ()),
    MOMENTUM_UPDATE: ({**PLAIN, "momentum": 0.9, "nesterov": False}, ("m",)),
    ADAMW_UPDATE: (ADAMW, ("m", "v")),
}


class Job:
    """Two weights; the loss is the sum of sqrt(a * x) + b * x."""

    def __init__(self, sketch, op=SGD_UPDATE, every=1):
        self.s, b = sketch, sketch.b
        x = sketch.input("x", (3,))
        a, c = sketch.variable("a", (3,)), sketch.variable("b", (3,))
        terms = b.emit_one(ADD, b.emit_one(SQRT, b.emit_one(MUL, a, x)), b.emit_one(MUL, c, x))
        loss = b.emit_one(SUM, terms, axes=(0,), keepdims=False)
        b.outputs = [Output("loss", loss)]
        attrs, states = OPTIMIZERS[op]
        rate = sketch.constant(np.float64(0.1))
        scalars = (rate, sketch.variable("step", (), "int64", "counter")) if len(states) == 2 else (
            rate,
        )  # fmt: skip
        for name, value in (("a", a), ("b", c)):
            own = tuple([sketch.variable(f"{s}/{name}", (3,)) for s in states])
            b.updates.append(UpdateRule(op, value, own, scalars, Attrs(attrs), loss))
        if every > 1:
            b.accumulation = Accumulation(every, sketch.variable("batches", (), "int64", SCRATCH))
        self.graph = autodiff.differentiate(b.freeze())
        self.feeds = {"x": np.ones(3), "step": np.array(4), "skipped": np.array(5)}
        self.feeds |= {"a": np.full(3, 4.0), "b": np.ones(3), "batches": np.array(0)}
        self.feeds |= {f"{s}/{n}": np.full(3, 0.5) for s in states for n in "ab"}


def skipping(job):
    return check(simplify.simplify_graph(autodiff.skip_updates(job.graph)), "skip_updates")


@pytest.mark.parametrize("op", OPTIMIZERS, ids=str)
def test_a_step_without_nan_changes_the_variables_as_ever(sketch, evaluate, op):
    job = Job(sketch, op)
    _, plain = evaluate(job.graph, job.feeds)
    out, written = evaluate(skipping(job), job.feeds)
    assert out["skipped"] == 5
    assert written.pop("skipped") == 5
    assert written.keys() == plain.keys()
    for name, array in plain.items():
        np.testing.assert_array_equal(written[name], array)
        assert not np.array_equal(array, job.feeds[name])


BROKEN = {
    "nan": {"x": np.array([1.0, np.nan, 1.0])},
    "infinity": {"x": np.array([1.0, np.inf, 1.0])},
    "a gradient under a finite loss": {"a": np.array([4.0, 0.0, 4.0])},  # sqrt'(0) is infinite
}


@pytest.mark.parametrize("feeds", BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("op", OPTIMIZERS, ids=str)
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_a_broken_step_changes_nothing_and_is_counted(sketch, evaluate, op, feeds):
    job = Job(sketch, op)
    job.feeds |= feeds
    out, written = evaluate(skipping(job), job.feeds)
    if "a" in feeds:
        assert np.isfinite(out["loss"])
    assert written.pop("skipped") == 6
    assert written
    for name, array in written.items():
        np.testing.assert_array_equal(array, job.feeds[name])


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_with_sums_over_batches_the_step_is_dropped_whole(sketch, evaluate):
    job = Job(sketch, every=2)
    graph = check(batches.copy_outputs(batches.split_rates(skipping(job))), "outputs")
    sums = {"gradient/a": np.zeros(3), "gradient/b": np.zeros(3), "sum/loss": np.zeros(())}
    feeds = job.feeds | sums | {"x": np.array([1.0, np.nan, 1.0])}
    _, first = evaluate(graph, feeds)  # the batch that is broken comes first
    feeds |= {name: first[name] for name in sums} | {"x": np.ones(3), "batches": np.array(1)}
    _, second = evaluate(graph, feeds)
    assert second["skipped"] == 6
    np.testing.assert_array_equal(second["a"], job.feeds["a"])
    np.testing.assert_array_equal(second["b"], job.feeds["b"])
    feeds |= {name: second[name] for name in sums} | {"batches": np.array(2)}
    _, third = evaluate(graph, feeds)
    assert third["skipped"] == 5, "the sums begin anew"
    searches = [i for i, node in enumerate(graph.nodes) if node.op is NON_FINITE]
    assert all(needed_per_step(graph)[i] for i in searches)


def test_a_graph_without_updates_stays_as_it_is(sketch):
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SQRT, sketch.input("x", (3,))))]
    graph = sketch.b.freeze()
    assert autodiff.skip_updates(graph) is graph


def test_an_output_of_the_same_name_is_refused(sketch):
    job = Job(sketch)
    outputs = (*job.graph.outputs, Output("skipped", job.graph.outputs[0].value))
    job.graph = type(job.graph)(job.graph.nodes, job.graph.types, outputs)
    with raises(CompileError):
        autodiff.skip_updates(job.graph)


def test_an_update_that_cannot_be_dropped_is_refused(sketch, monkeypatch):
    job = Job(sketch)
    monkeypatch.setattr(autodiff.update, "_cells", {})
    with raises(CompileError):
        autodiff.skip_updates(job.graph)
