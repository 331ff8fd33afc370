"""Every read finds the version that it names, and each has one maker, or the plan is refused."""

import re
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actors.race.race import RaceError, check_races
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind, Port, VersionSlice
from compiler.contract.types import DType, TensorType
from compiler.graph.graph import Output, Write
from compiler.graph.target import CompileOptions
from compiler.lowering.lower import lower
from compiler.ops.families.arithmetic import ADD, EXP, NEG
from compiler.ops.families.updates import SGD_UPDATE
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import verify_plan


@pytest.fixture
def plan(sketch, fake_target, op_by_op):
    """matmul, exp in place, neg in place, two sums: one chain, with snapshots."""
    x = sketch.input("x", (8, 16), "float32")
    w = sketch.variable("w", (16, 16), "float32")
    h = sketch.b.emit_one(NEG, sketch.b.emit_one(EXP, sketch.b.emit_one(MATMUL, x, w)))
    g = sketch.b.emit_one(MATMUL, h, w)
    y, z = (sketch.b.emit_one(SUM, v, axes=(0, 1), keepdims=False) for v in (h, g))
    sketch.b.outputs = [Output("y", y), Output("z", sketch.b.emit_one(ADD, z, y))]
    options = CompileOptions("job", is_training=False, snapshot_every=2)
    return compile_graph(sketch.b.freeze(), fake_target, options)


def prove(plan):
    verify_plan(plan)
    check_races(plan)


def chain_of(plan):
    return next(actor for actor in plan.actors if actor.kind is ActorKind.COMPUTE)


def with_launches(plan, launches):
    step = chain_of(plan)
    actors = [replace(a, launches=tuple(launches)) if a is step else a for a in plan.actors]
    return replace(plan, actors=tuple(actors))


def place_of(plan, op):
    return next(i for i, launch in enumerate(chain_of(plan).launches) if launch.op == op)


def test_a_launch_states_what_it_reads_and_writes(plan):
    launches = chain_of(plan).launches
    product, exp, neg = (launches[place_of(plan, op)] for op in ("matmul", "exp", "neg"))
    assert exp.inputs == exp.outputs  # in place
    assert exp.reads == product.writes
    assert neg.reads == exp.writes != neg.writes


def test_a_dropped_launch_in_place_is_found(plan):
    launches = list(chain_of(plan).launches)
    del launches[place_of(plan, "exp")]
    with raises(InternalError):
        verify_plan(with_launches(plan, launches))


def test_two_launches_in_place_that_are_swapped_are_found(plan):
    launches = list(chain_of(plan).launches)
    i, j = place_of(plan, "exp"), place_of(plan, "neg")
    launches[i], launches[j] = launches[j], launches[i]
    with raises(InternalError):
        verify_plan(with_launches(plan, launches))


def test_a_launch_that_runs_twice_is_found(plan):
    launches = list(chain_of(plan).launches)
    launches.insert(place_of(plan, "neg"), launches[place_of(plan, "exp")])
    with pytest.raises(InternalError):
        verify_plan(with_launches(plan, launches))


def test_a_read_of_what_the_same_chain_updates_in_a_token_is_found_with_both_versions():
    """Of a token its updater leaves another version than the maker, which is the one it names."""

    @af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
    def train(model, batch):
        return af.mse_loss(model(batch.x), batch.y)

    rows = TensorType(DType.FLOAT32, (4, 3))
    plan = train.compile(nn.Linear(3, 3), {"x": rows, "y": rows}, rank=0)
    bucket = next(a for a in plan.actors if a.kind is ActorKind.COMM)
    launch = next(launch for launch in bucket.launches if launch.inputs == launch.outputs)
    unused = 1 + max(v for a in plan.actors for x in a.launches for v in x.writes)
    again = replace(bucket, launches=(*bucket.launches, replace(launch, writes=(unused,))))
    actors = tuple([again if a is bucket else a for a in plan.actors])
    with pytest.raises(InternalError) as caught:
        verify_plan(replace(plan, actors=actors))
    named, held = re.findall(r"version (\d+)", str(caught.value))
    assert (int(named), int(held)) == (launch.reads[0], launch.writes[0])


def test_two_producers_of_one_register_are_found(plan):
    edge = chain_of(plan).outputs[0]
    snapshot = next(actor for actor in plan.actors if actor.name == "snapshot")
    two = replace(snapshot, outputs=(*snapshot.outputs, Port(edge.register, 1)))
    actors = tuple([two if a is snapshot else a for a in plan.actors])
    with raises(InternalError):
        verify_plan(replace(plan, actors=actors))


def test_a_version_with_two_makers_is_found(plan):
    launches = list(chain_of(plan).launches)
    i, j = place_of(plan, "exp"), place_of(plan, "neg")
    launches[j] = replace(launches[j], writes=launches[i].writes)
    with raises(InternalError):
        verify_plan(with_launches(plan, launches))


