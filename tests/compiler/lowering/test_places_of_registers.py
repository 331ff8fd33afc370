"""Where the registers of a plan lie, and the streams of its chains, on several devices."""

import pytest
from error_texts import raises
from graphs import Target, descend, made_up, variable

from actors.race.race import check_races
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST, HOST_SIDE, PINNED, Device, DeviceKind, StreamRole
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import CompileOptions, Hardware, Link
from compiler.lowering.lower import lower
from compiler.ops.families.arithmetic import EXP, MUL, NEG
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import COPY_TO
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import verify_plan

SIM, OTHER = Device(DeviceKind.SIM), Device(DeviceKind.SIM, 1)
LINK = Link(25.0, 25.0, 10_000.0)
FAST = 2_000.0


def target(name, link=LINK, alignment=256):
    made = Target(name, link=link, scratch=lambda call: 40 if call.op == "exp" else 0)
    made.message_ns, made.alignment = FAST, alignment
    return made


PAIR = Hardware((SIM, OTHER), (target("one"), target("two", alignment=512)))
MIXED = Hardware((HOST, OTHER), (Target("host"), target("two", alignment=512)))


def there_and_back():
    """exp on the first device, twice neg and a product on the second, exp on the first."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(64, 64), place=HOST_SIDE)
    near = b.emit_one(EXP, b.emit_one(COPY_TO, x, to=0, bucket=0))
    moved = b.emit_one(COPY_TO, near, to=1, bucket=1)
    with b.on(1):
        far = b.emit_one(MUL, b.emit_one(NEG, moved), moved)
    again = b.emit_one(EXP, b.emit_one(COPY_TO, far, to=0, bucket=2))
    b.outputs = [Output("y", b.emit_one(COPY_TO, again, to=HOST_SIDE, bucket=3))]
    return b.freeze()


def there_and_back_from_host():
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(64, 64))
    near = b.emit_one(EXP, b.emit_one(EXP, x))
    with b.on(1):
        far = b.emit_one(
            MUL,
            *[
                b.emit_one(NEG, b.emit_one(COPY_TO, v, to=1, bucket=i))
                for i, v in enumerate((x, near))
            ],
        )
    b.outputs = [Output("y", b.emit_one(EXP, b.emit_one(COPY_TO, far, to=0, bucket=2)))]
    return b.freeze()


def planned(hardware, graph):
    plan = lower(graph, hardware, CompileOptions("job", is_training=False), "hash")
    verify_plan(plan)
    check_races(plan)
    return plan


@pytest.fixture
def pair():
    return planned(PAIR, there_and_back())


def place_by_launch(plan):
    """Return, for each launch, its op, its stream, and the places of what it touches."""
    rows = []
    for actor in plan.actors:
        for launch in actor.launches:
            scratch = () if launch.workspace is None else (launch.workspace,)
            registers = [plan.views[v].register for v in launch.inputs + launch.outputs + scratch]
            places = [plan.arenas[plan.registers[r].arena].place for r in registers]
            rows.append((launch.op, plan.streams[actor.stream], places))
    return rows


def test_two_devices_have_an_arena_each_and_the_hosts_side_one_of_its_own(pair):
    assert [arena.place for arena in pair.arenas] == [SIM.place, OTHER.place, PINNED]
    assert [arena.alignment for arena in pair.arenas] == [256, 512, 512]
    assert all(arena.size_bytes for arena in pair.arenas)
    assert len(pair.memory) == 3


def test_what_computes_touches_the_memory_of_its_device_alone(pair):
    computing = [row for row in place_by_launch(pair) if row[1].role is StreamRole.COMPUTE]
    assert [(op, stream.device) for op, stream, _ in computing] == [
        ("exp", SIM), ("neg", OTHER), ("mul", OTHER), ("exp", SIM),
    ]  # fmt: skip
    for _, stream, places in computing:
        assert set(places) == {stream.device.place}


def test_copies_run_on_the_stream_that_leaves_a_device_or_enters_it_from_the_host(pair):
    copies = [row for row in place_by_launch(pair) if row[0] == "copy_to"]
    found = {(*places, stream.device, stream.role) for _, stream, places in copies}
    assert found == {
        (PINNED, SIM.place, SIM, StreamRole.H2D),
        (SIM.place, OTHER.place, SIM, StreamRole.D2H),
        (OTHER.place, SIM.place, OTHER, StreamRole.D2H),
        (SIM.place, PINNED, SIM, StreamRole.D2H),
    }
    kinds = {a.kind for a in pair.actors if any(x.op == "copy_to" for x in a.launches)}
    assert kinds == {ActorKind.COPY}


def test_streams_of_other_devices_than_the_first_are_called_after_them(pair):
    names = {stream.name: stream.device for stream in pair.streams}
    assert names["compute"] == names["h2d"] == names["d2h"] == SIM
    assert names["sim:1 compute"] == names["sim:1 d2h"] == OTHER
    assert names["data"] == HOST
    assert len(names) == len(pair.streams)


def test_what_the_host_works_on_and_a_device_copies_lies_pinned():
    plan = planned(MIXED, there_and_back_from_host())
    assert [arena.place for arena in plan.arenas] == [HOST.place, OTHER.place, PINNED]
    for op, stream, places in place_by_launch(plan):
        if op == "copy_to":
            assert set(places) == {PINNED, OTHER.place}
            assert stream.device == OTHER


def test_variables_lie_where_their_node_says(op_by_op):
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(8, 8), place=HOST_SIDE)
    with b.on(1):
        w = variable(b, "w", (8, 8))
        product = b.emit_one(MUL, w, b.emit_one(COPY_TO, x, to=1, bucket=0))
        loss = b.emit_one(SUM, product, axes=(0, 1), keepdims=False)
        descend(b, loss, [w])
    plan = compile_graph(b.freeze(), PAIR, CompileOptions("job"))
    (register,) = [r for r in plan.registers if r.kind is RegisterKind.VARIABLE]
    assert plan.arenas[register.arena].place == OTHER.place


def test_a_launch_is_priced_and_named_by_its_own_device(pair):
    kernels = [launch.kernel for actor in pair.actors for launch in actor.launches]
    assert [k for k in kernels if k.startswith("two.")] == ["two.neg", "two.mul", "two.copy"]


def test_an_op_without_a_kernel_on_its_device_is_refused_with_the_users_line():
    class Picky(Target):
        def query(self, call):
            if call.op == "mul":
                raise LookupError("sim:1 has no kernel for op 'mul'")
            return super().query(call)

    hardware = Hardware((SIM, OTHER), (made_up("one").targets[0], Picky("two", link=LINK)))
    with raises(CompileError):
        planned(hardware, there_and_back())
