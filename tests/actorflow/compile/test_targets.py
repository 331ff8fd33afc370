"""What the roof tells the compiler of devices."""

import pytest
from error_texts import raises

from actorflow.compile.cuda_target import CudaTarget
from actorflow.compile.hardware import hardware_for, target_for
from actorflow.compile.targets import HostTarget, SimTarget, is_taken_elsewhere, planned_for
from actors.kernels.common.kernel import KernelNeeds
from actors.kernels.cuda.kernel import gpu_named
from actors.kernels.host import catalogue
from compiler.contract.attrs import NO_ATTRS
from compiler.contract.placement import HOST, HOST_SIDE, PINNED, Device, DeviceKind, StreamRole
from compiler.contract.types import DType, TensorType
from compiler.graph.registry import Layout
from compiler.graph.target import CallOperand, KernelCall

CUDA = Device(DeviceKind.CUDA)
SIM0, SIM1 = Device(DeviceKind.SIM), Device(DeviceKind.SIM, 1)
OPERAND = CallOperand(TensorType(DType.FLOAT32, (4,)), Layout(0, (4,)))


def call(op):
    return KernelCall(op, NO_ATTRS, (OPERAND,), (OPERAND,))


def test_the_host_alone_is_told_by_its_kernels_and_has_no_link():
    hardware = hardware_for((HOST,))
    assert hardware.fingerprint == HostTarget().fingerprint
    assert hardware.link(0, HOST_SIDE) is None
    assert hardware.place(0) == HOST.place


def test_a_simulated_device_computes_with_the_kernels_of_the_host():
    simulated = target_for(SIM1)
    assert isinstance(simulated, SimTarget)
    assert simulated.query(call("copy")) == HostTarget().query(call("copy"))
    assert simulated.fingerprint != HostTarget().fingerprint


def test_an_op_without_a_kernel_is_refused_in_the_name_of_the_device():
    with raises(LookupError):
        target_for(SIM1).query(call("wavelet"))


def test_a_gpu_is_told_by_its_description_alone():
    target = target_for(CUDA, "h200")
    gpu = gpu_named("h200")
    assert isinstance(target, CudaTarget)
    assert target.message_ns == gpu.event_ns
    assert target.memory_bytes == gpu.memory_bytes
    assert target.link.in_ns(10**9) == gpu.link_latency_ns + 1e9 / gpu.link_bytes_per_ns
    assert gpu.fingerprint in target.fingerprint
    assert target.alignment == 256


def test_what_a_gpu_lacks_is_refused_in_the_name_of_the_device():
    with raises(LookupError):
        target_for(CUDA, "h200").query(call("wavelet"))


def test_hardware_of_several_devices_is_told_by_all_of_them_in_order():
    both = hardware_for((HOST, SIM1)).fingerprint
    assert both not in (hardware_for((SIM1, HOST)).fingerprint, hardware_for((HOST,)).fingerprint)
    assert hardware_for((SIM0,)).fingerprint != hardware_for((SIM1,)).fingerprint


def test_a_copy_to_a_device_takes_its_link_and_one_between_devices_both():
    hardware = hardware_for((HOST, SIM0, SIM1))
    into, between = hardware.link(1, HOST_SIDE), hardware.link(1, 2)
    assert into is not None
    assert into.in_ns(250_000) == 20_000.0
    assert hardware.link(1, 0) == into
    assert between is not None
    assert between.in_ns(250_000) == 30_000.0


@pytest.mark.parametrize(
    ("start", "end", "stream"),
    [
        (HOST_SIDE, 1, (1, StreamRole.H2D)),
        (1, HOST_SIDE, (1, StreamRole.D2H)),
        (1, 2, (1, StreamRole.D2H)),
        (0, 1, (1, StreamRole.H2D)),
        (1, 0, (1, StreamRole.D2H)),
        (0, HOST_SIDE, (0, StreamRole.D2H)),
        (HOST_SIDE, 0, (0, StreamRole.H2D)),
    ],
)
def test_a_copy_runs_on_the_stream_of_the_device_that_it_enters_or_else_leaves(start, end, stream):
    assert hardware_for((HOST, SIM0, SIM1)).copy_stream(start, end) == stream


def test_a_wait_between_two_devices_costs_what_the_slower_one_takes():
    hardware = hardware_for((HOST, SIM0, SIM1))
    assert hardware.message_ns(1, 2) == SimTarget.message_ns
    assert hardware.message_ns(0, 1) == hardware.message_ns(1, 0) == HostTarget.message_ns


def test_pinned_memory_suits_the_device_with_the_largest_alignment():
    hardware = hardware_for((HOST, SIM0))
    assert hardware.place(HOST_SIDE) == PINNED
    assert [hardware.alignment(number) for number in (0, 1, HOST_SIDE)] == [64, 256, 256]


@pytest.fixture
def of_the_user():
    """A kernel that somebody has for the host."""

    class Mine:
        name, op = "mine.gelu", "gelu"

        def query(self, attrs, inputs, outputs):
            return KernelNeeds()

        def bind(self, attrs, inputs, outputs, workspace):
            return lambda: None

    catalogue.register(Mine())
    yield
    catalogue.unregister("mine.gelu")


def test_a_kernel_for_the_host_keeps_no_node_of_a_gpu_alone_and_that_is_said_once(
    of_the_user, caplog
):
    assert is_taken_elsewhere(call("gelu"), 0)
    with planned_for((HOST, CUDA)):
        assert is_taken_elsewhere(call("gelu"), 0)
        assert not is_taken_elsewhere(call("gelu"), 1)
        assert not is_taken_elsewhere(call("gelu"), 1)
    assert [record.getMessage() for record in caplog.records] == [
        "kernel 'mine.gelu' runs on the host only: on CUDA devices op 'gelu' has actorflow's"
        " kernels"
    ]


def test_an_op_that_only_somebodys_kernel_computes_is_refused_on_a_gpu_with_what_to_do(of_the_user):
    with pytest.raises(LookupError) as caught:
        target_for(CUDA, "h200").query(call("gelu"))
    assert str(caught.value.args[0]).endswith(
        "; the kernel 'mine.gelu' computes it on the host alone. State the op as a program"
        " (@af.op), which every device computes, or run it on the host:"
        ' @af.job(devices=["cuda:0", "host:0"]) and with af.device("host:0"):'
    )
