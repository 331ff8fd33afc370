"""The actor graph of chains, played as a token game with firings that take time."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
import tiers
from graphs import counter, descend, made_up, variable
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.race.race import RaceError, check_races
from compiler.contract.placement import Mesh, MeshLink, joined
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.types import StreamId
from compiler.graph.graph import GraphBuilder, Output
from compiler.graph.target import CompileOptions
from compiler.lowering.actor_graph import ActorGraph
from compiler.lowering.lower import lower
from compiler.lowering.plan_builder import PlanBuilder
from compiler.ops.families.arithmetic import ADD, EXP, MUL, NEG
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import INPUT
from compiler.pipeline import pipeline
from compiler.pipeline.pipeline import compile_graph
from compiler.verify.verify import edges_of, verify_plan

STEPS = 4
NEAR = joined(Mesh(("data",), (4,)), MeshLink(latency_ns=0.0))
"""Ranks so near each other that no bucket is too small."""


def slow_target(rng):
    """Kernels that take up to five messages, at random by a seed."""
    return made_up("slow", duration_ns=lambda call: rng.choice((1e2, 1e4, 5e4, 1e5)))


def towers(rng, every=1):
    """A training graph: two random chains of ops that meet in a loss."""
    b = GraphBuilder()
    ends, weights = [], []
    for name in ("a", "b"):
        value = b.emit_one(INPUT, name=name, dtype="float32", shape=(64, 8))
        for i in range(rng.randint(1, 4)):
            weights.append(variable(b, f"{name}{i}", (8, 8)))
            value = b.emit_one(rng.choice((NEG, EXP)), b.emit_one(MATMUL, value, weights[-1]))
        ends.append(value)
    loss = b.emit_one(SUM, b.emit_one(MUL, *ends), axes=(0, 1), keepdims=False)
    side = b.emit_one(SUM, b.emit_one(ADD, ends[0], ends[0]), axes=(0, 1), keepdims=False)
    descend(b, loss, weights, every=every)
    b.outputs.append(Output("side", side))
    counter(b)
    return b.freeze()


def judge():
    """A graph that evaluates: a product with a parameter of the training graph, summed up."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="v", dtype="float32", shape=(8, 8))
    left, right = (
        b.emit_one(EXP, b.emit_one(MATMUL, x, variable(b, "a0", (8, 8)))),
        b.emit_one(NEG, x),
    )
    b.outputs = [
        Output("score", b.emit_one(SUM, b.emit_one(MUL, left, right), axes=(0, 1), keepdims=False))
    ]
    return b.freeze()


def planned(seed, streams, *, evaluate=(0, 0), **options):
    rng = Random(seed)
    settings_ = CompileOptions(
        "towers", num_streams=streams, evaluate_every=evaluate[0], evaluate_batches=evaluate[1],
        **options,
    )  # fmt: skip
    graph = towers(rng, settings_.accumulate)
    evaluation = judge() if evaluate[0] else None
    return compile_graph(graph, slow_target(rng), settings_, evaluation=evaluation)


def under_way(play, plan, seed):
    """Return the most batches that are under way at a time, of twelve."""
    batch = by_prefix(plan, "gradient")
    begun, done = dict.fromkeys(batch, 0), dict.fromkeys(batch, 0)
    most = 0
    for actor, firing, is_start in play(plan, Random(seed), 12):
        if actor in batch:
            (begun if is_start else done)[actor] = firing + 1
            most = max(most, max(begun.values()) - min(done.values()))
    assert set(done.values()) == {12}
    return most


def by_prefix(plan, *prefixes):
    return {a.id for a in plan.actors if a.name.partition(".")[0] in prefixes}


def changing(plan):
    """Return the actors that write what a snapshot reads."""
    state = {plan.views[variable.view].register for variable in plan.state}
    return {
        actor.id
        for actor in plan.actors
        for launch in actor.launches
        if state & {plan.views[view].register for view in launch.outputs}
    }


