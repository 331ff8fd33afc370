"""Runs of ranks that meet in shared memory, each rank a thread of this process."""

import os
from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from graphs import among
from rank_threads import RankThreads

import actorflow as af
from actorflow.compile.hardware import hardware_for
from actorflow.compile.prove import prove
from actorflow.data import ArraySource
from actorflow.distributed.process_group import ProcessGroup
from actorflow.environment.native import kernel_choice_lock
from actorflow.environment.settings import Settings
from compiler.contract.errors import ActorflowError, PeerFailed, PlanFormatError
from compiler.contract.placement import HOST
from compiler.contract.plan_tables import ActorKind
from compiler.contract.types import ShardingSpec
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import MUL
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import ALL_GATHER, ALL_REDUCE
from compiler.pipeline.pipeline import compile_graph, local_graphs

ROWS = ShardingSpec((4, 6), (("data", 0),))
X = np.linspace(-1, 1, 40 * 6, dtype=np.float32).reshape(40, 6)


def meets(order):
    return {"num_ranks": 2, "group": "data", "bucket": order, "order": order}


@pytest.fixture(scope="module")
def plan():
    """Return the plan of each of two ranks, whose outputs are what they have made together."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(2, 6))
    init = (("kind", "uniform"), ("bound", 1.0))
    w = b.emit_one(VARIABLE, name="w", dtype="float32", shape=(6,), role="parameter", init=init)
    y = b.emit_one(ALL_REDUCE, b.emit_one(MUL, x, w), **meets(0), by="sum")
    row = b.emit_one(ALL_REDUCE, b.emit_one(MUL, w, w), **meets(1), by="max")
    whole = b.emit_one(ALL_GATHER, b.emit_one(MUL, x, x), **meets(2), axis=0, rows=4)
    b.outputs = [Output("y", y), Output("row", row), Output("whole", whole)]
    settings = Settings.from_env(os.environ)
    with kernel_choice_lock(settings, (HOST,), deterministic=False):
        hardware = hardware_for((HOST,))
        graph, options = b.freeze(), CompileOptions("meet", is_training=False)
        own = local_graphs(graph, hardware, options)
        found = compile_graph(graph, among(hardware, data=2), options, local=own)
    fields = [replace(f, sharding=ROWS) if f.name == "x" else f for f in found.fields]
    with_mesh = (*[o for o in found.options if o[0] != "mesh"], ("mesh", (("data", 2),)))
    return replace(found, fields=tuple(fields), options=with_mesh)


def on_ranks(do):
    ranks = RankThreads(2)
    return ranks.run(lambda rank: do(ProcessGroup(rank, ranks.gather(rank))))


def source():
    return ArraySource({"x": X}, batch=4, seed=3)


def test_ranks_have_what_they_made_together(plan, native_toolchain):
    def one(group):
        runner = af.Runner(plan, group=group)
        found, again = [list(runner.stream(source(), steps=5)) for _ in range(2)]
        return found, again, runner.variables()["w"]

    for found, again, w in on_ranks(one):
        for made, same, batch in zip(found, again, source(), strict=False):
            x = batch["x"]
            wanted = {"y": x[:2] * w + x[2:] * w, "row": w * w, "whole": x * x}
            for name, want in wanted.items():
                np.testing.assert_array_equal(made[name], want)
                np.testing.assert_array_equal(same[name], want)


def test_a_rank_whose_launch_fails_has_the_others_end(plan, native_toolchain):
    """The one that failed tells its own error, and the others that it was not there."""
    errors = [None, None]

    def run(runner, is_broken):
        for _ in runner.stream(source(), steps=1000):
            if is_broken:
                runner._newest.loop.abort(ZeroDivisionError("a kernel"))

    def one(group):
        runner = af.Runner(plan, group=group)
        with pytest.raises((ZeroDivisionError, ActorflowError)) as caught:
            run(runner, group.rank == 1)
        errors[group.rank] = caught.value

    on_ranks(one)
    assert isinstance(errors[1], ZeroDivisionError)
    assert isinstance(errors[0], PeerFailed)
    assert "a kernel" in str(errors[0])


MUTANTS = {
    "another number of ranks": ({"num_ranks": 3}, {}),
    "a group of no mesh": ({"group": "model"}, {}),
    "a kernel": ({}, {"kernel": "numpy.mul"}),
    "another op": ({}, {"op": "mul", "attrs": ()}),
    "a wrong reduction": ({"by": "product"}, {}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_meeting_that_cannot_be_is_refused(plan, name):
    attrs, changes = MUTANTS[name]
    prove(plan)

    def changed(launch):
        launch = replace(launch, attrs=tuple(sorted({**dict(launch.attrs), **attrs}.items())))
        return replace(launch, **changes)

    actors = [
        replace(a, launches=tuple(map(changed, a.launches))) if a.kind is ActorKind.COMM else a
        for a in plan.actors
    ]
    with raises(PlanFormatError):
        prove(replace(plan, actors=tuple(actors)))


def test_a_meeting_in_an_actor_that_computes_is_refused(plan):
    actors = [replace(a, kind=ActorKind.COMPUTE) if a.kind is ActorKind.COMM else a
              for a in plan.actors]  # fmt: skip
    with raises(PlanFormatError):
        prove(replace(plan, actors=tuple(actors)))