def test_results_that_lie_across_one_another_are_found(plan):
    """A launch leaves all but the first row of what another one leaves whole."""
    launches = list(chain_of(plan).launches)
    i = place_of(plan, "neg")
    view = plan.views[launches[i].outputs[0]]
    below = replace(view, offset_bytes=64, type=TensorType(DType.FLOAT32, (7, 16)))
    launches[i] = replace(launches[i], outputs=(len(plan.views),))
    changed = with_launches(replace(plan, views=(*plan.views, below)), launches)
    with raises(InternalError):
        verify_plan(changed)


def test_a_part_that_is_read_for_the_whole_and_another_part_are_found(plan):
    launches = list(chain_of(plan).launches)
    i = place_of(plan, "neg")
    view = plan.views[launches[i].inputs[0]]
    part = replace(view, type=TensorType(DType.FLOAT32, (7, 16)))
    plan = replace(plan, views=(*plan.views, part))
    launches[i] = replace(launches[i], inputs=(len(plan.views) - 1,))
    with raises(InternalError):
        verify_plan(with_launches(plan, launches))
    named = VersionSlice(launches[i].reads[0], 64, part.strides_bytes)
    launches[i] = replace(launches[i], reads=(-1 - len(plan.parts),))
    plan = replace(plan, parts=(*plan.parts, named))
    with raises(InternalError):
        verify_plan(with_launches(plan, launches))


# -- errors of lowering, which the numbers must not follow ---------------------------------------


def test_bytes_given_away_before_their_last_reader_are_found(
    sketch, fake_target, monkeypatch, op_by_op
):
    """As if in-place pairs went by the first reader of a value."""

    def first_uses(storage, drafts):
        uses = {}
        for index, draft in enumerate(drafts):
            for value in draft.node.inputs:
                uses.setdefault(storage.root[value], index)
        return uses

    x = sketch.input("x", (8, 8), "float32")
    h = sketch.b.emit_one(MATMUL, x, x)
    e = sketch.b.emit_one(EXP, h)
    both = sketch.b.emit_one(MATMUL, e, h)
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SUM, both, axes=(0, 1), keepdims=False))]
    graph = sketch.b.freeze()
    options = CompileOptions("job", is_training=False)
    compile_graph(graph, fake_target, options)
    monkeypatch.setattr("compiler.storage.buffers.last_uses", first_uses)
    with raises(InternalError):
        compile_graph(graph, fake_target, options)


def updating(sketch, *, is_early):
    """A graph, in the order in which it is lowered, with an update before or after a reader."""
    x, w = sketch.input("x", (8, 8), "float32"), sketch.variable("w", (8, 8), "float32")
    rate = sketch.constant(np.float32(0.1))
    grad = sketch.b.emit_one(MATMUL, x, x)

    def read():
        y = sketch.b.emit_one(SUM, sketch.b.emit_one(MATMUL, x, w), axes=(0, 1), keepdims=False)
        sketch.b.outputs = [Output("y", y)]

    if not is_early:
        read()
    updated = sketch.b.emit_one(SGD_UPDATE, w, grad, rate, weight_decay=0.0)
    if is_early:
        read()
    sketch.b.writes = [Write(w, updated)]
    return sketch.b.freeze()


@pytest.mark.parametrize("num_streams", [1, 2])
def test_an_update_before_a_reader_of_the_old_value_is_found(
    sketch, fake_target, monkeypatch, num_streams
):
    monkeypatch.setattr("compiler.lowering.step_program.write_after_read", lambda graph: [])
    monkeypatch.setattr(fake_target.targets[0], "message_ns", 1.0)
    options = CompileOptions("job", num_streams=num_streams)
    plan = lower(updating(sketch, is_early=True), fake_target, options, "")
    with raises((InternalError, RaceError)):
        prove(plan)


def test_an_update_after_all_readers_of_the_old_value_is_right(sketch, fake_target):
    verify_plan(lower(updating(sketch, is_early=False), fake_target, CompileOptions("job"), ""))


def test_two_constants_of_one_version_are_refused(sketch, fake_target):
    """A reader of either would find the version that it names, and the bytes of the other one."""
    x, parts = sketch.input("x", (8, 8), "float32"), []
    for value in (0.5, 2.0):
        factors = sketch.constant(np.full((8, 8), value, np.float32))
        parts.append(sketch.b.emit_one(MATMUL, x, factors))
    total = sketch.b.emit_one(SUM, sketch.b.emit_one(ADD, *parts), axes=(0, 1), keepdims=False)
    sketch.b.outputs = [Output("y", total)]
    options = CompileOptions("job", is_training=False)
    plan = compile_graph(sketch.b.freeze(), fake_target, options)
    first, second = plan.constants
    step = chain_of(plan)
    launches = [
        replace(
            launch,
            reads=tuple([first.version if v == second.version else v for v in launch.reads]),
        )
        for launch in step.launches
    ]
    wrong = with_launches(plan, launches)
    wrong = replace(wrong, constants=(first, replace(second, version=first.version)))
    with raises(InternalError):
        verify_plan(wrong)
