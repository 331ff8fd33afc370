import dataclasses

import numpy as np
import pytest
from error_texts import raises

from actors.device.host import HostDevice
from actors.loop.bound import PlanMemory
from actors.loop.load import load as load_on
from actors.loop.load import num_phases
from compiler.contract.errors import DeviceError, InternalError, OutOfMemory
from compiler.contract.placement import HOST, Memory
from compiler.contract.plan_tables import ActorKind, Arena, Constant, RegisterKind, Variable
from compiler.contract.types import DType, TensorType, contiguous_strides


def load(plan, ports, kernels):
    return load_on(plan, ports, (HostDevice(kernels),))


@pytest.fixture
def small(plan_maker):
    """A step that reads a batch of two slots, a weight and scratch, and writes one metric."""
    make = plan_maker()
    batch, loss = make.edge("batch", 2, "image"), make.edge("loss", 1, "loss")
    weight = make.view(make.register("weight", RegisterKind.VARIABLE))
    scratch = make.view(make.register("scratch", RegisterKind.TEMPORARY), DType.UINT8, (8,))
    make.variables.append(Variable("net.weight", "parameter", weight, (), 0, 0, 0))
    batch_view, loss_view = make.field_view(batch), make.field_view(loss)
    launches = [
        make.launch("grad", [batch_view, weight], [loss_view], [("axis", 1)], scratch),
        make.launch("update", [weight], [weight]),
    ]
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor(
        "step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(loss, 1)], launches=launches
    )
    make.actor("log", ActorKind.SINK, inputs=[(loss, 1)])
    return make


def address(array):
    return array.__array_interface__["data"][0]


def load_small(make, fake_port, fake_kernel):
    ports = {"data": fake_port(), "log": fake_port()}
    kernels = {"grad": fake_kernel(), "update": fake_kernel()}
    plan = make.plan()
    return load(plan, ports, kernels), ports, kernels, plan


def test_operands_are_views_at_planned_offsets_in_every_slot(small, fake_port, fake_kernel):
    _, _, kernels, plan = load_small(small, fake_port, fake_kernel)
    base = address(kernels["update"].bound[0][1][0]) - plan.registers[2].offsets_bytes[0]
    assert base % 64 == 0
    (first, second) = kernels["grad"].bound
    assert [address(a) - base for a in first[1] + first[2]] == [0, 192, 128]
    assert [address(a) - base for a in second[1] + second[2]] == [64, 192, 128]
    assert first[0] == {"axis": 1}
    assert (first[3].dtype, first[3].shape) == (np.uint8, (8,))


def test_a_borrowed_variable_is_read_where_it_lies(small, fake_port, fake_kernel):
    ports = {"data": fake_port(), "log": fake_port()}
    kernels = {"grad": fake_kernel(), "update": fake_kernel()}
    plan = small.plan()
    type_ = plan.views[plan.variables[0].view].type
    array = np.full(type_.shape, 3, type_.dtype.value)
    memory = PlanMemory(borrowed={"net.weight": array})
    bound = load_on(plan, ports, (HostDevice(kernels),), memory=memory)
    assert {address(k[1][1]) for k in kernels["grad"].bound} == {address(array)}
    assert bound.variables.read("net.weight") is array
    bound.variables.write("net.weight", array)
    with raises(InternalError):
        bound.variables.write("net.weight", array.copy())


def test_a_launch_without_slots_is_bound_once_for_all_phases(small, fake_port, fake_kernel):
    bound, _, kernels, _ = load_small(small, fake_port, fake_kernel)
    assert len(kernels["update"].bound) == 1
    even, odd = bound.chains[1]
    assert even[0] is not odd[0]
    assert even[1] is odd[1]


def test_a_port_sees_its_fields_by_name_once_per_phase(small, fake_port, fake_kernel):
    bound, ports, kernels, _ = load_small(small, fake_port, fake_kernel)
    tokens = ports["data"].bound
    assert [[sorted(token) for token in phase] for phase in tokens] == [[["image"]], [["image"]]]
    seen = [address(k[1][0]) for k in kernels["grad"].bound]
    assert [address(phase[0]["image"]) for phase in tokens] == seen
    assert len(bound.chains[0]) == 2
    assert len(bound.chains[2]) == 1


def test_what_one_launch_writes_the_next_reads(small, fake_port, fake_kernel):
    ports = {"data": fake_port(), "log": fake_port()}

    def multiply(inputs, outputs):
        np.multiply(inputs[0], inputs[1], out=outputs[0])

    kernels = {"grad": fake_kernel(multiply), "update": fake_kernel()}
    bound = load(small.plan(), ports, kernels)
    bound.variables.write("net.weight", np.float32(3))
    for phase in range(2):
        ports["data"].bound[phase][0]["image"][:] = phase + 1
    for phase in range(2):
        for launch in bound.chains[1][phase]:
            launch()
        assert ports["log"].bound[0][0]["loss"].tolist() == [3 * (phase + 1)] * 2


