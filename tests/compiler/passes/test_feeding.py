"""Copies between ports and devices: in the graph, and what a plan makes of them."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from graphs import Target, adam, variable

from actors.race.race import check_races
from actors.simulation.simulate import simulate
from compiler.contract.placement import HOST, HOST_SIDE, PINNED, Device, DeviceKind, StreamRole
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.graph.graph import UNKNOWN_SOURCE, GraphBuilder, Output
from compiler.graph.target import CompileOptions, Link, one_device
from compiler.ops.families.activation import TANH
from compiler.ops.families.arithmetic import MUL
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import MEAN
from compiler.ops.primitives.sources import INPUT
from compiler.ops.primitives.transfer import COPY_TO, is_copy, value_devices
from compiler.passes import batches
from compiler.pipeline import pipeline
from compiler.pipeline.rewrites import check
from compiler.storage.order import overlaps_steps

SIM, OTHER = Device(DeviceKind.SIM), Device(DeviceKind.SIM, 1)
WIDTH = 8


def crossing(on=(0, 1)):
    """x and y on devices: tanh(x) on the first, times y on the second; both are outputs."""
    b = GraphBuilder()
    x, y = (b.emit_one(INPUT, name=n, dtype="float32", shape=(2, 3)) for n in "xy")
    first, second = on
    with b.at("", UNKNOWN_SOURCE, device=first):
        made = b.emit_one(TANH, x)
    moved = made if first == second else b.emit_one(COPY_TO, made, to=second, bucket=0)
    with b.at("", UNKNOWN_SOURCE, device=second):
        product = b.emit_one(MUL, moved, y)
        again = b.emit_one(
            MUL, product, x if first == second else b.emit_one(COPY_TO, x, to=1, bucket=1)
        )
    b.outputs = [Output("made", made), Output("again", again)]
    return b.freeze()


def copies(graph):
    """Return each copy as (from, to), in order."""
    place = value_devices(graph)
    return [(place[n.inputs[0]], n.attrs["to"]) for n in graph.nodes if is_copy(n)]


def test_on_the_host_nothing_is_copied():
    graph = crossing((0, 0))
    assert batches.feed_devices(graph, (HOST,)) is graph
    assert not any(overlaps_steps(graph))


def test_a_device_reads_copies_of_batches_and_outputs_end_on_the_hosts_side(evaluate_graphs):
    graph = crossing((0, 0))
    fed = check(batches.feed_devices(graph, (SIM,)), "feed")
    assert copies(fed) == [(HOST_SIDE, 0)] * 2 + [(0, HOST_SIDE)] * 2
    place = value_devices(fed)
    assert [place[n.outputs[0]] for n in fed.nodes if n.op is INPUT] == [HOST_SIDE] * 2
    assert [place[o.value] for o in fed.outputs] == [HOST_SIDE] * 2
    assert [o.name for o in fed.outputs] == [o.name for o in graph.outputs]
    buckets = [n.attrs["bucket"] for n in fed.nodes if is_copy(n)]
    assert buckets[0] == buckets[1] != buckets[2] == buckets[3]
    assert [n for n, one in zip(fed.nodes, overlaps_steps(fed), strict=True) if one] == [
        n for n in fed.nodes if is_copy(n)
    ]
    values = {n: np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3) for n in "xy"}
    for one, other in zip(
        evaluate_graphs(fed, values), evaluate_graphs(graph, values), strict=True
    ):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])


def test_a_batch_goes_straight_to_each_device_that_reads_it():
    fed = batches.feed_devices(crossing(), (SIM, OTHER))
    assert copies(fed) == [(HOST_SIDE, 0), (HOST_SIDE, 1), (HOST_SIDE, 1), (0, 1), (0, -1), (1, -1)]
    beside = [n for n, one in zip(fed.nodes, overlaps_steps(fed), strict=True) if one]
    buckets = {(value_devices(fed)[n.inputs[0]], n.attrs["to"], n.attrs["bucket"]) for n in beside}
    assert len({bucket for *_, bucket in buckets}) == len(buckets) == 4


def test_what_only_the_host_reads_or_makes_stays_where_it_is():
    fed = batches.feed_devices(crossing((0, 1)), (HOST, SIM))
    x, y = [n for n in fed.nodes if n.op is INPUT]
    assert value_devices(fed)[x.outputs[0]] == value_devices(fed)[y.outputs[0]] == HOST_SIDE
    assert value_devices(fed)[fed.outputs[0].value] == 0
    only = batches.feed_devices(crossing((0, 0)), (HOST, SIM))
    assert copies(only) == []


def test_a_batch_that_nobody_reads_lies_where_its_device_would_have_it_brought_from():
    graph = crossing((0, 0))
    unread = replace(graph, nodes=graph.nodes[:2], outputs=())
    assert value_devices(batches.feed_devices(unread, (SIM,)))[:2] == (HOST_SIDE, HOST_SIDE)
    assert value_devices(batches.feed_devices(unread, (HOST, SIM)))[:2] == (0, 0)


# -- plans ---------------------------------------------------------------------------------------


def job(every=1):
    b = GraphBuilder()
    value = b.emit_one(INPUT, name="x", dtype="float32", shape=(WIDTH, WIDTH))
    weights = [variable(b, f"w{i}", (WIDTH, WIDTH)) for i in range(2)]
    for weight in weights:
        value = b.emit_one(TANH, b.emit_one(MATMUL, value, weight))
    adam(b, b.emit_one(MEAN, value, axes=(0, 1), keepdims=False), weights, every)
    return b.freeze()


def fed_plan(every=1, link=None, **options):
    hardware = one_device(Target("fake", (), lambda call: 1e6, link=link), SIM)
    options = CompileOptions("job", accumulate=every, **options)
    return pipeline.compile_graph(job(every), hardware, options)


@pytest.mark.parametrize("every", [1, 2])
def test_copies_beside_steps_have_two_slots_at_both_ends_and_no_fence_around_them(every):
    plan = fed_plan(every, snapshot_every=2)
    check_races(plan)
    into, out = [next(a for a in plan.actors if a.name == n) for n in ("feed", "fetch")]
    assert {into.kind, out.kind} == {ActorKind.COPY}
    ports = [port for actor in (into, out) for port in (*actor.inputs, *actor.outputs)]
    assert len(ports) == 4
    for port in ports:
        register = plan.registers[port.register]
        assert register.kind is RegisterKind.DATA
        assert register.num_slots >= 2 * port.rate
    ended = {row[0:2]: row[2:4] for row in simulate(plan, 4).rows}
    step = next(a.id for a in plan.actors if a.name in ("step", "gradient"))
    begin, end = ended[step, 0]
    assert begin <= ended[into.id, 1][0] < end


def test_a_batch_that_is_too_large_for_slots_of_a_host_has_two_in_pinned_memory(monkeypatch):
    (batch,) = [r for r in fed_plan().registers if r.name == "batch"]
    assert "data overlaps feed" in batch.reason
    monkeypatch.setattr("compiler.lowering.lower.EDGE_BUDGET_BYTES", 1)
    slots = {r.name: r.num_slots for r in fed_plan().registers}
    assert slots["batch"] == slots["metrics"] == 2
    hardware = one_device(Target("fake", (), lambda call: 1e6))
    plan = pipeline.compile_graph(job(), hardware, CompileOptions("job"))
    assert {r.name: r.num_slots for r in plan.registers}["batch"] == 1


def test_however_late_anything_is_no_copy_overtakes_a_slot(play):
    plan = fed_plan()
    into, out, step = [
        next(a.id for a in plan.actors if a.name == n) for n in ("feed", "fetch", "step")
    ]
    for seed in range(6):
        begun, done = dict.fromkeys((into, out, step), 0), dict.fromkeys((into, out, step), 0)
        ahead = 0
        for actor, _, is_start in play(plan, Random(seed), 6):
            if actor in begun:
                (begun if is_start else done)[actor] += 1
            assert begun[step] <= done[into]
            assert begun[out] <= done[step]
            ahead = max(ahead, begun[into] - done[step])
        assert ahead == 2
        assert done[out] == 6


def test_a_snapshot_is_taken_within_the_device_and_leaves_it_beside_the_next_step():
    plan = fed_plan(snapshot_every=2, link=Link(1e-3, 1e-3, 0.0))
    check_races(plan)
    names = {actor.name: actor.id for actor in plan.actors}
    places = {r.name: plan.arenas[r.arena].place for r in plan.registers}
    assert (places["snapshot"], places["staging"]) == (SIM.place, PINNED)
    took = {row[:2]: row[2:4] for row in simulate(plan, 6).rows}
    step, left = took[names["step"], 2], took[names["snapshot.fetch"], 0]
    assert took[names["snapshot"], 0][1] <= step[0] < left[1]
    assert left[0] < step[1]


def test_a_device_whose_bytes_have_a_budget_holds_no_copy_of_its_variables():
    plan = fed_plan(snapshot_every=2, memory_budget=1 << 30, recompute="none")
    check_races(plan)
    (snapshot,) = [actor for actor in plan.actors if actor.name.startswith("snapshot")]
    assert plan.streams[snapshot.stream].role is StreamRole.D2H
    (staging,) = [r for r in plan.registers if r.name in ("snapshot", "staging")]
    assert plan.arenas[staging.arena].place == PINNED
