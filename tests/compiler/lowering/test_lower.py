from dataclasses import replace

import pytest
from error_texts import raises
from graphs import descend

from compiler.contract.errors import CompileError
from compiler.contract.placement import Mesh, MeshLink, joined
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.graph.graph import Accumulation, Output, SourceLocation, Write
from compiler.graph.target import CompileOptions
from compiler.lowering.snapshots import MAX_SNAPSHOT_RATE
from compiler.ops.families.arithmetic import ADD, EXP, MUL, NEG, SIN
from compiler.ops.families.updates import INCREMENT
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.ops.primitives.sources import SCRATCH
from compiler.pipeline.pipeline import compile_graph
from compiler.pipeline.printer import print_graph, print_plan, summarise
from compiler.verify.verify import verify_plan

pytestmark = pytest.mark.usefixtures("op_by_op")


def small_job(s, depth=3):
    """A training graph: x @ w, a few elementwise ops, a scalar loss, SGD and a step counter."""
    x = s.input("x", (8, 4), "float32")
    w = s.variable("w", (4, 4), "float32")
    step = s.variable("step", (), "int64", "counter")
    h = x
    with s.b.at("body", SourceLocation("job.py", 12)):
        for _ in range(depth):
            h = s.b.emit_one(EXP, s.b.emit_one(NEG, s.b.emit_one(MATMUL, h, w)))
        loss = s.b.emit_one(SUM, h, axes=(0, 1), keepdims=False)
    descend(s.b, loss, [w])
    s.b.writes = [Write(step, s.b.emit_one(INCREMENT, step))]
    return s.b.freeze()


def compiled(graph, target, **options):
    return compile_graph(graph, target, CompileOptions("job", verify=True, **options))


def test_a_training_job_becomes_three_actors_and_five_with_snapshots(sketch, fake_target):
    graph = small_job(sketch)
    plain = compiled(graph, fake_target)
    assert [a.name for a in plain.actors] == ["data", "step", "metrics"]
    saved = compiled(graph, fake_target, snapshot_every=7)
    assert [a.name for a in saved.actors] == ["data", "step", "metrics", "snapshot", "checkpoint"]
    updated = next(r for r in saved.registers if r.name == "updated")
    assert (updated.kind, updated.num_slots, updated.size_bytes) == (RegisterKind.CONTROL, 7, 0)
    snapshot = saved.actors[3]
    assert snapshot.inputs[0].rate == 7
    assert snapshot.is_flushed
    (copy,) = snapshot.launches
    assert len(copy.inputs) == len(copy.outputs) == len(saved.variables)


@pytest.mark.parametrize(("seconds", "expected"), [(1e-3, 10), (1e-9, 1), (1.0, MAX_SNAPSHOT_RATE)])
def test_seconds_between_snapshots_become_steps_by_the_estimated_duration(
    sketch, fake_target, seconds, expected
):
    plan = compiled(small_job(sketch), fake_target, snapshot_seconds=seconds)
    step = next(a for a in plan.actors if a.kind is ActorKind.COMPUTE)
    assert step.duration_ns == 25_000  # four snapshots are offered per period
    updated = next(r for r in plan.registers if r.name == "updated")
    assert updated.num_slots == expected


def test_the_chain_reads_every_variable_before_it_is_overwritten(sketch, fake_target):
    plan = compiled(small_job(sketch), fake_target)
    chain = next(a for a in plan.actors if a.name == "step").launches
    w = next(r.id for r in plan.registers if r.name == "w")
    readers = [
        i
        for i, launch in enumerate(chain)
        if any(plan.views[v].register == w for v in launch.inputs)
    ]
    writer = next(
        i
        for i, launch in enumerate(chain)
        if any(plan.views[v].register == w for v in launch.outputs)
    )
    assert readers[-1] == writer


def test_elementwise_results_take_over_the_bytes_of_a_dying_input(sketch, fake_target):
    x = sketch.input("x", (64,), "float32")
    a = sketch.b.emit_one(EXP, x)
    b = sketch.b.emit_one(NEG, a)
    c = sketch.b.emit_one(EXP, b)
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SUM, c, axes=(0,), keepdims=False))]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    temporaries = [r for r in plan.registers if r.kind is RegisterKind.TEMPORARY]
    assert len(temporaries) == 1