def test_strided_views_and_constants_are_filled_from_the_plan(plan_maker, fake_port, fake_kernel):
    make = plan_maker()
    table = make.register("table", RegisterKind.CONSTANT, size=24)
    whole = make.view(table, DType.FLOAT32, (2, 3))
    turned = make.view(table, DType.FLOAT32, (3, 2))
    make.views[turned] = dataclasses.replace(
        make.views[turned], strides_bytes=contiguous_strides((2, 3), 4)[::-1]
    )
    data = np.arange(6, dtype=np.float32)
    make.constants.append(Constant(whole, data.tobytes(), 0))
    go = make.edge("go", 1)
    make.actor("data", ActorKind.SOURCE, outputs=[(go, 1)])
    make.actor("step", ActorKind.COMPUTE, inputs=[(go, 1)], launches=[make.launch("k", [turned])])
    kernel = fake_kernel()
    load(make.plan(), {"data": fake_port()}, {"k": kernel})
    assert kernel.bound[0][1][0].tolist() == data.reshape(2, 3).T.tolist()


@pytest.mark.parametrize(
    ("ports", "phases"),
    [([], 1), ([(1, 1)], 1), ([(2, 1)], 2), ([(4, 2)], 2), ([(3, 2)], 3), ([(2, 1), (3, 1)], 6)],
)
def test_phases_are_the_firings_until_every_slot_comes_back(plan_maker, ports, phases):
    make = plan_maker()
    registers = [(make.edge(f"r{i}", slots), rate) for i, (slots, rate) in enumerate(ports)]
    make.actor("step", ActorKind.COMPUTE, inputs=registers)
    plan = make.plan()
    assert num_phases(plan, plan.actors[0]) == phases
    slots_at = [
        tuple((k * rate) % slots for slots, rate in ports) for k in range(3 * max(phases, 1))
    ]
    assert next(k for k in range(1, len(slots_at)) if slots_at[k] == slots_at[0]) == phases


def test_credits_without_bytes_add_no_phase(plan_maker):
    make = plan_maker()
    batch = make.edge("batch", 2)
    updated = make.register("updated", RegisterKind.CONTROL, 997)
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(updated, 1)])
    plan = make.plan()
    assert num_phases(plan, plan.actors[0]) == 2


@pytest.fixture
def gather(plan_maker, fake_port):
    """A sink that takes two tokens of three slots per firing, and is flushed."""
    make = plan_maker()
    rows = make.edge("rows", 3)
    make.actor("data", ActorKind.SOURCE, outputs=[(rows, 1)])
    make.actor("log", ActorKind.SINK, inputs=[(rows, 2)], is_flushed=True)
    ports = {"data": fake_port(), "log": fake_port()}
    return load(make.plan(), ports, {}), ports


def test_a_rate_gives_a_port_that_many_tokens_in_order(gather):
    _, ports = gather
    slots = [address(phase[0]["x"]) for phase in ports["data"].bound]
    seen = [[slots.index(address(t["x"])) for t in phase] for phase in ports["log"].bound]
    assert seen == [[0, 1], [2, 0], [1, 2]]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_flushed_sink_is_bound_to_the_tokens_that_are_left(gather, num_tokens):
    bound, ports = gather
    slots = [address(phase[0]["x"]) for phase in ports["data"].bound]
    bound.bind_flush(1, 4, (num_tokens,))
    tokens = ports["log"].bound[-1]
    assert [slots.index(address(t["x"])) for t in tokens] == [2][:num_tokens]


def test_a_flushed_chain_of_kernels_is_that_of_its_phase(small, fake_port, fake_kernel):
    bound, _, _, _ = load_small(small, fake_port, fake_kernel)
    assert bound.bind_flush(1, 5, (0,)) is bound.chains[1][1]


def test_release_lets_go_of_the_memory(small, fake_port, fake_kernel):
    bound, _, _, _ = load_small(small, fake_port, fake_kernel)
    bound.release()
    bound.release()
    assert bound.chains == ()
    with raises(InternalError):
        bound.variables.read("net.weight")


def test_who_has_the_variables_keeps_their_memory_and_reads_copies(small, fake_port, fake_kernel):
    bound, _, kernels, _ = load_small(small, fake_port, fake_kernel)
    variables, (weight, *_) = bound.variables, kernels["update"].bound[0][1]
    variables.write("net.weight", np.array([1, 2], np.float32))
    bound.release()
    kept = variables.read("net.weight")
    weight[:] = 9
    assert (kept.tolist(), variables.read("net.weight").tolist()) == ([1, 2], [9, 9])


class _Released(dict):
    """What is borrowed, which another thread releases as soon as somebody has asked for it."""

    is_asked = False

    def __contains__(self, name):
        was_here = super().__contains__(name)
        if self.is_asked:
            self.clear()
        return was_here


def test_a_variable_may_be_released_while_it_is_read(small, fake_port, fake_kernel):
    array = np.array([1, 2], np.float32)
    memory = PlanMemory(borrowed=_Released({"net.weight": array}))
    ports = {"data": fake_port(), "log": fake_port()}
    device = HostDevice({"grad": fake_kernel(), "update": fake_kernel()})
    bound = load_on(small.plan(), ports, (device,), memory=memory)
    memory.borrowed.is_asked = True
    assert bound.variables.read("net.weight") is array


