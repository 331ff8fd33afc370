"""The walk of a program: which loops, what lives between them, and what is computed twice."""

from __future__ import annotations

from actors.kernels.program.phases import last_reads, schedule, store_phases
from compiler.contract.program import Kind
from compiler.contract.types import DType


def test_a_group_without_reductions_is_one_phase(groups):
    b = groups.Builder()
    x, bias = b.input(), b.input(Kind.COLUMN)
    plan = schedule(b.program(b.op("tanh", b.op("add", x, bias))))
    assert len(plan.phases) == 1
    assert plan.phases[0].loads == (x, bias)
    assert not plan.buffers


def test_every_reduction_in_a_row_begins_a_phase(groups):
    b = groups.Builder()
    x = b.input()
    centred = b.op("sub", x, b.reduce("row_sum", x))
    spread = b.reduce("row_sum", b.op("mul", centred, centred))
    plan = schedule(b.program(b.op("mul", centred, spread)))
    assert [phase.reductions for phase in plan.phases] == [(1,), (spread,), ()]


def test_cheap_values_are_computed_again_and_dear_ones_are_kept(groups):
    b = groups.Builder()
    x = b.input()
    cheap = b.op("sub", x, b.reduce("row_max", x))
    dear = b.op("exp", cheap)
    total = b.reduce("row_sum", dear)
    plan = schedule(b.program(b.op("div", dear, total), b.op("mul", cheap, total)))
    assert plan.buffers == (dear,)
    assert dear in plan.phases[1].keeps
    assert dear in plan.phases[2].kept
    assert cheap in plan.phases[2].body
    assert dear not in plan.phases[2].body


def test_a_stored_value_is_read_back_where_it_was_stored(groups):
    b = groups.Builder()
    x, y = b.input(), b.input()
    h = b.op("add", x, y)
    program = b.program(h, b.op("sub", h, b.reduce("row_sum", h)))
    plan = schedule(program)
    assert plan.phases[1].read_back == ((h, 0),)
    assert plan.phases[1].loads == ()
    assert last_reads(plan, program) == {x: 0, y: 0}
    assert store_phases(plan) == {0: 0, 1: 1}


def test_what_no_output_needs_is_not_computed(groups):
    b = groups.Builder()
    x = b.input()
    b.reduce("row_sum", b.op("exp", x))
    plan = schedule(b.program(b.op("neg", x)))
    assert len(plan.phases) == 1
    assert len(plan.phases[0].body) == 1


def test_scalars_and_late_columns_stand_outside_the_loops(groups):
    b = groups.Builder()
    x, lr = b.input(), b.input(Kind.SCALAR)
    half = b.op("mul", lr, b.constant(0.5))
    total = b.reduce("column_sum", b.op("mul", x, half))
    late = b.cast(b.op("add", total, half), DType.FLOAT64)
    plan = schedule(b.program(late))
    assert half in plan.scalars
    assert late in plan.late
    assert plan.column_sums == (total,)
    assert plan.phases[0].column_sums == (total,)
    assert late not in plan.phases[0].body
