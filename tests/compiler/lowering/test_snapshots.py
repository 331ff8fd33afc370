"""Snapshots of variables: neighbours are one copy, which says what it reads and what it leaves."""

import pytest
from graphs import Target, variable, weighted_sum

from actors.race.race import check_races
from compiler.contract.placement import HOST_SIDE, Device, DeviceKind
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import CompileOptions, Hardware, Link, one_device
from compiler.lowering.lower import lower
from compiler.ops.families.arithmetic import EXP, MUL
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import COPY_TO
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import verify_plan

SHAPES = [(3, 5), (7,), (), (0, 4), (33,)]
LINK = Link(25.0, 50.0, 5_000.0)
SIM = one_device(Target("made-up", link=LINK), Device(DeviceKind.SIM))


def planned(graph, hardware, **options):
    return compile_graph(graph, hardware, CompileOptions("job", verify=True, **options))


def copies(plan):
    """Return the launches of each actor that copies variables for a checkpoint."""
    return {a.name: a.launches for a in plan.actors if a.name.startswith("snapshot")}


def staged(plan):
    """Return the fields that the writer of checkpoints sees."""
    writer = next(a for a in plan.actors if a.name == "checkpoint")
    return [f for f in plan.fields if f.register == writer.inputs[0].register]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("hardware", [one_device(Target("made-up")), SIM], ids=["host", "sim"])
def test_all_variables_of_a_device_are_one_copy_and_gradient_sums_and_constants_are_not_in_it(
    hardware, every
):
    plan = planned(weighted_sum(SHAPES, every), hardware, snapshot_every=2, accumulate=every)
    assert plan.constants
    assert ("scratch" in [v.role for v in plan.variables]) == (every > 1)
    stages = copies(plan)
    for (copy,) in stages.values():
        assert copy.op == "copy_block"
        assert len(copy.outputs) == len(copy.inputs) == len(plan.state) == 3 * len(SHAPES) + 1
    (first,) = stages["snapshot"]
    read = {plan.views[v].register: n for v, n in zip(first.inputs, first.reads, strict=True)}
    assert read == {plan.views[v.view].register: v.between for v in plan.state}
    left = dict(zip(copy.outputs, copy.writes, strict=True))
    assert {f.view: f.version for f in staged(plan)} == left


def test_a_checkpoint_has_its_variables_in_the_order_of_the_plan_wherever_they_lie():
    plan = planned(weighted_sum(SHAPES), SIM, snapshot_every=2)
    found = [(f.name, plan.views[f.view].type) for f in staged(plan)]
    assert found == [(v.name, plan.views[v.view].type) for v in plan.state]


def test_a_copy_of_many_waits_once_for_the_link():
    plan = planned(weighted_sum(SHAPES), SIM, snapshot_every=2)
    (fetch,) = copies(plan)["snapshot.fetch"]
    size = dict(fetch.attrs)["size_bytes"]
    assert fetch.duration_ns == LINK.latency_ns + size / LINK.out_bytes_per_ns
    apart = sum([plan.views[view].type.size_bytes for view in fetch.inputs])
    assert apart < size < apart + len(plan.state) * plan.arenas[0].alignment


def of_two_devices(width):
    """Three variables on the first device, and two on the second; the product goes out."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(width,), place=HOST_SIDE)
    made = b.emit_one(COPY_TO, x, to=0, bucket=0)
    for index in range(3):
        made = b.emit_one(MUL, made, variable(b, f"near{index}", (width,)))
    made = b.emit_one(COPY_TO, made, to=1, bucket=1)
    with b.on(1):
        for index in range(2):
            made = b.emit_one(MUL, made, variable(b, f"far{index}", (width,)))
        made = b.emit_one(EXP, made)
    b.outputs = [Output("y", b.emit_one(COPY_TO, made, to=HOST_SIDE, bucket=2))]
    return b.freeze()


@pytest.mark.parametrize(("width", "num_copies"), [(128, [3, 2]), (64, [1, 1, 1, 2])])
def test_variables_of_each_device_are_one_copy_where_their_copies_have_the_same_gaps(
    width, num_copies
):
    """The host's side begins everything at 512 bytes, and the first device at 256."""
    targets = tuple([Target(name, link=LINK) for name in ("one", "two")])
    targets[0].alignment, targets[1].alignment = 256, 512
    hardware = Hardware((Device(DeviceKind.SIM), Device(DeviceKind.SIM, 1)), targets)
    options = CompileOptions("job", is_training=False, snapshot_every=2)
    plan = lower(of_two_devices(width), hardware, options, "hash")
    verify_plan(plan)
    check_races(plan)
    (launches,) = copies(plan).values()
    assert [len(copy.inputs) for copy in launches] == num_copies
    names = [v.name for v in plan.state]
    assert [f.name for f in staged(plan)] == names
