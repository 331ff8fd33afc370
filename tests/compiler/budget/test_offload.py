"""State and activations in host memory: what the passes rewrite, and what the plan makes of it."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import tiers
from error_texts import raises
from graphs import adam, among, made_up, variable
from hypothesis import given, settings
from hypothesis import strategies as st
from small_blocks import offload_small

from actors.race.race import check_races
from actors.simulation.simulate import simulate
from compiler.budget import offload
from compiler.budget.search import choose_offload
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.placement import HOST, HOST_SIDE, Device, DeviceKind, Mesh, MeshLink, joined
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import BudgetChoice, CompileOptions, Hardware, Link
from compiler.lowering.lower import lower
from compiler.ops.families.activation import TANH
from compiler.ops.families.arithmetic import EXP, MUL
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN
from compiler.ops.primitives.shape import TRANSPOSE
from compiler.ops.primitives.sources import INPUT, VARIABLE
from compiler.ops.primitives.transfer import COPY_TO, is_copy, value_devices
from compiler.pipeline import pipeline
from compiler.pipeline.pipeline import with_choice
from compiler.pipeline.rewrites import PassContext, check
from compiler.sbp import distribute
from compiler.verify.verify import check_shared_bytes, verify_plan

WIDTH = 8
MATRIX_BYTES = WIDTH * WIDTH * 4

pytestmark = pytest.mark.usefixtures("op_by_op")
FAST, SLOW = Link(1000.0, 1000.0, 0.0), Link(1e-4, 1e-4, 0.0)


def linked(link=None, matmul_ns=1e6):
    """A matmul takes a millisecond, everything else ten microseconds."""
    return made_up(
        "fake",
        ("mul", "exp", "tanh", "copy"),
        lambda call: matmul_ns if call.op == "matmul" else 1e4,
        lambda call: 64 if call.op == "matmul" else 0,
        link,
    )


def adam_job(depth=4, every=1, rng=None, ranks=1):
    """A training graph of square layers with AdamW, through all passes; `rng` mixes the layers."""
    b = GraphBuilder()
    value = b.emit_one(INPUT, name="x", dtype="float32", shape=(WIDTH, WIDTH))
    weights = [variable(b, f"w{i}", (WIDTH, WIDTH)) for i in range(depth)]
    for weight in weights:
        value = b.emit_one(TANH, b.emit_one(MATMUL, value, weight))
        if rng is not None and rng.random() < 0.5:
            value = b.emit_one(
                MUL, value, b.emit_one(TRANSPOSE, b.emit_one(EXP, value), perm=(1, 0))
            )
    loss = b.emit_one(MEAN, value, axes=(0, 1), keepdims=False)
    adam(b, loss, weights, every)
    graph, job = b.freeze(), CompileOptions("job")
    context = PassContext(linked(), job)
    for step_ in [p for p in pipeline.PASSES if p.is_wanted(job) and not p.per_choice]:
        graph = check(step_.run(graph, context), step_.name)
        if step_.name == "simplify":
            graph = distribute.run(graph, joined(Mesh(("data",), (ranks,)), MeshLink()))
    return graph


def planned(graph, target, **options):
    plan = lower(graph, target, CompileOptions("job", **options), "hash")
    verify_plan(plan)
    return plan


def feeds(graph, seed):
    rng = np.random.default_rng(seed)
    return {
        node.attrs["name"]: rng.uniform(0.1, 1.0, node.attrs["shape"]).astype(node.attrs["dtype"])
        for node in graph.nodes
        if node.op in (INPUT, VARIABLE)
    }


def same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def ways(graph):
    """Return the way of each copy: in, out, or back over a variable."""
    made = [node for node in graph.nodes if is_copy(node)]
    return [
        "in" if node.attrs["to"] != HOST_SIDE else ("out", "back")[len(node.inputs) - 1]
        for node in made
    ]


def copies(plan, name):
    return [a for a in plan.actors if a.name.partition(".")[0] == name]


# -- the passes ----------------------------------------------------------------------------------


def test_without_anything_to_move_the_graph_is_the_same_object():
    graph = adam_job()
    assert offload.offload_variables(graph, (), linked()) is graph
    assert offload.spill_values(graph, (), linked()) is graph


def test_a_plan_without_offload_has_one_arena_and_no_stream_for_copies():
    plan = planned(adam_job(), linked(FAST), snapshot_every=2)
    assert len(plan.arenas) == len(plan.memory) == 1
    assert {s.name for s in plan.streams} == {"compute", "data", "metrics", "checkpoint"}
    assert all([register.arena == 0 for register in plan.registers])


@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 5),
    bucket=st.sampled_from((1, 2 * MATRIX_BYTES, 5 * MATRIX_BYTES, 1 << 20)),
    every=st.sampled_from((1, 3)),
)
@settings(max_examples=tiers.examples(15), deadline=None)
def test_any_state_and_any_activations_on_the_host_leave_all_results_the_same_bits(
    seed, depth, bucket, every, evaluate_graphs
):
    rng = Random(seed)
    graph, target = adam_job(depth, every, rng), linked(FAST)
    values = feeds(graph, seed)
    names = [name for name in offload.state_names(graph) if rng.random() < 0.7]
    idle = [i.value for i in offload.idle_values(graph, target) if rng.random() < 0.6]
    moved = check(offload.offload_variables(graph, names, target, bucket_bytes=bucket), "offload")
    moved = check(offload.spill_values(moved, idle, target, bucket_bytes=bucket), "spill")
    same(evaluate_graphs(moved, values), evaluate_graphs(graph, values))
    assert ways(moved).count("back") == len(names)
    assert ways(moved).count("out") == len(idle)
    assert ways(moved).count("in") == len(names) + len(idle)
    plan = planned(moved, target, snapshot_every=2)
    check_races(plan)


def test_only_copies_touch_what_lives_on_the_host():
    graph, target = adam_job(), linked(FAST)
    moved = offload.offload_variables(graph, offload.state_names(graph), target)
    on_host = {v for v, place in enumerate(value_devices(moved)) if place == HOST_SIDE}
    touching = [
        n for n in moved.nodes if on_host & {*n.inputs, *n.outputs} and n.op is not VARIABLE
    ]
    assert {n.op for n in touching} == {COPY_TO}
    assert len(on_host) == 4 * 4  # m and v of four layers, before and after


def test_a_late_reader_of_a_view_reads_the_same_view_of_the_copy():
    graph, target = adam_job(), linked(FAST)
    hidden = [n.outputs[0] for n in graph.nodes if n.op is TANH]
    moved = offload.spill_values(graph, hidden, target)
    late = [n for n in moved.nodes if n.op is TRANSPOSE and moved.producers()[n.inputs[0]] >= 0]
    back = {n.outputs[0] for n in moved.nodes if is_copy(n) and n.attrs["to"] == 0}
    assert any([view.inputs[0] in back for view in late])


@pytest.mark.parametrize("name", ["w0", "step", "nonsense"])
def test_what_cannot_live_on_the_host_is_named_with_what_can(name):
    with raises(CompileError):
        offload.offload_variables(adam_job(), [name], linked())


def test_state_that_something_else_reads_stays_on_the_device():
    graph = adam_job(1)
    m = next(n.outputs[0] for n in graph.nodes if n.attrs.get("name") == "m0")
    watching = GraphBuilder.continuing(graph)
    watching.outputs.append(Output("m", watching.emit_one(EXP, m)))
    graph = watching.freeze()
    assert offload.state_names(graph) == ("v0",)
    with raises(CompileError):
        offload.offload_variables(graph, ["m0"], linked())


def test_an_output_cannot_be_taken_out():
    graph = adam_job()
    with raises(CompileError):
        offload.spill_values(graph, [graph.outputs[0].value], linked())


def test_a_launch_that_reads_host_memory_is_a_bug_that_lowering_finds():
    graph = adam_job(1)
    nodes = [
        replace(n, attrs=Attrs({**n.attrs, "place": HOST_SIDE}))
        if n.attrs.get("name") == "m0"
        else n
        for n in graph.nodes
    ]
    with raises(InternalError):
        planned(replace(graph, nodes=tuple(nodes)), linked())


def test_copies_have_the_type_of_what_they_copy():
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=(3,))
    host = b.emit_one(COPY_TO, x, to=HOST_SIDE, bucket=0)
    assert b.type_of(b.emit_one(COPY_TO, host, to=0, bucket=0)) == b.type_of(x)
    other = variable(b, "m", (4,), role="optimizer")
    with raises(CompileError):
        b.emit_one(COPY_TO, x, other, to=HOST_SIDE, bucket=0)


def test_a_link_takes_its_latency_and_the_time_of_the_bytes():
    link = Link(in_bytes_per_ns=2.0, out_bytes_per_ns=4.0, latency_ns=100.0)
    assert (link.in_ns(1000), link.out_ns(1000)) == (600.0, 350.0)
    assert linked(link).link(0, HOST_SIDE) is link
    assert linked(link).link(HOST_SIDE, 0).in_ns(1000) == 350.0
    assert linked(None).link(0, HOST_SIDE) is None


# -- the plan ------------------------------------------------------------------------------------


def moved_plan(depth=8, bucket=2 * MATRIX_BYTES, link=FAST, *, spilled=False, every=1, **options):
    graph, target = adam_job(depth, every), linked(link)
    moved = offload.offload_variables(
        graph, offload.state_names(graph), target, bucket_bytes=bucket
    )
    if spilled:
        idle = [i.value for i in offload.idle_values(graph, target) if i.idle_ns > 3e6]
        assert idle
        moved = offload.spill_values(moved, idle, target, bucket_bytes=bucket)
    return planned(moved, target, accumulate=every, **options)


def test_state_lives_in_the_host_arena_and_two_buckets_of_it_in_the_devices():
    depth = 8
    plain = planned(adam_job(depth), linked(FAST))
    plan = moved_plan(depth)
    state = 2 * depth * MATRIX_BYTES
    assert [plan.arenas[1].size_bytes, plan.memory[1].peak_bytes] == [state, state]
    # Two buckets of two matrices, one for the values that the cuts keep longer than needed, and one
    # for the square within tanh's gradient, which is a launch here where nothing is fused.
    saved = plain.arenas[0].size_bytes - plan.arenas[0].size_bytes
    assert saved >= state - (2 * 2 + 2) * MATRIX_BYTES
    names = {r.name: r.arena for r in plan.registers if r.kind is RegisterKind.VARIABLE}
    assert {name for name, arena in names.items() if arena == 1} == {
        f"{name}{i}" for name in "mv" for i in range(depth)
    }


def test_the_state_of_a_plan_has_the_same_names_roles_types_and_initialisers_as_before():
    def state(plan):
        return [(v.name, v.role, plan.views[v.view].type, v.init) for v in plan.state]

    assert state(moved_plan()) == state(planned(adam_job(8), linked(FAST)))


def test_copies_are_actors_of_their_own_on_a_stream_for_each_direction():
    plan = moved_plan()
    assert len(copies(plan, "copy_in")) == len(copies(plan, "copy_out")) == 8
    for name, stream in (("copy_in", "h2d"), ("copy_out", "d2h")):
        for actor in copies(plan, name):
            assert actor.kind is ActorKind.COPY
            assert plan.streams[actor.stream].name == stream
            assert plan.streams[actor.stream].has_thread
            assert [launch.kernel for launch in actor.launches] == ["fake.copy"] * 2


def test_a_snapshot_of_state_on_the_host_is_staged_on_the_host():
    plan = moved_plan(snapshot_every=2)
    staging = next(r for r in plan.registers if r.name == "staging")
    assert staging.arena == 1
    snapshot = next(a for a in plan.actors if a.name == "snapshot")
    of_each, counters = snapshot.launches  # what is offloaded, and what stays on the device
    assert len(of_each.inputs) + len(counters.inputs) == len(plan.state)


def test_a_plan_with_two_arenas_is_the_same_after_a_way_over_bytes():
    plan = moved_plan(snapshot_every=2, spilled=True)
    assert Plan.from_bytes(plan.to_bytes()) == plan


@pytest.mark.parametrize("every", [1, 2])
def test_however_late_anything_is_the_device_holds_two_buckets_and_steps_see_whole_state(
    play, every
):
    plan = moved_plan(every=every, snapshot_every=2)
    ins = {a.id: k for k, a in enumerate(copies(plan, "copy_in"))}
    outs = {a.id: k for k, a in enumerate(copies(plan, "copy_out"))}
    snapshot = next(a.id for a in plan.actors if a.name == "snapshot")
    for seed in range(6):
        held, most, done, running = set(), 0, dict.fromkeys(outs, 0), set()
        for actor, firing, is_start in play(plan, Random(seed), 4 * every):
            (running.add if is_start else running.discard)(actor)
            if actor in ins and is_start:
                assert min(done.values()) == firing
                held.add(ins[actor])
                most = max(most, len(held))
            elif actor in outs and not is_start:
                held.discard(outs[actor])
                done[actor] += 1
            if actor == snapshot:
                assert {*done.values()} == {2 * (firing + 1)}, "a snapshot of half-old state"
            if actor in outs:
                assert snapshot not in running
        assert most == 2
        assert {*done.values()} == {4}


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_meet_the_other_ranks_before_state_comes_in_for_them(every):
    graph, target = adam_job(6, every, ranks=4), among(linked(Link(0.1, 0.1, 0.0)), data=4)
    moved = offload.offload_variables(
        graph, offload.state_names(graph), target, bucket_bytes=2 * MATRIX_BYTES
    )
    plan = planned(moved, target, accumulate=every, mesh=(("data", 4),))
    check_races(plan)
    kinds = {actor.kind for actor in plan.actors}
    assert {ActorKind.COMM, ActorKind.COPY} < kinds
    assert simulate(plan, 3).steps == 3


def test_values_on_the_host_that_live_together_may_not_share_bytes():
    plan = moved_plan(spilled=True)
    on_host = [r for r in plan.registers if r.arena == 1 and r.kind is RegisterKind.DATA]
    assert len(on_host) >= 2
    registers = list(plan.registers)
    for register in on_host:
        registers[register.id] = replace(register, offsets_bytes=on_host[0].offsets_bytes)
    with raises(InternalError):
        check_shared_bytes(replace(plan, registers=tuple(registers)))


def test_first_copies_begin_after_the_forward_pass_has_begun():
    plan = moved_plan(link=Link(0.1, 0.1, 0.0))
    run = simulate(plan, 1)
    first = copies(plan, "copy_in")[0].id
    begin = next(row[2] for row in run.rows if row[0] == first)
    assert begin >= 7e6, "eight matmuls of a millisecond each come first"


# -- virtual time --------------------------------------------------------------------------------


@pytest.mark.parametrize("spilled", [False, True])
def test_copies_hide_behind_compute_on_a_fast_link_and_delay_the_step_on_a_slow_one(spilled):
    plain = simulate(planned(adam_job(8), linked(FAST)), 4).period_ns
    fast = simulate(moved_plan(link=FAST, spilled=spilled), 4).period_ns
    plan = moved_plan(link=SLOW, spilled=spilled)
    slow = simulate(plan, 4)
    assert fast <= 1.02 * plain
    busy = dict(zip([s.name for s in plan.streams], slow.utilisation, strict=True))
    state_ns = 8 * 2 * MATRIX_BYTES / SLOW.in_bytes_per_ns
    assert slow.period_ns >= state_ns > plain
    assert busy["h2d"] > 0.75


def test_copies_and_compute_overlap_in_time():
    plan = moved_plan(link=Link(1e-3, 1e-3, 0.0), spilled=True)
    run = simulate(plan, 2)
    streams = [plan.streams[a.stream].name for a in plan.actors]
    rows = {name: [r for r in run.rows if streams[r[0]] == name] for name in ("compute", "h2d")}
    overlap = sum(
        max(0, min(one[3], other[3]) - max(one[2], other[2]))
        for one in rows["compute"]
        for other in rows["h2d"]
    )
    assert overlap > 0.1 * sum(row[3] - row[2] for row in rows["h2d"])


def test_the_estimated_step_is_that_of_the_simulation(budget_trials):
    graph = adam_job(8)
    for link in (FAST, Link(1e-2, 1e-2, 0.0), SLOW):
        target = linked(link)
        moved = offload.offload_variables(
            graph, offload.state_names(graph), target, bucket_bytes=2 * MATRIX_BYTES
        )
        trials = budget_trials(moved, target, CompileOptions("job"))
        period_ns = simulate(planned(moved, target), 6).period_ns
        assert period_ns == pytest.approx(trials.step_ns(BudgetChoice()), rel=0.05)


# -- the choice ----------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch):
    """Buckets and activations of a few hundred bytes are worth a copy."""
    offload_small(monkeypatch, activation_bytes=MATRIX_BYTES, bucket_bytes=MATRIX_BYTES)


@dataclass
class Chosen:
    """A choice, the graph that it makes, and what it was chosen for."""

    state: tuple
    activations: tuple
    graph: object
    arena_bytes: int
    step_ns: float


@pytest.fixture
def chosen(budget_trials):
    def make(graph, target, budget):
        options = CompileOptions("job", memory_budget=budget)
        trials = budget_trials(graph, target, options)
        choice = choose_offload(trials)
        moved = with_choice(graph, choice, target, options)
        size, step_ns = trials.arena_bytes(choice), trials.step_ns(choice)
        return Chosen(choice.state, choice.activations, moved, size, step_ns)

    return make


def device_bytes(graph, target):
    return planned(graph, target).arenas[0].size_bytes


def test_nothing_is_chosen_where_all_fits_or_there_is_nowhere_to_go(chosen):
    graph = adam_job()
    size = device_bytes(graph, linked(FAST))
    for target, budget in ((linked(FAST), size), (linked(None), size // 2)):
        choice = chosen(graph, target, budget)
        assert (choice.state, choice.activations, choice.arena_bytes) == ((), (), size)
        assert choice.graph is graph


@pytest.mark.parametrize("share", [0.95, 0.8, 0.65])
def test_the_choice_brings_the_arena_under_the_budget_without_a_longer_step(
    share, chosen, small_pieces
):
    graph, target = adam_job(12), linked(FAST)
    size = device_bytes(graph, target)
    choice = chosen(graph, target, int(share * size))
    moved = choice.graph
    assert choice.arena_bytes == device_bytes(moved, target) <= share * size
    assert choice.step_ns <= 1.02 * chosen(graph, target, size).step_ns
    assert choice.state
    check_races(planned(moved, target))


def test_more_bytes_mean_no_more_copies(chosen, small_pieces):
    graph, target = adam_job(12), linked(FAST)
    size = device_bytes(graph, target)
    counts = [len(chosen(graph, target, int(s * size)).state) for s in (0.7, 0.85, 0.95, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_a_budget_out_of_reach_gives_the_smallest_arena_found(chosen, small_pieces):
    graph, target = adam_job(6), linked(FAST)
    choice = chosen(graph, target, 1)
    assert 1 < choice.arena_bytes < device_bytes(graph, target)


def test_state_goes_and_activations_stay_where_the_link_is_slower_than_making_them_again(
    chosen,
    small_pieces,
):
    """A copy there and back takes longer than a matmul, and longer than the forward pass."""
    graph = adam_job(6)
    slow = linked(Link(1e-6, 1e-6, 0.0))
    choice = chosen(graph, slow, 1)
    assert choice.state
    assert not choice.activations
    fast = chosen(graph, linked(FAST), 1)
    assert fast.activations


def test_state_far_from_other_updates_goes_first(chosen, small_pieces):
    """Before the first update lies the forward pass, between two others only their matmuls."""
    graph, link = adam_job(6), Link(MATRIX_BYTES / 1e6, MATRIX_BYTES / 1e6, 0.0)
    target = linked(link, matmul_ns=2.5e6)
    size = device_bytes(graph, target)
    choice = chosen(graph, target, int(0.97 * size))
    moved = choice.graph
    assert 0 < len(choice.state) < 12
    first = offload.state_updates(offload.with_early_updates(graph))[0]
    assert set(first.names) <= set(choice.state)
    assert ways(moved).count("in") == len(choice.state)


@pytest.mark.parametrize("device", [0, 1])
def test_of_two_devices_the_one_with_a_link_moves_what_it_holds(
    device, small_pieces, budget_trials
):
    """The first one is the host, which has nowhere to go."""
    graph = adam_job(6)
    graph = replace(graph, nodes=tuple([replace(n, device=device) for n in graph.nodes]))
    targets = [linked(link).targets[0] for link in (None, FAST)]
    hardware = Hardware((HOST, Device(DeviceKind.SIM)), tuple(targets))
    choice = choose_offload(budget_trials(graph, hardware, CompileOptions("job", memory_budget=1)))
    assert bool(choice.state) == bool(choice.activations) == (device == 1)
