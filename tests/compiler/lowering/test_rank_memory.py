"""Which registers of a rank lie where the other ranks of its host see them."""

import pytest
from graphs import among, descend, made_up, sims, variable

from actors.race.race import check_races
from compiler.contract.placement import RANK_SIDE, SHARED
from compiler.graph.graph import GraphBuilder
from compiler.graph.target import CompileOptions
from compiler.lowering.lower import lower
from compiler.lowering.step_program import make_program
from compiler.ops.families.arithmetic import EXP, MUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from compiler.passes import autodiff, batches, simplify
from compiler.pipeline.printer import summarise
from compiler.storage import order
from compiler.verify.verify import verify_plan

PARTS = {
    ALL_REDUCE: {"by": "sum"},
    REDUCE_SCATTER: {"by": "sum", "axis": 0, "rows": 4},
    ALL_GATHER: {"axis": 0, "rows": 16},
    ALL_TO_ALL: {"axis": 0, "rows": 16, "to_axis": 1, "to_rows": 4},
}


def meeting(op):
    """A graph that computes, meets, and computes on; return it and what it met with and for."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(8, 8))
    made = b.emit_one(EXP, x)
    attrs = {"num_ranks": 2, "group": "data", "bucket": 0, "order": 0, **PARTS[op]}
    left = b.emit_one(op, made, **attrs)
    weight = variable(b, "w", b.type_of(left).shape)
    descend(
        b, b.emit_one(SUM, b.emit_one(MUL, left, weight), axes=(0, 1), keepdims=False), [weight]
    )
    return b, made, left


@pytest.mark.parametrize(
    ("op", "is_read", "is_written"),
    [
        (ALL_REDUCE, True, True),
        (REDUCE_SCATTER, True, False),
        (ALL_GATHER, False, True),
        (ALL_TO_ALL, False, True),
    ],
    ids=str,
)
def test_what_others_work_on_is_shared_and_nothing_else(op, is_read, is_written):
    b, made, left = meeting(op)
    graph = b.freeze()
    program = make_program(graph, among(made_up("host", ()), data=2), 1, 0)
    shared = {value for value, place in enumerate(program.place) if place == RANK_SIDE}
    expected = [*([made] if is_read else []), *([left] if is_written else [])]
    assert shared == {program.storage.root[value] for value in expected}


def test_devices_that_are_apart_share_nothing():
    graph = meeting(ALL_REDUCE)[0].freeze()
    assert RANK_SIDE not in make_program(graph, among(sims(1), data=2), 1, 0).place


@pytest.mark.parametrize("op", PARTS, ids=str)
def test_a_plan_has_an_arena_of_what_ranks_share_that_is_proven_and_told(op):
    graph, hardware = meeting(op)[0].freeze(), among(made_up("host", ("exp", "mul")), data=2)
    for run in (autodiff.differentiate, simplify.simplify_graph, batches.copy_outputs, order.run):
        graph = run(graph)
    plan = lower(graph, hardware, CompileOptions("job"), "hash")
    verify_plan(plan)
    check_races(plan)
    number = [arena.place for arena in plan.arenas].index(SHARED)
    assert plan.arenas[number].size_bytes > 0
    own = [register for register in plan.registers if register.arena == number]
    assert sum([register.size_bytes for register in own]) <= plan.arenas[number].size_bytes
    assert any(["shared memory of host:0" in line for line in summarise(plan)])
