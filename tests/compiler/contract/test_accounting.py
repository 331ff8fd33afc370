from dataclasses import replace

import numpy as np
import pytest
import tiers
from graphs import descend
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.accounting import MemoryCategory, account, chain_launches, memory_categories
from compiler.contract.placement import HOST, Memory, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Arena,
    Launch,
    Port,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    Variable,
    View,
)
from compiler.contract.types import ActorId, DType, RegisterId, StreamId, TensorType
from compiler.graph.graph import SourceLocation
from compiler.graph.target import CompileOptions
from compiler.ops.families.arithmetic import EXP
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import SCRATCH
from compiler.pipeline.pipeline import compile_graph

ALIGNMENT = 8
ROLES = ("parameter", "optimizer", SCRATCH, "counter")
KINDS = (
    RegisterKind.VARIABLE, RegisterKind.CONSTANT, RegisterKind.TEMPORARY, RegisterKind.DATA
)  # fmt: skip
NUM_LAUNCHES = 12


@st.composite
def plans(draw):
    """Registers of all kinds anywhere in an arena, also over each other, as no packing would."""
    count = draw(st.integers(0, 12))
    registers, variables, views, scratch, ported = [], [], [], [], []
    for index in range(count):
        kind = draw(st.sampled_from(KINDS))
        slots = draw(st.integers(1, 2)) if kind is RegisterKind.DATA else 1
        offsets = tuple(draw(st.integers(0, 30)) * ALIGNMENT for _ in range(slots))
        begin = draw(st.integers(0, NUM_LAUNCHES - 1))
        end = draw(st.integers(begin + 1, NUM_LAUNCHES))
        size = draw(st.integers(0, 60))
        register = Register(
            RegisterId(index), f"r{index}", kind, 0, size, slots, offsets, (begin, end), ""
        )
        registers.append(register)
        views.append(View(RegisterId(index), 0, TensorType(DType.UINT8, (size,)), (1,)))
        if kind is RegisterKind.VARIABLE:
            role = draw(st.sampled_from(ROLES))
            variables.append(Variable(f"r{index}", role, index, (), index, index, index))
        elif kind is RegisterKind.TEMPORARY and draw(st.booleans()):
            scratch.append(index)
        elif kind is RegisterKind.DATA:
            ported.append(
                (Port(RegisterId(index), 1), draw(st.sampled_from(["in", "out", "copy"])))
            )
    launches = tuple([launch("work", workspace) for workspace in [*scratch, None]])
    ports = {end: tuple(p for p, where in ported if where == end) for end in ("in", "out", "copy")}
    actors = (
        actor(0, ActorKind.SOURCE, outputs=ports["in"]),
        actor(1, ActorKind.COMPUTE, launches=launches, inputs=ports["in"], outputs=ports["out"]),
        actor(2, ActorKind.COPY, launches=(launch("copy", None),), outputs=ports["copy"]),
        actor(3, ActorKind.SINK, inputs=ports["out"][::2] + ports["copy"]),
    )
    ends = [-(-(o + r.size_bytes) // ALIGNMENT) * ALIGNMENT for r in registers if r.size_bytes
            for o in r.offsets_bytes]  # fmt: skip
    slack = draw(st.integers(0, 3)) * ALIGNMENT
    return Plan(
        "random", (Stream(StreamId(0), HOST, StreamRole.COMPUTE, 0, "compute"),),
        (Arena(HOST, Memory.HOST, max(ends, default=0) + slack, ALIGNMENT),),
        tuple(registers), tuple(views),
        actors, (), tuple(variables), (), (SourceLine("job.py", 1),), (), "", "", (),
    )  # fmt: skip


def launch(op, workspace):
    return Launch(f"k.{op}", op, (), (), (), workspace, "", 0, 1.0)


def actor(number, kind, *, launches=(), inputs=(), outputs=()):
    return Actor(
        ActorId(number), f"a{number}", kind, StreamId(0), launches, inputs, outputs, False, 0.0
    )


def painted(plan):
    """Paint every byte of the arena with the first share that ever uses it; count the colours."""
    order = list(MemoryCategory)
    of = memory_categories(plan)
    canvas = np.full(plan.arenas[0].size_bytes, len(order))
    for register in plan.registers:
        size = -(-register.size_bytes // ALIGNMENT) * ALIGNMENT
        for offset in register.offsets_bytes if size else ():
            window = canvas[offset : offset + size]
            np.minimum(window, order.index(of[register.id]), out=window)
    counts = np.bincount(canvas, minlength=len(order) + 1).tolist()
    return {share: counts[i] for i, share in enumerate(order)}, counts[-1]


@given(plans())
@settings(max_examples=tiers.examples(200), deadline=None)
def test_the_parts_of_an_arena_are_its_bytes_painted_one_by_one(plan):
    proven = account(plan, 0, 0, "")
    expected, unused = painted(plan)
    temporary = expected.pop(MemoryCategory.TEMPORARY) + expected.pop(MemoryCategory.WORKSPACE)
    found = dict(proven.parts)
    assert found == {share.value: size for share, size in expected.items()} | {
        "temporaries": temporary,
        "unused": unused,
    }
    assert sum(found.values()) == plan.arenas[0].size_bytes == proven.peak_bytes
    assert proven.variable_bytes + proven.step_bytes == proven.peak_bytes


@given(plans())
@settings(max_examples=tiers.examples(200), deadline=None)
def test_the_peak_is_the_first_launch_with_the_most_live_bytes(plan):
    of = memory_categories(plan)

    def live(time, is_counted=lambda share: True):
        return sum(
            -(-r.size_bytes // ALIGNMENT) * ALIGNMENT * r.num_slots
            for r in plan.registers
            if r.interval[0] <= time < r.interval[1] and is_counted(of[r.id])
        )

    bytes_at = [live(time) for time in range(NUM_LAUNCHES)]
    proven = account(plan, 0, 0, "")
    assert proven.peak_live_bytes == max(bytes_at)
    assert proven.peak_launch == bytes_at.index(max(bytes_at))
    at_peak = live(proven.peak_launch, lambda share: share is MemoryCategory.WORKSPACE)
    assert proven.peak_workspace_bytes == at_peak


def attending_job(s, every=1):
    """Training with a parameter, its gradient, workspaces of softmax and, perhaps, sums."""
    x = s.input("x", (8, 16), "float32")
    w = s.variable("w", (16, 16), "float32")
    with s.b.at("body", SourceLocation("job.py", 12)):
        h = s.b.emit_one(EXP, s.b.emit_one(MATMUL, x, w))
        h = s.b.emit_one(SOFTMAX, s.b.emit_one(MATMUL, h, w), scale=1.0, causal=False)
        loss = s.b.emit_one(SUM, h, axes=(0, 1), keepdims=False)
    descend(s.b, loss, [w], every=every)
    return s.b.freeze()


@pytest.mark.parametrize(
    "options",
    [{}, {"snapshot_every": 2}, {"num_streams": 2}, {"accumulate": 3, "snapshot_every": 1}],
)
def test_the_account_of_a_compiled_plan_adds_up_and_is_kept_in_its_file(
    op_by_op, sketch, fake_target, options
):
    graph = attending_job(sketch, options.get("accumulate", 1))
    plan = compile_graph(graph, fake_target, CompileOptions("job", verify=True, **options))
    (proven,) = plan.memory
    assert sum(size for _, size in proven.parts) == plan.arenas[0].size_bytes
    assert proven.unused_bytes == 0
    assert proven.parameter_bytes == 16 * 16 * 4
    assert proven.constant_bytes >= 64
    assert (proven.staging_bytes > 0) == ("snapshot_every" in options)
    assert (proven.scratch_bytes > 0) == ("accumulate" in options)
    assert proven.slot_bytes >= 8 * 16 * 4
    assert proven.largest_workspace_bytes == 128  # the 100 of the fake softmax, aligned
    assert proven.peak_live_bytes <= proven.lower_bound_bytes <= proven.peak_bytes
    assert account(plan, 0, proven.lower_bound_bytes, proven.text) == proven
    assert Plan.from_bytes(plan.to_bytes()).memory == plan.memory


def test_the_time_of_intervals_counts_no_copies_of_snapshots(sketch, fake_target):
    options = CompileOptions("job", verify=True, snapshot_every=2)
    plan = compile_graph(attending_job(sketch), fake_target, options)
    launches = chain_launches(plan)
    every = max(register.interval[1] for register in plan.registers)
    assert len(launches) == every < sum(len(actor.launches) for actor in plan.actors)


def test_an_empty_plan_has_an_empty_account():
    plan = Plan(
        "none", (), (Arena(HOST, Memory.HOST, 0, 64),), (), (), (), (), (), (), (), (), "", "", ()
    )  # fmt: skip
    proven = account(plan, 0, 0, "")
    assert {size for _, size in proven.parts} == {0}
    assert (proven.peak_launch, proven.peak_live_bytes) == (0, 0)
    assert (
        account(replace(plan, arenas=(Arena(HOST, Memory.HOST, 64, 64),)), 0, 0, "").unused_bytes
        == 64
    )
