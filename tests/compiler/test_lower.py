import numpy as np
import pytest

from compiler.attrs import Attrs
from compiler.errors import CompileError
from compiler.graph import Output, Source, UpdateRule, Write
from compiler.lower import MAX_SNAPSHOT_RATE
from compiler.ops.binary import ADD, MUL
from compiler.ops.elementwise import EXP, NEG, SIN
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import SUM
from compiler.ops.shape import TRANSPOSE
from compiler.ops.update import INCREMENT, SGD_UPDATE
from compiler.options import CompileOptions
from compiler.pipeline import compile_graph, hash_graph
from compiler.plan import ActorKind, RegisterKind
from compiler.printer import print_graph, print_plan, summarise


def small_job(s, depth=3):
    """A training graph: x @ w, a few elementwise ops, a scalar loss, SGD and a step counter."""
    x = s.input("x", (8, 4), "float32")
    w = s.variable("w", (4, 4), "float32")
    step = s.variable("step", (), "int64", "counter")
    h = x
    with s.b.at("body", Source("job.py", 12)):
        for _ in range(depth):
            h = s.b.one(EXP, s.b.one(NEG, s.b.one(MATMUL, h, w)))
        loss = s.b.one(SUM, h, axes=(0, 1), keepdims=False)
    s.b.objective = loss
    s.b.outputs = [Output("loss", loss)]
    rate = s.constant(np.float32(0.1))
    s.b.updates = [UpdateRule(SGD_UPDATE, w, (), (rate,), Attrs({"weight_decay": 0.0}))]
    s.b.writes = [Write(step, s.b.one(INCREMENT, step))]
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
    assert len(snapshot.launches) == len(saved.variables)


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
    a = sketch.b.one(EXP, x)
    b = sketch.b.one(NEG, a)
    c = sketch.b.one(EXP, b)
    sketch.b.outputs = [Output("y", sketch.b.one(SUM, c, axes=(0,), keepdims=False))]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    temporaries = [r for r in plan.registers if r.kind is RegisterKind.TEMPORARY]
    assert len(temporaries) == 1


def test_an_input_that_is_read_later_is_never_overwritten(sketch, fake_target):
    x = sketch.input("x", (64,), "float32")
    a = sketch.b.one(EXP, x)
    b = sketch.b.one(NEG, a)
    both = sketch.b.one(MUL, a, b)
    sketch.b.outputs = [Output("y", sketch.b.one(SUM, both, axes=(0,), keepdims=False))]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    chain = plan.actors[1].launches
    neg = next(launch for launch in chain if launch.op == "neg")
    read, made = plan.views[neg.inputs[0]].register, plan.views[neg.outputs[0]].register
    assert read != made


def test_a_transposed_read_of_a_dying_input_forbids_taking_over_its_bytes(sketch, fake_target):
    x = sketch.input("x", (8, 8), "float32")
    a = sketch.b.one(EXP, x)
    both = sketch.b.one(ADD, a, sketch.b.one(TRANSPOSE, a, perm=(1, 0)))
    sketch.b.outputs = [Output("y", sketch.b.one(SUM, both, axes=(0, 1), keepdims=False))]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    add = next(launch for launch in plan.actors[1].launches if launch.op == "add")
    assert plan.views[add.inputs[0]].register != plan.views[add.outputs[0]].register


def test_an_output_that_is_an_input_or_named_twice_gets_a_copy_in_the_metrics_register(
    sketch, fake_target
):
    x = sketch.input("x", (4,), "float32")
    y = sketch.b.one(EXP, x)
    sketch.b.outputs = [Output("a", y), Output("b", y), Output("c", x)]
    plan = compiled(sketch.b.freeze(), fake_target, is_training=False)
    assert [launch.op for launch in plan.actors[1].launches].count("copy") == 2
    metrics = next(r.id for r in plan.registers if r.name == "metrics")
    fields = {f.name: plan.views[f.view] for f in plan.fields if f.register == metrics}
    assert sorted(fields) == ["a", "b", "c"]
    assert len({v.offset_bytes for v in fields.values()}) == 3


def test_a_missing_kernel_is_an_error_with_the_users_line(sketch, fake_target):
    x = sketch.input("x", (4,), "float32")
    with sketch.b.at("", Source("job.py", 5)):
        sketch.b.outputs = [Output("y", sketch.b.one(SIN, x))]
    with pytest.raises(CompileError, match=r"job\.py:5: no kernel for op sin"):
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
