"""The diagnosis against machines that were driven by hand, and by chance."""

from dataclasses import replace
from math import gcd
from random import Random

import pytest

from actors.loop.watchdog import RunSnapshot, WaitKind, WaitReason, diagnose
from actors.loop.worker import RunningLaunch
from actors.machine.machine import Machine
from actors.machine.table import OUTSIDE, Edge, MachineTable
from actors.machine.transitions import Message, State, message
from compiler.contract.placement import HOST, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, ActorKind, Launch, SourceLine, Stream
from compiler.contract.types import ActorId, StreamId

MINUTE = 60_000_000_000


def plan_of(table, kinds=None):
    """A plan with the actors of a table; each has one launch, at a line of its own."""
    launch = Launch("k", "op", (), (), (), None, "scope", 0, 0.0)
    actors = [
        Actor(
            ActorId(a), name, (kinds or {}).get(a, ActorKind.COMPUTE), StreamId(table.streams[a]),
            (replace(launch, source=a),), (), (), False, 0.0,
        )
        for a, name in enumerate(table.names)
    ]  # fmt: skip
    lines = tuple(SourceLine("train.py", a + 1) for a in range(len(actors)))
    streams = tuple(
        Stream(StreamId(s), HOST, StreamRole.PORT, 0, f"s{s}") for s in sorted(set(table.streams))
    )
    return Plan("p", streams, (), (), (), tuple(actors), (), (), (), lines, (), "", "", ())


def situation(machine, running=(), *, kinds=None, undelivered=(), dispatcher=None, **options):
    every = range(machine.table.num_actors)
    return RunSnapshot(
        plan=plan_of(machine.table, kinds),
        table=machine.table,
        states=tuple(machine.state(a) for a in every),
        firings=tuple(machine.firing_index(a) + 1 for a in every),
        lacks=tuple(machine.missing_messages(a) for a in every),
        in_flight={a: RunningLaunch(a, 0, MINUTE, ()) for a in running},
        is_delivered=tuple(a not in undelivered for a in every),
        dispatcher=dispatcher,
        is_halted=machine.is_halted,
        now_ns=3 * MINUTE,
        **options,
    )


def drain(machine):
    """Deliver messages; return the actors that started."""
    started = []
    while machine.outbox:
        machine.receive(machine.outbox.pop(0))
    for queue in (machine.detached, machine.fireable, machine.flushing):
        started += queue
        queue.clear()
    return started


def finish(machine, *actors):
    for actor in actors:
        machine.receive(message(Message.DONE, actor))
        drain(machine)


@pytest.fixture
def chain(make_chain):
    """a0 -> a1 -> a2 with five steps admitted and a0 in its first firing."""
    machine = Machine(make_chain(3))
    machine.admit(0, 5)
    drain(machine)
    return machine


def test_a_blocked_source_is_the_root_and_all_others_wait_down_to_it(chain):
    stall = diagnose(situation(chain, [0]), 61.0)
    assert (stall.roots, stall.is_deadlock) == (("a0",), False)
    assert [actor.waits for actor in stall.actors] == [
        (),
        (WaitReason(WaitKind.INPUT, 0, "r0"),),
        (WaitReason(WaitKind.INPUT, 1, "r1"),),
    ]
    assert stall.lines() == (
        "no firing began or ended for 61 s: 'a0' has been in launch 1 of 1, op 'op' in 'scope'"
        " (train.py:1) for 120 s",
        "  a0  firing 0, has been in launch 1 of 1, op 'op' in 'scope' (train.py:1) for 120 s",
        "  a1  firing -1, waits for input 'r0' from 'a0'",
        "  a2  firing -1, waits for input 'r1' from 'a1'",
    )


def test_a_sink_whose_callback_blocks_holds_its_slots_and_is_the_root(chain):
    finish(chain, 0, 1, 0)
    stall = diagnose(situation(chain, [2]), 60.0)
    assert stall.roots == ("a2",)
    assert [actor.waits for actor in stall.actors[:2]] == [
        (WaitReason(WaitKind.REGISTER, 1, "r0"),),
        (WaitReason(WaitKind.REGISTER, 2, "r1"),),
    ]
    assert "a free slot of register 'r1' from 'a2'" in stall.lines()[2]


def test_the_place_in_the_users_code_is_told_where_it_is_known(chain):
    before = situation(chain, [0])
    where = RunningLaunch(0, 0, MINUTE, ("loader.py:33 in __next__", "x.py:1 in f"))
    stall = diagnose(replace(before, in_flight={0: where}), 60.0)
    assert stall.reason.endswith("for 120 s, now at loader.py:33 in __next__")
    assert stall.lines()[2:4] == ("        loader.py:33 in __next__", "        x.py:1 in f")


def test_a_firing_that_was_started_waits_for_whoever_occupies_its_stream(make_chain):
    machine = Machine(make_chain(3, 2, streams=[0, 1, 1], detached=[0, 1, 2]))
    machine.admit(0, 5)
    drain(machine)
    finish(machine, 0, 1, 0)
    assert [machine.state(a) for a in range(3)] == [State.FIRING] * 3
    stall = diagnose(situation(machine, [2]), 60.0)
    assert stall.actors[1].waits == (WaitReason(WaitKind.STREAM, 2),)
    assert stall.actors[1].doing == "waits for its stream, which 'a2' occupies"
    assert stall.roots == ("a2",)


def test_a_firing_whose_message_the_dispatcher_has_not_taken_waits_for_its_chain(make_chain):
    machine = Machine(make_chain(3, 2, streams=[0, 1, 2], detached=[0, 2]))
    machine.admit(0, 5)
    drain(machine)
    finish(machine, 0)
    stall = diagnose(situation(machine, [1], undelivered=[0], dispatcher=1), 60.0)
    assert stall.actors[0].waits == (WaitReason(WaitKind.STREAM, 1),)
    assert stall.roots == ("a1",)


