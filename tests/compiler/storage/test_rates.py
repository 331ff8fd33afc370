"""What runs once per batch, what once per step, and that the two share nothing but the sums."""

from dataclasses import replace

import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import counter, descend, variable
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_plans import ROWS, Layers, squares

import actorflow as af
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.graph.graph import (
    Accumulation,
    GraphBuilder,
    Output,
    SourceLocation,
    UpdateRule,
    Write,
)
from compiler.graph.registry import is_source
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import ADD, EXP, MUL, NEG
from compiler.ops.families.updates import ACCUMULATE, INCREMENT, SGD_UPDATE
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import CAST
from compiler.ops.primitives.sources import INPUT, SCRATCH, scalar
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.rewrites import check
from compiler.sbp import stages
from compiler.sbp.stages import extract_stage
from compiler.storage.order import (
    batches_per_step,
    needed_per_batch,
    needed_per_step,
    outputs_per_step,
)


def rate_of(b, step):
    """Return a learning rate that falls with the steps: 0.1 * exp(-step)."""
    count = b.emit_one(CAST, step, dtype="float64")
    return b.emit_one(MUL, b.emit_one(EXP, b.emit_one(NEG, count)), scalar(b, 0.1, DType.FLOAT64))


def job(every=3, *, is_rate_a_metric=True, reads_batch=False):
    """A training graph: loss = sum(x * w), SGD by `rate_of`, sums over `every` batches."""
    b = GraphBuilder()
    x, w = (
        b.emit_one(INPUT, name="x", dtype="float64", shape=(4,)),
        variable(b, "w", (4,), "float64"),
    )
    step = counter(b)
    with b.at("body", SourceLocation("job.py", 7)):
        loss = b.emit_one(SUM, b.emit_one(MUL, x, w), axes=(0,), keepdims=False)
    rate = rate_of(b, step)
    metrics = [Output("rate", rate)] if is_rate_a_metric else []
    if reads_batch:
        with b.at("optimizer", SourceLocation("job.py", 9)):
            rate = b.emit_one(SUM, b.emit_one(INPUT, name="lr", dtype="float64", shape=(1,)),
                         axes=(0,), keepdims=False)  # fmt: skip
    descend(b, loss, [w], rate, every=every)
    b.outputs += metrics
    return b.freeze()


def split(graph):
    """Run the passes before `rates`, and the pass; return the graphs before and after."""
    before = simplify.simplify_graph(autodiff.differentiate(graph))
    after = batches.split_rates(before)
    check(after, "rates")
    return before, after


def ops_of(graph, marks):
    names = [str(n.op) for n, mark in zip(graph.nodes, marks, strict=True) if mark]
    return sorted(names)


def test_a_step_of_one_batch_has_one_rate_and_stays_as_it_is():
    before, after = split(job(every=1))
    assert after is before
    assert batches_per_step(after) == 1
    assert not any(needed_per_step(after))


def test_the_graph_knows_how_many_batches_a_step_has():
    assert batches_per_step(split(job(every=5))[1]) == 5


def test_updates_and_what_only_they_need_run_once_per_step():
    _, graph = split(job(is_rate_a_metric=False))
    per_step = needed_per_step(graph)
    computed = [m and not is_source.get(n.op) for n, m in zip(graph.nodes, per_step, strict=True)]
    assert ops_of(graph, computed) == ["cast", "exp", "increment", "mul", "neg", "sgd_update"]
    per_batch = ops_of(graph, needed_per_batch(graph))
    assert "accumulate" in per_batch
    assert not {"sgd_update", "exp"} & set(per_batch)


def test_a_learning_rate_that_is_also_a_metric_exists_twice():
    before, after = split(job())
    for op in ("cast", "neg", "exp"):
        assert [str(n.op) for n in before.nodes].count(op) == 1
        assert [str(n.op) for n in after.nodes].count(op) == 2
    metric = next(o.value for o in after.outputs if o.name == "rate")
    update = next(n for n in after.nodes if n.op is SGD_UPDATE)
    assert metric not in update.inputs


def assert_rates_meet_in_sums_only(graph):
    per_step, per_batch = needed_per_step(graph), needed_per_batch(graph)
    producer = graph.producers()
    for index, node in enumerate(graph.nodes):
        computes = not is_source.get(node.op) and node.op is not ACCUMULATE
        assert not (computes and per_step[index] and per_batch[index]), node
        for value in node.inputs:
            maker = graph.nodes[producer[value]]
            if not is_source.get(maker.op) and maker.op is not ACCUMULATE:
                assert per_step[producer[value]] == per_step[index], node