def test_missing_and_unknown_ports_are_named(small, fake_port):
    with raises(ValueError):
        load(small.plan(), {"data": fake_port(), "date": fake_port()}, {})


def test_a_missing_kernel_is_named_with_the_users_line(small, fake_port, fake_kernel):
    ports = {"data": fake_port(), "log": fake_port()}
    with raises(InternalError):
        load(small.plan(), ports, {"grad": fake_kernel()})


def test_an_arena_that_the_machine_cannot_give_is_out_of_memory(small, fake_port, fake_kernel):
    ports = {"data": fake_port(), "log": fake_port()}
    with raises(OutOfMemory):
        load(small.plan(1 << 60), ports, {"grad": fake_kernel(), "update": fake_kernel()})


def test_a_view_outside_its_arena_is_our_bug(small, fake_port, fake_kernel):
    ports = {"data": fake_port(), "log": fake_port()}
    with raises(InternalError):
        load(small.plan(128), ports, {"grad": fake_kernel(), "update": fake_kernel()})


def test_a_launch_on_an_edge_without_a_port_or_with_several_tokens_is_our_bug(
    plan_maker, fake_kernel
):
    make = plan_maker()
    batch = make.edge("batch", 2)
    launch = make.launch("k", [make.field_view(batch)])
    make.actor("step", ActorKind.COMPUTE, launches=[launch])
    with raises(InternalError):
        load(make.plan(), {}, {"k": fake_kernel()})
    make.actors.clear()
    make.actor("step", ActorKind.COMPUTE, inputs=[(batch, 2)], launches=[launch])
    with raises(InternalError):
        load(make.plan(), {}, {"k": fake_kernel()})


def test_a_constant_of_the_wrong_size_is_our_bug(plan_maker):
    make = plan_maker()
    view = make.view(make.register("table", RegisterKind.CONSTANT))
    make.constants.append(Constant(view, b"abc", 0))
    with raises(InternalError):
        load(make.plan(), {}, {})


class FakeCommunicator:
    """Gives ordinary memory, and writes down what was bound."""

    def __init__(self):
        self.bound, self.blocks = [], []

    def allocate(self, size_bytes, alignment):
        assert alignment >= 64
        self.blocks.append(np.zeros(size_bytes, np.uint8))
        return self.blocks[-1]

    def beside(self):
        return FakeCommunicator

    def bind(self, call, inputs, outputs):
        self.bound.append((call, inputs, outputs))
        return lambda: None


@pytest.fixture
def meeting(plan_maker):
    """A chain and a collective after it, over a register of three slots in shared memory."""
    make = plan_maker()
    batch, whole = make.edge("batch", 2), make.edge("whole", 3)
    first = make.launch("copy", [make.field_view(batch)], [make.field_view(whole)])
    reduce = make.launch(
        "all_reduce",
        [make.field_view(whole)],
        [make.field_view(whole)],
        [("group", "data"), ("num_ranks", 2), ("order", 4)],
    )
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    make.actor("step", ActorKind.COMPUTE, [(batch, 1)], [(whole, 1)], [first])
    make.actor("reduce", ActorKind.COMM, [(whole, 1)], launches=[reduce])
    plan = make.plan()
    shared = Arena(HOST, Memory.SHARED, plan.registers[1].offsets_bytes[-1] + 64, 64)
    registers = [dataclasses.replace(r, arena=r.id) for r in plan.registers]
    return dataclasses.replace(plan, arenas=(*plan.arenas, shared), registers=tuple(registers))


def test_collectives_are_bound_by_the_communicator_in_every_slot(meeting, fake_port, fake_kernel):
    communicator, kernel = FakeCommunicator(), fake_kernel()
    devices = (HostDevice({"copy": kernel}),)
    load_on(meeting, {"data": fake_port()}, devices, communicator=communicator)
    calls = [call for call, _, _ in communicator.bound]
    assert len(calls) == 3
    call = calls[0]
    assert (call.op, call.group, call.num_ranks, call.order) == ("op_all_reduce", "data", 2, 4)
    assert (call.site.actor, call.site.stream) == ("reduce", 0)
    assert call.reads == call.makes == TensorType(DType.FLOAT32, (2,))
    assert call.site.where == "scope.all_reduce: op_all_reduce at train.py:4"
    (block,) = communicator.blocks
    seen = {
        address(array) - address(block) for _, arrays, _ in communicator.bound for array in arrays
    }
    assert seen == set(meeting.registers[1].offsets_bytes)
    assert {address(left) - address(block) for _, _, (left,), _ in kernel.bound} == seen


def test_a_plan_of_several_ranks_needs_a_way_to_the_others(meeting, fake_port, fake_kernel):
    with raises(DeviceError):
        load(meeting, {"data": fake_port()}, {"copy": fake_kernel()})
