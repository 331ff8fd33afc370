from dataclasses import replace

import msgpack
import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import made_up
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.errors import CompileError, InternalError, PlanFormatError
from compiler.contract.plan import PLAN_FORMAT, Plan
from compiler.contract.plan_tables import Port, RegisterKind
from compiler.graph.graph import Output
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import ADD, EXP
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import verify_plan


@pytest.fixture
def plan(sketch, fake_target):
    x = sketch.input("x", (8, 16), "float32")
    w = sketch.variable("w", (16, 16), "float32")
    c = sketch.constant(np.float32(2))
    h = sketch.b.emit_one(ADD, sketch.b.emit_one(MATMUL, x, w), c)
    both = sketch.b.emit_one(ADD, h, sketch.b.emit_one(MATMUL, sketch.b.emit_one(EXP, h), w))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SUM, both, axes=(0, 1), keepdims=False))]
    options = CompileOptions("job", is_training=False, snapshot_every=2)
    return compile_graph(sketch.b.freeze(), fake_target, options)


def test_a_plan_survives_serialisation_unchanged(plan, tmp_path):
    plan.save(tmp_path / "p.plan")
    loaded = Plan.load(tmp_path / "p.plan")
    assert loaded == plan
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.to_bytes() == plan.to_bytes()


@given(data=st.data())
@settings(max_examples=tiers.examples(300), deadline=None)
def test_a_damaged_plan_file_is_always_refused(plan_bytes, data):
    position = data.draw(st.integers(0, len(plan_bytes) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(plan_bytes)
    damaged[position] ^= 1 << bit
    with pytest.raises(PlanFormatError):
        Plan.from_bytes(bytes(damaged))


@given(st.integers(0, 10_000))
@settings(max_examples=tiers.examples(50), deadline=None)
def test_a_truncated_plan_file_is_always_refused(plan_bytes, cut):
    with pytest.raises(PlanFormatError):
        Plan.from_bytes(plan_bytes[: min(cut, len(plan_bytes) - 1)])


@pytest.fixture(scope="module")
def plan_bytes():
    from compiler.graph.graph import GraphBuilder
    from compiler.ops.primitives.sources import INPUT

    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(4,))
    b.outputs = [Output("y", b.emit_one(EXP, x))]
    return compile_graph(
        b.freeze(), made_up("fake"), CompileOptions("j", is_training=False)
    ).to_bytes()


def test_another_format_version_is_named(plan):
    head = msgpack.unpackb(plan.to_bytes())
    head["format"] = PLAN_FORMAT + 1
    with raises(PlanFormatError):
        Plan.from_bytes(msgpack.packb(head), "old.plan")


def test_a_file_that_is_no_plan_is_refused_by_name():
    with raises(PlanFormatError):
        Plan.from_bytes(b"hello", "readme.txt")


def moved(plan, index, **changes):
    registers = list(plan.registers)
    registers[index] = replace(registers[index], **changes)
    return replace(plan, registers=tuple(registers))


def test_a_good_plan_gives_the_repetitions_of_one_period(plan):
    assert verify_plan(plan) == (2, 2, 2, 1, 1)


def test_two_live_registers_on_the_same_bytes_are_found(plan):
    w = next(r for r in plan.registers if r.name == "w")
    other = next(r for r in plan.registers if r.kind is RegisterKind.TEMPORARY)
    bad = moved(plan, other.id, offsets_bytes=w.offsets_bytes)
    with raises(InternalError):
        verify_plan(bad)


def test_a_register_outside_its_arena_is_found(plan):
    bad = moved(plan, 0, offsets_bytes=(plan.arenas[0].size_bytes,))
    with raises(InternalError):
        verify_plan(bad)


def test_a_view_beyond_its_register_is_found(plan):
    views = list(plan.views)
    views[0] = replace(views[0], offset_bytes=1 << 20)
    with raises(InternalError):
        verify_plan(replace(plan, views=tuple(views)))


def test_a_chain_that_reads_what_nothing_wrote_is_found(plan):
    step = plan.actors[1]
    bad = replace(step, launches=step.launches[::-1])
    actors = (plan.actors[0], bad, *plan.actors[2:])
    with raises(InternalError):
        verify_plan(replace(plan, actors=actors))


def test_a_chain_that_forgets_an_output_field_is_found(plan):
    step = plan.actors[1]
    bad = replace(step, launches=step.launches[:-1])
    actors = (plan.actors[0], bad, *plan.actors[2:])
    with raises(InternalError):
        verify_plan(replace(plan, actors=actors))


def test_too_few_slots_are_a_deadlock_that_names_actor_and_register(plan):
    updated = next(r for r in plan.registers if r.name == "updated")
    bad = moved(plan, updated.id, num_slots=1, offsets_bytes=(0,))
    with raises(CompileError):
        verify_plan(bad)


def test_rates_without_a_balance_are_an_error(plan):
    snapshot, metrics = plan.actors[3], plan.actors[1].outputs[0].register
    greedy = replace(snapshot, inputs=(*snapshot.inputs, Port(metrics, 1)))
    actors = (*plan.actors[:3], greedy, *plan.actors[4:])
    with raises(CompileError):
        verify_plan(replace(plan, actors=actors))