def test_an_input_that_is_read_later_is_never_overwritten(sketch, fake_target):
    x = sketch.input("x", (64,), "float32")
    a = sketch.b.emit_one(EXP, x)
    b = sketch.b.emit_one(NEG, a)
    both = sketch.b.emit_one(MUL, a, b)
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SUM, both, axes=(0,), keepdims=False))]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    chain = plan.actors[1].launches
    neg = next(launch for launch in chain if launch.op == "neg")
    read, made = plan.views[neg.inputs[0]].register, plan.views[neg.outputs[0]].register
    assert read != made


def test_a_transposed_read_of_a_dying_input_forbids_taking_over_its_bytes(sketch, fake_target):
    x = sketch.input("x", (8, 8), "float32")
    a = sketch.b.emit_one(EXP, x)
    both = sketch.b.emit_one(ADD, a, sketch.b.emit_one(TRANSPOSE, a, perm=(1, 0)))
    sketch.b.outputs = [Output("y", sketch.b.emit_one(SUM, both, axes=(0, 1), keepdims=False))]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    add = next(launch for launch in plan.actors[1].launches if launch.op == "add")
    assert plan.views[add.inputs[0]].register != plan.views[add.outputs[0]].register


def test_an_output_that_is_an_input_or_named_twice_gets_a_copy_in_the_metrics_register(
    sketch, fake_target
):
    x = sketch.input("x", (4,), "float32")
    y = sketch.b.emit_one(EXP, x)
    sketch.b.outputs = [Output("a", y), Output("b", y), Output("c", x)]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    assert [launch.op for launch in plan.actors[1].launches].count("copy") == 2
    metrics = next(r.id for r in plan.registers if r.name == "metrics")
    fields = {f.name: plan.views[f.view] for f in plan.fields if f.register == metrics}
    assert sorted(fields) == ["a", "b", "c"]
    assert len({v.offset_bytes for v in fields.values()}) == 3


def test_a_missing_kernel_is_an_error_with_the_users_line(sketch, fake_target):
    x = sketch.input("x", (4,), "float32")
    with sketch.b.at("", SourceLocation("job.py", 5)):
        sketch.b.outputs = [Output("y", sketch.b.emit_one(SIN, x))]
    with raises(CompileError):
        compiled(sketch.b.freeze(), fake_target, is_training=False)


def test_lines_and_scopes_survive_to_the_plan(sketch, fake_target):
    plan = compiled(small_job(sketch), fake_target)
    matmuls = [launch for launch in plan.actors[1].launches if launch.op == "matmul"]
    assert matmuls
    places = {(launch.scope, str(plan.sources[launch.source])) for launch in matmuls}
    assert places == {("body", "job.py:12")}


def test_compiling_twice_gives_equal_plans_and_hashes(sketch, fake_target):
    graph = small_job(sketch)
    one, two = (compiled(graph, fake_target, snapshot_every=3) for _ in range(2))
    assert one == two
    assert one.fingerprint == two.fingerprint
    assert hash_graph(graph) == one.graph_hash


def test_the_printed_plan_names_actors_registers_reasons_and_the_certificate(sketch, fake_target):
    plan = compiled(small_job(sketch), fake_target, snapshot_every=3)
    text = "\n".join(summarise(plan))
    for word in ("data", "step", "snapshot", "checkpoint", "updated", "3 updated"):
        assert word in text
    assert "max live bytes" in text
    assert len(summarise(plan)) <= 14
    assert "fake.matmul" in "\n".join(print_plan(plan))
    assert "job.py:12" in "\n".join(print_graph(small_job(sketch)))


def accumulating_job(s, every):
    graph = small_job(s)
    batches = s.variable("batches", (), "int64", SCRATCH)
    s.b.accumulation = Accumulation(every, batches)
    return replace(s.b.freeze(), updates=graph.updates)


