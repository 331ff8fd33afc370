import re
from dataclasses import replace

import pytest
from graphs import descend

from compiler.contract.placement import Device, DeviceKind
from compiler.contract.plan_tables import Recomputation
from compiler.graph.graph import SourceLocation
from compiler.graph.target import CompileOptions
from compiler.ops.families.normalisation import SOFTMAX
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.pipeline.pipeline import compile_graph
from compiler.pipeline.printer import arena_lines, overview, print_plan, summarise


@pytest.fixture
def plan(sketch, fake_target, op_by_op):
    x = sketch.input("x", (64, 64), "float32")
    w = sketch.variable("w", (64, 64), "float32")
    with sketch.b.at("body", SourceLocation("job.py", 12)):
        h = sketch.b.emit_one(SOFTMAX, sketch.b.emit_one(MATMUL, x, w), scale=1.0, causal=False)
        loss = sketch.b.emit_one(SUM, h, axes=(0, 1), keepdims=False)
    descend(sketch.b, loss, [w])
    return compile_graph(sketch.b.freeze(), fake_target, CompileOptions("job", snapshot_every=2))


def test_the_summary_tells_parameters_staging_slots_and_temporaries_apart(plan):
    arena, peak, proof = arena_lines(plan, plan.arenas[0], plan.memory[0])
    assert re.match(r"arena host:0: \d+\.\d KiB = parameters 16\.0 KiB \+ staging 16\.0 KiB", arena)
    assert re.search(r"slots 256\.\d KiB \+ temporaries \d+\.\d KiB \+ others \d+ B$", arena)
    assert "optimizer" not in arena
    assert re.match(r"peak at launch \d+ of \d+: body: \w+ \(job\.py:12\); workspaces hold", peak)
    assert proof == plan.memory[0].text
    assert [line.strip() for line in summarise(plan)[-3:]] == [arena, peak, proof]


def test_three_lines_tell_a_newcomer_what_runs_its_memory_and_where_that_is_fullest(plan):
    first, memory, peak = overview(plan)
    launches = sum(len(actor.launches) for actor in plan.actors)
    assert first == f"job: 4,096 parameters on host:0, {launches} kernel launches a step"
    size = plan.memory[0].peak_bytes / 1024
    assert memory.startswith(
        f"memory: {size:.1f} KiB, allocated before the first step: parameters 16.0 KiB, copies for"
        " checkpoints 16.0 KiB, batches and outputs 256."
    )
    assert re.match(r"most memory is in use at body: \w+ \(job\.py:12\)$", peak)
    note = Recomputation(1000, 2000, 3, 0.05, "greedy", "proven")
    again = overview(replace(plan, recomputation=(note,)))[-1]
    assert again == "to fit, 3 launches run again: 5.0% of the step's time"


def test_a_plan_and_a_graph_are_shown_in_one_line(plan, sketch):
    launches, size = sum(len(a.launches) for a in plan.actors), plan.arenas[0].size_bytes
    assert repr(plan) == (
        f"Plan('job' {plan.graph_hash[:12]} on host:0: {len(plan.actors)} actors, {launches}"
        f" launches, {size:,} bytes)"
    )
    assert repr(sketch.b.freeze()).startswith("Graph(")


@pytest.mark.parametrize(
    "change",
    [
        {"target": "other kernels"},
        {"options": (("metrics_every", 2),)},
        {"graph_hash": "another"},
        {"constants": ()},
    ],
)
def test_plans_that_differ_are_printed_with_ids_that_differ(plan, change):
    ids = [summarise(p)[0].split()[2] for p in (plan, replace(plan), replace(plan, **change))]
    assert ids[0] == ids[1] != ids[2]


def test_the_first_line_says_as_which_gpu_a_device_was_planned(plan):
    cuda = Device(DeviceKind.CUDA, 1)
    arenas = tuple([replace(a, device=cuda, memory=cuda.place.memory) for a in plan.arenas])
    planned = replace(plan, arenas=arenas, options=(*plan.options, ("gpu", "h200")))
    assert " on cuda:1 (h200): " in summarise(planned)[0]


def test_the_shown_parts_of_an_arena_add_up_to_it(plan):
    proven = plan.memory[0]
    shown = arena_lines(plan, plan.arenas[0], proven)[0].partition(" = ")[2]
    units = {"B": 1, "KiB": 1024}
    total = sum(
        float(size) * units[unit] for size, unit in re.findall(r"(\d+(?:\.\d)?) (B|KiB)", shown)
    )
    rounding = 0.05 * 1024 * shown.count("KiB")
    assert abs(total - proven.peak_bytes) <= rounding


def test_the_full_print_names_who_holds_the_peak(plan):
    text = "\n".join(print_plan(plan))
    assert "memory of host:0:" in text
    assert "tensors of" in text


def test_the_whole_plan_names_the_version_of_every_operand(plan):
    lines = [line for line in print_plan(plan) if " <- " in line]
    product = next(line for line in lines if "matmul [fake.matmul]:" in line)
    softmax = next(line for line in lines if "body: softmax [fake.softmax]:" in line)
    made = re.search(r"\]: (%\d+) float32", product)[1]
    assert f"<- {made} float32[64, 64]@" in softmax
    turned = [line for line in lines if re.search(r"%\d+\+0 float32\[64, 64\]", line)]
    assert turned  # the gradient of a product reads an operand transposed: a part of it


def test_what_runs_again_is_told_with_its_budget_its_price_and_what_it_saves(plan):
    note = Recomputation(2**20, 4 * 2**20, 12, 0.084, "by blocks", "optimal")
    (line,) = [x for x in summarise(replace(plan, recomputation=(note,))) if "again" in x]
    assert line.strip() == (
        "budget 1.0 MiB: 12 launches run again, 8.4% of the step's time (by blocks); without, the"
        " arena has 4.0 MiB; optimal"
    )
    note = replace(note, num_launches=0)
    last = summarise(replace(plan, recomputation=(note,)))[-1]
    assert last.strip() == "budget 1.0 MiB: nothing runs again"


def test_what_moves_to_host_memory_and_why_blocks_found_nothing_are_told(plan):
    note = Recomputation(2**20, 4 * 2**20, 0, 0.031, "offload", "3 variables live in host memory")
    last = summarise(replace(plan, recomputation=(note,)))[-1]
    assert last.strip() == (
        "budget 1.0 MiB: copies take 3.1% of the step's time; 3 variables live in host memory"
    )
    note = Recomputation(0, 4 * 2**20, 0, 0.0, "store all", "no chain of blocks")
    assert summarise(replace(plan, recomputation=(note,)))[-1].strip() == "no chain of blocks"
