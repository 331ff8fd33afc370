from dataclasses import replace

import pytest

from actors.kernels.common import cost
from actors.kernels.common.cost import HELPERS_SPIN_NS, REFERENCE, reference_of_threads
from actors.kernels.common.kernel import BytePass, KernelPlan, Work
from actors.kernels.host.calibration import GRANULE_BYTES, firing_prices
from actors.kernels.host.calibration import estimate_launch_costs as prices_of
from compiler.contract.placement import HOST, Memory, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Arena,
    Launch,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    View,
)
from compiler.contract.types import (
    ActorId,
    DType,
    RegisterId,
    StreamId,
    TensorType,
    contiguous_strides,
)

FREE = replace(REFERENCE, miss_ns=(0.0,) * len(REFERENCE.miss_ns))
ONLY_MISSES = replace(REFERENCE, call_ns=0.0, loop_ns=0.0, pass_ns=(0.0,) * len(REFERENCE.pass_ns))


def recost(plan, rates):
    """Return the durations alone."""
    return tuple([tuple([price.duration_ns for price in own]) for own in prices_of(plan, rates)])


def plan_of(launches, num_views, elements, offsets=None):
    """One compute actor; view i is a float32 vector on register i."""
    size = 4 * elements
    offsets = offsets or [size * i for i in range(num_views)]
    registers = tuple(
        [
            Register(RegisterId(i), f"r{i}", RegisterKind.TEMPORARY, 0, size, 1, (o,), (0, 1), "")
            for i, o in enumerate(offsets)
        ]
    )
    type_ = TensorType(DType.FLOAT32, (elements,))
    strides = contiguous_strides((elements,), 4)
    views = tuple([View(RegisterId(i), 0, type_, strides) for i in range(num_views)])
    stream = StreamId(0)
    actors = (
        Actor(ActorId(0), "data", ActorKind.SOURCE, stream, (), (), (), False, 77.0),
        Actor(ActorId(1), "step", ActorKind.COMPUTE, stream, launches, (), (), False, 1.0),
    )
    return Plan(
        "test", (Stream(stream, HOST, StreamRole.COMPUTE, 0, "compute"),),
        (Arena(HOST, Memory.HOST, max(offsets) + size, 64),),
        registers, views, actors, (), (), (), (SourceLine("a.py", 1),), (), "", "", (),
    )  # fmt: skip


def launch(inputs, output, kernel="numpy.copy", op="copy"):
    return Launch(kernel, op, (), inputs, (output,), None, "", 0, 123.0)


def test_with_nothing_to_miss_a_launch_takes_its_own_work():
    plan = plan_of((launch((0,), 1),), 2, 1 << 16)
    (copy,) = recost(plan, FREE)[1]
    size = 4 << 16
    assert copy == pytest.approx(FREE.call_ns + size * FREE.pass_ns[0])


def test_bytes_are_charged_by_how_long_ago_they_were_touched():
    # In turn: 4 vectors of 8 MiB, each touched once a round, so all are 32 MiB away.
    plan = plan_of((launch((0,), 1), launch((2,), 3)), 4, 2 << 20)
    for duration in recost(plan, ONLY_MISSES)[1]:
        assert duration == pytest.approx((16 << 20) * ONLY_MISSES.miss_ns_at(32 << 20), rel=0.05)


def test_what_the_launch_before_has_just_written_is_still_there():
    again = plan_of((launch((0,), 1), launch((1,), 2)), 3, 1 << 16)
    first, second = recost(again, ONLY_MISSES)[1]
    assert second < first


def test_bytes_are_the_same_bytes_under_another_register():
    size = 4 << 16
    launches = (launch((0,), 1), launch((2,), 3))
    shared = plan_of(launches, 4, 1 << 16, offsets=[0, size, size, 2 * size])
    apart = plan_of(launches, 4, 1 << 16)
    assert sum(recost(shared, ONLY_MISSES)[1]) < sum(recost(apart, ONLY_MISSES)[1])


def test_a_small_chain_misses_nothing():
    plan = plan_of((launch((0,), 1),), 2, GRANULE_BYTES // 16)
    assert recost(plan, ONLY_MISSES)[1] == (0.0,)


@pytest.fixture
def have_kernels(monkeypatch):
    """Return what makes some binders, by name, the only ones that there are."""

    def only(binders):
        name = "actors.kernels.host.calibration.catalogue.kernels_by_name"
        monkeypatch.setattr(name, lambda: binders)

    return only


@pytest.mark.parametrize("kernel", ["elsewhere.copy", "mute.copy"])
def test_a_kernel_that_does_not_describe_its_work_keeps_the_plans_estimate(kernel, have_kernels):
    class Mute:
        def plan(self, attrs, inputs, outputs):
            return KernelPlan(cost.KernelNeeds(duration_ns=5.0), None)

    have_kernels({"mute.copy": Mute()})
    plan = plan_of((launch((0,), 1, kernel),), 2, 1 << 16)
    assert recost(plan, REFERENCE)[1] == (123.0,)


def test_an_actor_takes_what_its_launches_take_and_without_any_what_the_plan_says():
    plan = plan_of((launch((0,), 1), launch((1,), 0)), 2, 1 << 16)
    durations = tuple([price.duration_ns for price in firing_prices(plan, FREE)])
    assert durations == (77.0, sum(recost(plan, FREE)[1]))


def test_helpers_sleep_where_a_chain_begins_and_after_long_launches_on_one_thread(have_kernels):
    """Shared launches (S) and short (s) and long (l) ones on one thread: which of them wake."""
    sizes = {"S": (1e6, True), "s": (1000.0, True), "l": (2 * HELPERS_SPIN_NS, False)}

    class Described:
        def __init__(self, size, is_native):
            self.work = Work(0, passes=((BytePass.EXP, size),), is_native=is_native)

        def plan(self, attrs, inputs, outputs):
            return KernelPlan(cost.KernelNeeds(work=self.work), None)

    have_kernels({name: Described(*size) for name, size in sizes.items()})
    wake_ns = 30_000.0
    rates = replace(
        reference_of_threads(2), pass_ns=(1.0,) * len(BytePass), miss_ns=(0.0,) * 5,
        compute_gain=2.0,
    )  # fmt: skip
    plan = plan_of(tuple([launch((0,), 1, name) for name in "SSsSlS"]), 2, 16)
    slept = recost(plan, replace(rates, wake_ns=wake_ns))[1]
    added = [x - y for x, y in zip(slept, recost(plan, rates)[1], strict=True)]
    assert added == [wake_ns, 0, 0, 0, 0, wake_ns]
