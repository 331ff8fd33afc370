"""Stages of a pipeline: what lies where, what is refused, and what a job may say of them."""

import re
from collections import defaultdict

import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, Phase, TensorType
from compiler.graph.graph import UNSTAGED
from compiler.ops.primitives.body import hash_graph
from compiler.passes import autodiff, simplify
from compiler.pipeline.printer import print_graph
from compiler.sbp import stages

SPEC = {"x": TensorType(DType.FLOAT32, (4, 6)), "y": TensorType(DType.FLOAT32, (4, 3))}


class Halves(nn.Module):
    def __init__(self):
        self.lower, self.upper = nn.Linear(6, 5), nn.Linear(5, 3)


def traced(body, **options):
    """Return the graph of a training job with this body."""
    options = {"optimizer": af.optim.AdamW(0.1), **options}
    return af.job(body, **options).graph(Halves(), SPEC)


def halves(model, batch):
    with af.stage(0):
        h = af.relu(model.lower(batch.x))
    with af.stage(1):
        h = model.upper(h)
    return af.mse_loss(h, batch.y)


def whole(model, batch):
    return af.mse_loss(model.upper(af.relu(model.lower(batch.x))), batch.y)


def variables(graph):
    return {n.attrs["name"]: n.stage for n in graph.nodes if n.op.name == "variable"}


def by_phase(graph, op):
    found = defaultdict(list)
    for node in graph.nodes:
        if node.op.name == op:
            found[node.phase].append(node.stage)
    return found


def test_variables_lie_where_they_are_read_and_optimizer_state_beside_them():
    graph = stages.run(traced(halves, ema=0.5, accumulate=2), 2)
    found = variables(graph)
    for stage, name in ((0, "lower.weight"), (0, "lower.bias"), (1, "upper.weight")):
        own = [v for path, v in found.items() if path.endswith(name)]
        assert own == [stage] * 4, name
    shared = {"step", "seed", "batches", "ema/steps"} & {*found}
    assert len(shared) >= 3
    assert {found[name] for name in shared} == {UNSTAGED}


def test_what_stands_outside_of_all_regions_runs_on_the_last_stage_that_it_reads():
    graph = stages.run(traced(halves), 2)
    (loss,) = [n for n in graph.nodes if n.outputs[0] == graph.outputs[0].value]
    assert loss.stage == 1
    sources = [n.stage for n in graph.nodes if n.op.name in ("input", "constant")]
    assert {*sources} == {UNSTAGED}


def test_gradients_are_on_the_stage_of_what_they_are_of():
    graph = simplify.simplify_graph(
        autodiff.differentiate(stages.run(traced(halves, accumulate=3), 2))
    )
    assert by_phase(graph, "matmul") == {Phase.FORWARD: [0, 1], Phase.BACKWARD: [1, 1, 0]}
    found = stages.stages_of(graph)
    of_update = {
        graph.nodes[graph.producers()[n.inputs[0]]].attrs["name"]: found[i]
        for i, n in enumerate(graph.nodes)
        if n.op.name in ("adamw_update", "accumulate")
    }
    assert len(of_update) == 8
    for name, stage in of_update.items():
        assert stage == ("upper" in name), name


def test_what_two_stages_compute_alike_stays_on_both():
    def job(model, batch):
        with af.stage(0):
            h = model.lower(batch.x * af.exp(batch.y).sum())
        with af.stage(1):
            return (model.upper(h) * af.exp(batch.y).sum()).mean()

    graph = simplify.simplify_graph(stages.run(traced(job), 2))
    assert by_phase(graph, "exp")[Phase.FORWARD] == [0, 1]


def test_a_graph_without_stages_is_hashed_and_printed_as_before():
    graph, cut = traced(whole), traced(halves)
    assert hash_graph(graph) != hash_graph(cut)
    assert hash_graph(stages.run(cut, 1)) == hash_graph(graph) == hash_graph(stages.run(graph, 1))
    assert " on stage " not in "\n".join(print_graph(graph))
    assert " on stage 1" in "\n".join(print_graph(cut))


def refused(body, num_stages=2):
    """Return the error of a job; lines of this file are [1], [2] ... in order of appearance."""
    with pytest.raises(CompileError) as caught:
        stages.run(traced(body), num_stages)
    lines = [int(n) for n in re.findall(r"test_stages.py:(\d+)", str(caught.value))]
    first = body.__code__.co_firstlineno
    return str(caught.value), [line - first for line in lines]


def test_a_parameter_that_two_stages_read_is_refused_with_both_lines():
    def job(model, batch):
        with af.stage(0):
            h = model.lower(batch.x)
        with af.stage(1):
            h = h + batch.x @ model.lower.weight.T
            return model.upper(h).mean()

    text, lines = refused(job)
    assert lines == [4, 2]
    assert "parameter 'lower.weight' is read on stage 1, and on stage 0" in text


def test_values_that_flow_down_are_refused_with_both_lines():
    def job(model, batch):
        with af.stage(1):
            h = model.lower(batch.x)
        with af.stage(0):
            return model.upper(h).mean()

    text, lines = refused(job)
    assert lines == [4, 2]
    assert "is on stage 0 and reads what" in text


def test_more_stages_than_ranks_are_refused_and_more_ranks_than_stages():
    text, lines = refused(lambda model, batch: 0 * halves(model, batch), num_stages=3)
    assert len(lines) == 1
    assert "3 ranks, and the job has no op on stage 2" in text

    def job(model, batch):
        with af.stage(0):
            h = model.lower(batch.x)
        with af.stage(2):
            return model.upper(h).mean()

    text, lines = refused(job)
    assert lines == [4]
    assert "is on stage 2, and the mesh's axis 'stage' has 2 ranks, for stages 0 to 1" in text


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", None])
def test_a_stage_that_is_no_number_is_refused(number):
    with raises(CompileError):
        af.stage(number)


def test_a_region_outside_of_a_job_is_refused():
    with raises(CompileError):
        af.stage(1).__enter__()


def test_a_loop_has_one_stage():
    def job(model, batch):
        def step(carry, x):
            with af.stage(1):
                return carry + x, x

        total, _ = af.scan(step, batch.x[0] * 0, batch.x)
        return model.upper(model.lower(total.reshape(1, 6))).mean()

    with raises(CompileError):
        traced(job)
