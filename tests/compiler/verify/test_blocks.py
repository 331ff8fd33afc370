"""A copy of a block is what its operands say, or the plan is refused."""

from dataclasses import replace

import pytest
from error_texts import raises
from graphs import Target, made_up, weighted_sum

from compiler.contract.errors import InternalError
from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan_tables import View
from compiler.contract.types import DType, TensorType
from compiler.graph.target import CompileOptions, Link, one_device
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import verify_plan

SHAPES = [(3, 5), (3, 5), (33,)]


@pytest.fixture(scope="module")
def plan():
    target = Target("made-up", link=Link(25.0, 25.0, 5_000.0))
    hardware = one_device(target, Device(DeviceKind.SIM))
    return compile_graph(weighted_sum(SHAPES), hardware, CompileOptions("job", snapshot_every=2))


def actor_of(plan, name="snapshot"):
    return next(a for a in plan.actors if a.name == name)


def with_copy(plan, **changes):
    """Return the plan where the copy of the variables is another one."""
    actor = actor_of(plan)
    (copy,) = actor.launches
    changed = replace(actor, launches=(replace(copy, **changes),))
    return replace(plan, actors=tuple([changed if a is actor else a for a in plan.actors]))


def turned(row, one=0, other=1):
    """Return a row with two entries in each other's place."""
    entries = list(row)
    entries[one], entries[other] = entries[other], entries[one]
    return tuple(entries)


def refused(plan):
    with raises(InternalError):
        verify_plan(plan)


def test_a_plan_with_snapshots_is_proven(plan):
    assert verify_plan(plan)
    assert verify_plan(compile_graph(weighted_sum(SHAPES), made_up("host"), CompileOptions("job")))


def test_variables_that_change_places_under_their_versions_are_refused(plan):
    (copy,) = actor_of(plan).launches
    changed = with_copy(plan, inputs=turned(copy.inputs), reads=turned(copy.reads))
    refused(changed)
    both = {name: turned(getattr(copy, name)) for name in ("inputs", "reads", "outputs", "writes")}
    refused(with_copy(plan, **both))


@pytest.mark.parametrize("more", [-4, 4, 1 << 40])
def test_bytes_that_its_tensors_do_not_take_are_refused(plan, more):
    (copy,) = actor_of(plan).launches
    size = dict(copy.attrs)["size_bytes"]
    refused(with_copy(plan, attrs=(("size_bytes", size + more),)))
    refused(with_copy(plan, attrs=()))


def test_a_tensor_that_is_read_and_not_left_is_refused(plan):
    (copy,) = actor_of(plan).launches
    refused(with_copy(plan, outputs=copy.outputs[:-1], writes=copy.writes[:-1]))
    refused(with_copy(plan, inputs=(), outputs=(), reads=(), writes=()))


def test_what_lies_between_copies_is_not_written_over(plan):
    (copy,) = actor_of(plan).launches
    first = plan.views[copy.outputs[0]]
    between = View(first.register, first.type.size_bytes, TensorType(DType.UINT8, (4,)), (1,))
    refused(replace(plan, views=(*plan.views, between)))
    without = {name: getattr(copy, name)[1:] for name in ("inputs", "reads", "outputs", "writes")}
    left_out = with_copy(plan, **{k: (getattr(copy, k)[0], *v[1:]) for k, v in without.items()})
    refused(left_out)


def test_tensors_with_gaps_are_refused(plan):
    (copy,) = actor_of(plan).launches
    view = plan.views[copy.inputs[0]]
    across = replace(view, type=TensorType(view.type.dtype, (5, 3)), strides_bytes=(4, 20))
    changed = with_copy(plan, inputs=(len(plan.views), *copy.inputs[1:]))
    refused(replace(changed, views=(*plan.views, across)))


def test_registers_of_several_slots_are_refused(plan):
    (copy,) = actor_of(plan).launches
    number = plan.views[copy.outputs[0]].register
    registers = list(plan.registers)
    at = registers[number].offsets_bytes[0]
    registers[number] = replace(registers[number], num_slots=2, offsets_bytes=(at, at))
    refused(replace(plan, registers=tuple(registers)))


def test_what_reads_two_memories_or_fills_two_registers_is_refused(plan):
    (copy,) = actor_of(plan).launches
    (fetch,) = actor_of(plan, "snapshot.fetch").launches
    outputs = (*copy.outputs[:-1], fetch.outputs[-1])
    refused(with_copy(plan, outputs=outputs))