def ports_of(plan):
    """Return, by actor, the names and rates of its inputs and outputs."""
    names = [r.name for r in plan.registers]
    return {
        a.name: [[(names[p.register], p.rate) for p in ports] for ports in (a.inputs, a.outputs)]
        for a in plan.actors
    }


def test_a_step_of_several_batches_is_two_actors_with_a_rate_between_them(sketch, fake_target):
    plan = compiled(accumulating_job(sketch, 3), fake_target, accumulate=3, metrics_every=2)
    assert ports_of(plan) == {
        "data": [[], [("batch", 1)]],
        "gradient": [[("batch", 1)], [("metrics", 1), ("accumulated", 1)]],
        "update": [[("accumulated", 3)], [("done", 1)]],
        "metrics": [[("metrics", 6), ("done", 2)], []],
    }
    assert verify_plan(plan) == (6, 6, 2, 1)
    ops = {a.name: [launch.op for launch in a.launches] for a in plan.actors}
    assert ops["gradient"].count("accumulate") == 1
    assert sorted(ops["update"]) == ["increment", "sgd_update"]
    assert [a.name for a in plan.actors if a.is_flushed] == ["metrics"]


def test_sums_are_scratch_that_no_snapshot_holds(sketch, fake_target):
    plan = compiled(accumulating_job(sketch, 3), fake_target, accumulate=3, snapshot_every=2)
    assert {v.name for v in plan.variables} - {v.name for v in plan.state} == {
        "batches",
        "gradient/w",
    }
    staged = {f.name for f in plan.fields if plan.registers[f.register].name == "staging"}
    assert staged == {v.name for v in plan.state} == {"w", "step"}


def judging_job(s):
    x = s.input("v", (2, 4), "float32")
    h = s.b.emit_one(MATMUL, x, s.variable("w", (4, 4), "float32"))
    s.b.outputs = [Output("score", s.b.emit_one(SUM, h, axes=(0, 1), keepdims=False))]
    return s.b.freeze()


def test_an_evaluation_is_gates_a_source_a_chain_and_a_sink_at_their_rates(sketch, fake_target):
    evaluation = judging_job(type(sketch)())
    options = CompileOptions("job", evaluate_every=5, evaluate_batches=3, verify=True)
    plan = compile_graph(small_job(sketch), fake_target, options, evaluation=evaluation)
    assert ports_of(plan) == {
        "data": [[], [("batch", 1)]],
        "step": [[("batch", 1)], [("metrics", 1), ("eval_due", 1)]],
        "metrics": [[("metrics", 1)], []],
        "evaluation": [[("eval_due", 5)], [("eval_leave", 3)]],
        "eval_data": [[("eval_leave", 1)], [("eval_batch", 1)]],
        "evaluate": [[("eval_batch", 1)], [("eval_metrics", 1)]],
        "eval_metrics": [[("eval_metrics", 3), ("eval_due", 5)], []],
    }
    assert [v.name for v in plan.variables].count("w") == 1
    slots = {r.name: r.num_slots for r in plan.registers}
    assert (slots["eval_due"], slots["eval_leave"]) == (5, 3)


def test_collectives_get_a_stream_and_actors_of_their_own(sketch, fake_target):
    ranks = joined(Mesh(("data",), (2,)), MeshLink(latency_ns=0.0))
    hardware = replace(fake_target, ranks=ranks)
    plan = compile_graph(small_job(sketch), hardware, CompileOptions("job"))
    comm = [a for a in plan.actors if a.kind is ActorKind.COMM]
    assert comm
    assert {plan.streams[a.stream].name for a in comm} == {"comm"}
    assert plan.mesh == ranks.mesh
    assert compiled(small_job(type(sketch)()), fake_target).mesh.num_ranks == 1


def test_plans_with_streams_rates_and_evaluation_are_equal_each_time(sketch, fake_target):
    graph = accumulating_job(sketch, 2)
    evaluation = judging_job(type(sketch)())
    options = CompileOptions(
        "job", accumulate=2, num_streams=3, evaluate_every=2, evaluate_batches=2, snapshot_every=3
    )
    one, two = (compile_graph(graph, fake_target, options, evaluation=evaluation) for _ in range(2))
    assert one.fingerprint == two.fingerprint