def test_a_collective_operation_waits_for_a_peer(chain):
    finish(chain, 0)
    stall = diagnose(situation(chain, [1], kinds={1: ActorKind.COMM}), 60.0)
    assert stall.actors[1].waits == (WaitReason(WaitKind.PEER, -1),)
    assert stall.reason.endswith("for 120 s; it waits for another rank")


def test_a_run_that_has_done_what_was_admitted_is_idle_and_not_stalled(chain):
    assert diagnose(situation(Machine(chain.table)), 60.0) is None
    for _ in range(5):
        finish(chain, 0, 1, 2)
    assert diagnose(situation(chain), 60.0) is None


def test_an_actor_that_drains_waits_for_the_end_and_for_its_slots(chain):
    chain.end_admission(0)
    for _ in range(5):
        finish(chain, 0, 1)
        if chain.firing_index(1) < 4:
            finish(chain, 2)
    assert chain.state(1) is State.DRAINING
    stall = diagnose(situation(chain, [2]), 60.0)
    assert [actor.name for actor in stall.actors] == ["a1", "a2"]
    assert stall.actors[0].waits == (WaitReason(WaitKind.REGISTER, 2, "r1"),)


def test_after_a_failure_the_actor_that_still_runs_is_named(chain):
    finish(chain, 0)
    chain.receive(message(Message.FAILED, 1))
    stall = diagnose(situation(chain, [0]), 60.0)
    assert stall.roots == ("a0",)
    assert stall.reason.endswith("after a failure the run waits for it")


def test_a_halted_run_that_runs_nothing_is_over_and_not_stalled(chain):
    chain.halt()
    assert diagnose(situation(chain), 60.0) is None


CIRCLE = [Edge("direct", 0, 2, 1, 1, 1), Edge("fast", 0, 1, 1, 3, 3), Edge("slow", 1, 2, 3, 1, 3)]
"""a0 can put one token on `direct` before a1 has seen three on `fast`."""


def test_actors_that_wait_for_one_another_are_named_in_order_with_the_mend():
    machine = Machine(MachineTable.from_edges(["a", "b", "c"], CIRCLE, sources=[0]))
    machine.admit(0, 9)
    drain(machine)
    finish(machine, 0)
    stall = diagnose(situation(machine), 60.0)
    assert (stall.roots, stall.is_deadlock) == (("a", "c", "b"), True)
    assert stall.reason == (
        "the actors wait for one another: 'a' waits for a free slot of register 'direct' from 'c',"
        " 'c' waits for input 'slow' from 'b', 'b' waits for input 'fast' from 'a';"
        " more slots of 'direct' would let it continue"
    )


def stuck_machine(table, rng, hung):
    """Run a table until only the actors of `hung` run, each stuck in a firing of its own choice."""
    machine = Machine(table)
    for source in table.sources:
        machine.admit(source, rng.randint(1, 12))
    last = {actor: rng.randint(0, 4) for actor in hung}
    running = drain(machine)
    while True:
        able = [a for a in running if machine.firing_index(a) < last.get(a, 10**6)]
        if not able:
            return machine, sorted(running)
        actor = rng.choice(able)
        running.remove(actor)
        machine.receive(message(Message.DONE, actor))
        running += drain(machine)


@pytest.mark.parametrize("seed", range(300))
def test_the_roots_are_actors_that_hang_and_everybody_waits_for_what_is_missing(make_random, seed):
    rng = Random(seed)
    table = make_random(rng)
    hung = rng.sample(range(table.num_actors), rng.randint(1, min(2, table.num_actors)))
    machine, running = stuck_machine(table, rng, hung)
    stall = diagnose(situation(machine, running), 60.0)
    if not running:
        assert stall is None
        return
    assert not stall.is_deadlock
    names = [table.names[a] for a in running]
    assert stall.roots
    assert set(stall.roots) <= set(names)
    for report in stall.actors:
        assert bool(report.waits) == (report.name not in names)


def tight_table(table):
    """The same graph with as few slots as can ever move a token: often it cannot go on."""
    edges = [replace(e, num_slots=e.produce + e.consume - gcd(e.produce, e.consume), initial=0)
             for e in table.edges if e.producer != OUTSIDE]  # fmt: skip
    return MachineTable.from_edges(table.names, edges, sources=table.sources)


def run_on(machine, rng, num_firings):
    """Let a machine run for some more firings, or until nothing can go on."""
    running = drain(machine)
    for _ in range(num_firings):
        if not running:
            return
        actor = running.pop(rng.randrange(len(running)))
        machine.receive(message(Message.DONE, actor))
        running += drain(machine)


@pytest.mark.parametrize("seed", range(300))
def test_a_deadlock_is_named_whenever_no_number_of_steps_helps_and_only_then(make_random, seed):
    rng = Random(seed)
    machine, running = stuck_machine(tight_table(make_random(rng)), rng, [])
    assert not running
    table = machine.table
    stall = diagnose(situation(machine), 60.0)
    before = [machine.firing_index(a) for a in range(table.num_actors)]
    for source in table.sources:
        machine.admit(source, 10**6)
    run_on(machine, rng, 500)
    if stall is not None:
        ring = [table.names.index(name) for name in stall.roots]
        assert stall.is_deadlock
        assert [machine.firing_index(a) for a in ring] == [before[a] for a in ring]
        for actor, on in zip(ring, [*ring[1:], ring[0]], strict=True):
            waits = next(r for r in stall.actors if r.name == table.names[actor]).waits
            assert on in [wait.on for wait in waits]
    if machine.is_quiescent:
        assert diagnose(situation(machine), 60.0).is_deadlock