CASES = [
    {},
    {"accumulate": 3},
    {"snapshot_every": 2},
    {"evaluate": (2, 3)},
    {"accumulate": 2, "snapshot_every": 2, "evaluate": (2, 2), "metrics_every": 2},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@given(seed=st.integers(0, 10_000), streams=st.integers(1, 3))
@settings(max_examples=tiers.examples(25), deadline=None)
def test_firings_of_a_step_never_overlap_and_nobody_reads_what_changes(play, case, seed, streams):
    plan = planned(seed, streams, **case)
    every = case.get("accumulate", 1)
    batch = by_prefix(plan, "step", "gradient")
    update = by_prefix(plan, "update")
    # A snapshot reads variables only; an evaluation uses the bytes of the step's temporaries too.
    holds_off = dict.fromkeys(by_prefix(plan, "snapshot"), changing(plan))
    holds_off |= dict.fromkeys(by_prefix(plan, "evaluate"), update | batch)
    done = [0] * len(plan.actors)
    running = set()
    for actor, firing, is_start in play(plan, Random(seed), STEPS * every):
        if not is_start:
            running.discard(actor)
            done[actor] = firing + 1
            continue
        running.add(actor)
        if actor in batch:
            assert all(done[a] >= firing for a in batch), "a batch overtakes the one before"
            assert all(done[a] >= firing // every for a in update), "an update is still to come"
        if actor in update:
            assert all(done[a] >= (firing + 1) * every for a in batch), "a batch is missing"
            assert all(done[a] >= firing for a in update), "an update overtakes the one before"
        for reader, others in holds_off.items():
            if actor == reader or (actor in others and reader in running):
                assert not running & others, "the variables change under a reader"
    assert all(done[a] == STEPS * every for a in batch)
    assert all(done[a] == STEPS for a in update)
    assert not running


@given(seed=st.integers(0, 10_000))
@settings(max_examples=tiers.examples(15), deadline=None)
def test_an_evaluation_takes_all_its_batches_between_two_steps(play, seed):
    plan = planned(seed, 2, evaluate=(2, 3))
    step, judging = by_prefix(plan, "step"), by_prefix(plan, "evaluate")
    done = [0] * len(plan.actors)
    for actor, firing, is_start in play(plan, Random(seed), 6):
        if not is_start:
            done[actor] = firing + 1
        elif actor in judging:
            assert {done[a] for a in step} == {2 * (firing // 3 + 1)}
        elif actor in step:
            assert {done[a] for a in judging} == {3 * (firing // 2)}
    assert {done[a] for a in judging} == {9}


@given(seed=st.integers(0, 10_000), streams=st.integers(2, 3))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_what_crosses_between_chains_has_one_register_per_maker_and_set_of_readers(seed, streams):
    plan = planned(seed, streams)
    chains = by_prefix(plan, "step")
    crossings = []
    for register in plan.registers:
        if register.kind is not RegisterKind.DATA:
            continue
        (producer,) = [a for a in plan.actors if register.id in {p.register for p in a.outputs}]
        if producer.id not in chains:
            continue
        readers = [a for a in plan.actors if register.id in {p.register for p in a.inputs}]
        if register.name.partition(".")[0] != "metrics":
            crossings.append((producer.id, tuple(a.id for a in readers)))
            assert register.num_slots == 1
        for reader in readers:
            if reader.launches:
                used = {plan.views[v].register for x in reader.launches for v in x.inputs}
                assert register.id in used, f"{reader.name} waits for what it does not read"
    assert len(crossings) == len(set(crossings))


@given(seed=st.integers(0, 10_000), streams=st.integers(1, 3))
@settings(max_examples=tiers.examples(30), deadline=None)
def test_no_control_edge_says_what_another_path_says(seed, streams):
    plan = planned(seed, streams)
    edges, registers = edges_of(plan)
    for index, edge in enumerate(edges):
        name = plan.registers[registers[index]].name
        if plan.registers[registers[index]].kind is RegisterKind.CONTROL and ">" in name:
            others = [e for i, e in enumerate(edges) if i < index or plan.registers[
                registers[i]].kind is RegisterKind.DATA]  # fmt: skip
            assert not is_path(others, edge.producer, edge.consumer), name


def is_path(edges, first, last):
    reached, grew = {first}, True
    while grew:
        more = {e.consumer for e in edges if e.producer in reached} - reached
        reached |= more
        grew = bool(more)
    return last in reached


def test_collectives_are_actors_of_a_stream_of_their_own_that_updates_wait_for():
    plan = compile_graph(
        towers(Random(1)), replace(slow_target(Random(2)), ranks=NEAR), CompileOptions("t")
    )
    comm = [a for a in plan.actors if a.kind is ActorKind.COMM]
    assert comm
    assert {plan.streams[a.stream].name for a in comm} == {"comm"}
    assert all(a.name.partition(".")[0] == "all_reduce" for a in comm)
    edges, _ = edges_of(plan)
    updates = [a.id for a in plan.actors if any(x.op == "sgd_update" for x in a.launches)]
    (fetch,) = [a.id for a in plan.actors if a.kind is ActorKind.SINK]
    assert all(any(is_path(edges, a.id, u) for u in (*updates, fetch)) for a in comm)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30))
@settings(max_examples=tiers.examples(150), deadline=None)
def test_is_before_is_whether_a_path_of_edges_leads_there(pairs):
    pairs = [(a, b) for a, b in pairs if a < b]
    actors = ActorGraph(PlanBuilder(made_up("host")))
    for index in range(12):
        actors.add(f"a{index}", ActorKind.COMPUTE, StreamId(0))
    for a, b in pairs:
        actors.control(f"{a}>{b}", a, b, "1: a test")
    reach = {(a, b) for a, b in pairs}
    for k in range(12):
        reach |= {(a, b) for a in range(12) for b in range(12) if {(a, k), (k, b)} <= reach}
    for a in range(12):
        for b in range(12):
            assert actors.is_before(a, b) == ((a, b) in reach)
            assert actors.has_edge(a, b) == ((a, b) in pairs)


def test_batches_in_flight_are_a_number_and_bytes_that_have_one_slot_are_missed(play, monkeypatch):
    """With more than one under way the race check names what must have slots of its own."""
    most, missed = 0, []
    for seed in range(12):
        monkeypatch.setattr(pipeline, "lower", lower)
        alone = planned(seed, 2, accumulate=4)
        check_races(alone)
        assert under_way(play, alone, seed) == 1
        monkeypatch.setattr(pipeline, "lower", partial(lower, in_flight=2))
        plan = planned(seed, 2, accumulate=4)
        verify_plan(plan)
        most = max(most, under_way(play, plan, seed))
        try:
            check_races(plan)
        except RaceError as error:
            missed.append(str(error))
    assert most == 2
    assert missed
    assert all("gradient" in text for text in missed)