def test_the_two_rates_meet_in_sources_and_sums_only():
    assert_rates_meet_in_sums_only(split(job())[1])


@st.composite
def shared_graphs(draw):
    """Graphs in which metrics and rates read the same expressions of state, in any mix."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float64", shape=())
    step = variable(b, "step", (), "int64", "counter")
    pool = [b.emit_one(CAST, step, dtype="float64")]
    for _ in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from((NEG, ADD, MUL)))
        operands = [draw(st.sampled_from(pool)) for _ in range(1 if op is NEG else 2)]
        pool.append(b.emit_one(op, *operands))
    loss = x
    b.updates = []
    for i in range(draw(st.integers(1, 3))):
        w = variable(b, f"w{i}", (), "float64")
        factor = draw(st.sampled_from([x, *pool]))
        loss = b.emit_one(ADD, loss, b.emit_one(MUL, w, factor))
        rate = draw(st.sampled_from(pool))
        b.updates.append(UpdateRule(SGD_UPDATE, w, (), (rate,), Attrs({"weight_decay": 0.0})))
    b.outputs = [Output("loss", loss)]
    b.updates = [replace(rule, objective=loss) for rule in b.updates]
    for i in range(draw(st.integers(0, 3))):
        b.outputs.append(Output(f"m{i}", draw(st.sampled_from(pool))))
    b.writes = [Write(step, b.emit_one(INCREMENT, step))]
    every = draw(st.integers(2, 4))
    b.accumulation = Accumulation(every, variable(b, "batches", (), "int64", SCRATCH))
    return b.freeze()


@given(shared_graphs(), st.integers(0, 5))
@settings(max_examples=tiers.examples(100), deadline=None)
def test_the_pass_changes_no_value_and_lets_the_rates_meet_in_sums_only(
    evaluate_graphs, graph, batch
):
    before, after = split(graph)
    assert_rates_meet_in_sums_only(after)
    rng = np.random.default_rng(batch)
    feeds = {"x": rng.normal(), "step": np.int64(2), "batches": np.int64(batch)}
    feeds |= {f"w{i}": rng.normal() for i in range(3)}
    feeds |= {f"gradient/w{i}": rng.normal() for i in range(3)}
    assert evaluate_graphs(after, feeds) == evaluate_graphs(before, feeds)


def test_the_sum_of_k_shares_is_the_mean_of_the_gradients(evaluate):
    every, rng = 3, np.random.default_rng(0)
    _, graph = split(job(every, is_rate_a_metric=False))
    state = {"w": rng.normal(size=4), "step": np.int64(0), "batches": np.int64(6),
             "gradient/w": np.full(4, np.nan)}  # fmt: skip
    rows = rng.normal(size=(every, 4))
    for x in rows:
        _, written = evaluate(graph, {"x": x, **state})
        sums = {n: written[n] for n in ("batches", "gradient/w")}
        state |= sums  # a batch writes the sums only
    np.testing.assert_allclose(state["gradient/w"], rows.mean(0), rtol=1e-12)
    assert state["batches"] == 6 + every
    np.testing.assert_allclose(written["w"], state["w"] - 0.1 * rows.mean(0), rtol=1e-12)


def test_an_optimizer_that_reads_the_batch_is_an_error_with_the_line():
    with raises(CompileError):
        split(job(is_rate_a_metric=False, reads_batch=True))


def test_an_optimizer_may_read_the_batch_where_a_step_is_one_batch():
    _, graph = split(job(every=1, is_rate_a_metric=False, reads_batch=True))
    assert not any(needed_per_step(graph))


def test_the_same_graph_gives_the_same_graph():
    before, after = split(job())
    assert batches.split_rates(before) == after


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_that_sums_nothing_has_as_many_batches_as_the_others(stage):
    """Nor is the norm that it has with the others an output of each batch."""
    graph = af.job(squares, optimizer=af.optim.SGD(0.1), accumulate=3, clip_norm=1.0).graph(
        Layers(3, without=1), ROWS
    )
    graph = autodiff.clip_gradients(
        autodiff.differentiate(stages.run(graph, 3)), CompileOptions("job", clip_norm=1.0)
    )
    own = extract_stage(graph, stage, 3)
    assert batches_per_step(own) == 3
    norm = next(output.value for output in own.outputs if output.name == "grad_norm")
    assert outputs_per_step(own) == (norm,)
    assert any(needed_per_step(own))
