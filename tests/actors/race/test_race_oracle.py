"""A brute-force oracle of races, happens-before token by token, agrees on random plans."""

from dataclasses import replace

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.race.race import RaceError, UnrollLimits, check_unrolled
from compiler.contract.errors import InternalError
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.types import StreamId

ORACLE_PERIODS = 14


@st.composite
def random_plans(draw, make_plan):
    """A plan of 2-5 actors, rates 1-2, 1-3 slots, any streams and offsets; and its balance.

    Some edges are credits; the third result says how many tokens each of those starts with.
    """
    make = make_plan()
    initial = {}
    num_actors = draw(st.integers(2, 5))
    num_sources = draw(st.integers(1, 2)) if num_actors > 2 else 1
    repeat = [draw(st.integers(1, 2)) for _ in range(num_actors)]
    inputs = [[] for _ in range(num_actors)]
    outputs = [[] for _ in range(num_actors)]
    for consumer in range(num_sources, num_actors):
        count = draw(st.integers(1, min(2, consumer)))
        makers = draw(
            st.lists(st.integers(0, consumer - 1), min_size=count, max_size=count, unique=True)
        )
        for producer in makers:
            common = np.gcd(repeat[producer], repeat[consumer])
            rates = int(repeat[consumer] // common), int(repeat[producer] // common)
            slots = draw(st.integers(max(rates), 3))
            name = f"e{producer}.{consumer}"
            if draw(st.integers(0, 3)):
                register = make.edge(name, slots, f"x{producer}.{consumer}")
            else:
                register = make.register(name, RegisterKind.CONTROL, slots)
                initial[name] = draw(st.integers(0, slots))
            outputs[producer].append((register, rates[0]))
            inputs[consumer].append((register, rates[1]))
    state = [make.register(f"s{i}", RegisterKind.VARIABLE) for i in range(2)]
    views = [make.view(register) for register in state]
    for a in range(num_actors):
        if a < num_sources:
            make.actor(f"a{a}", ActorKind.SOURCE, (), outputs[a])
            continue
        if not outputs[a] and draw(st.booleans()):
            make.actor(f"a{a}", ActorKind.SINK, inputs[a])
            continue
        fields = {f.register: f.view for f in make.fields}
        read = [fields[r] for r, _ in inputs[a] if r in fields]
        read += draw(st.lists(st.sampled_from(views)))
        written = [fields[r] for r, _ in outputs[a] if r in fields]
        written += draw(st.lists(st.sampled_from(views), max_size=1))
        launches = [make.launch(f"k{a}", read, written)]
        make.actor(f"a{a}", ActorKind.COMPUTE, inputs[a], outputs[a], launches)
    span = draw(st.sampled_from([40, 200, 1000]))
    place = st.integers(0, span // 4).map(lambda word: 4 * word)
    plan = replace(
        make.plan(span + 8),
        registers=tuple(
            replace(r, offsets_bytes=tuple(draw(place) for _ in range(r.num_slots)))
            for r in make.registers
        ),
        actors=tuple(replace(a, stream=StreamId(draw(st.integers(0, 1)))) for a in make.actors),
    )
    return plan, repeat, initial


class Oracle:
    """Happens-before by reachability over tokens, and all pairs of firings compared."""

    def __init__(self, plan, repetitions, initial):
        self.plan = plan
        self.initial = initial
        self.firings = [
            (actor.id, k)
            for actor in plan.actors
            for k in range(ORACLE_PERIODS * repetitions[actor.id])
        ]
        self.before = self.reachable()

    def past(self):
        """The firings that end directly before each firing, token by token."""
        past = {firing: set() for firing in self.firings}
        for actor, k in self.firings:
            if k:
                past[actor, k].add((actor, k - 1))
        ends = {p.register: (a.id, p.rate) for a in self.plan.actors for p in a.outputs}
        for consumer in self.plan.actors:
            for port in consumer.inputs:
                producer, rate = ends[port.register]
                register = self.plan.registers[port.register]
                start = self.initial.get(register.name, 0)
                written = self.by_token(producer, rate)
                read = self.by_token(consumer.id, port.rate)
                for reader, writer in zip(read[start:], written, strict=False):
                    past[reader].add(writer)
                for writer, reader in zip(
                    written[register.num_slots - start :], read, strict=False
                ):
                    past[writer].add(reader)
        return past

    def by_token(self, actor, rate):
        return [firing for firing in self.firings if firing[0] == actor for _ in range(rate)]

    def reachable(self):
        """Bit sets of all firings before each; None when some firing never can start."""
        past, before = self.past(), {}
        number = {firing: i for i, firing in enumerate(self.firings)}
        while len(before) < len(self.firings):
            ready = [f for f in self.firings if f not in before and past[f] <= before.keys()]
            if not ready:
                return None
            for firing in ready:
                before[firing] = 0
                for other in past[firing]:
                    before[firing] |= before[other] | 1 << number[other]
        return [before[firing] for firing in self.firings]

    def touched(self, actor, k):
        """Pairs (register, bytes as a bit set) that a firing reads, and that it writes."""
        rates = {p.register: p.rate for p in actor.inputs + actor.outputs}
        fields = [f.view for f in self.plan.fields]
        if actor.kind in (ActorKind.SOURCE, ActorKind.SINK):
            ports = [[p.register for p in ports] for ports in (actor.inputs, actor.outputs)]
            views = [[v for v in fields if self.plan.views[v].register in p] for p in ports]
        else:
            views = [actor.launches[0].inputs, actor.launches[0].outputs]
        touched = ([], [])
        for found, wanted in zip(touched, views, strict=True):
            for view in wanted:
                register = self.plan.registers[self.plan.views[view].register]
                rate = rates.get(register.id)
                slots = [0] if rate is None else range(k * rate, (k + 1) * rate)
                for slot in slots:
                    offset = register.offsets_bytes[slot % register.num_slots]
                    found.append((register.id, 0xFF << offset))
        return touched

    def races(self):
        """The pairs of (actor, register) that conflict in some two firings without an order."""
        races = set()
        touched = [self.touched(self.plan.actors[a], k) for a, k in self.firings]
        for i, (actor, _) in enumerate(self.firings):
            for j in range(i):
                other = self.firings[j][0]
                if self.before[i] >> j & 1 or self.before[j] >> i & 1:
                    continue
                (read, written), (also_read, also_written) = touched[i], touched[j]
                for ours, theirs in ((written, also_read + also_written), (read, also_written)):
                    for register, mask in ours:
                        for other_register, other_mask in theirs:
                            if mask & other_mask:
                                ends = (actor, register), (other, other_register)
                                races.add(frozenset(ends))
        return races


def ends_of(plan, race):
    actors = {actor.name: actor.id for actor in plan.actors}
    registers = {register.name: register.id for register in plan.registers}
    return frozenset(
        (actors[access.actor], registers[access.register]) for access in (race.first, race.second)
    )


def actors_of(ends):
    return frozenset(actor for actor, _ in ends)


@settings(max_examples=tiers.examples(250), deadline=None)
@given(st.data())
def test_random_plans_race_exactly_where_reachability_says_so(plan_maker, data):
    plan, repetitions, initial = data.draw(random_plans(plan_maker))
    oracle = Oracle(plan, repetitions, initial)
    if oracle.before is None:
        with pytest.raises(InternalError, match="deadlocks"):
            check_unrolled(plan, initial=initial)
        return
    races = oracle.races()
    for limits, periods in ((UnrollLimits(), 3), (UnrollLimits(long_period=0), 40)):
        try:
            check_unrolled(plan, periods, initial, limits=limits)
            found = set()
        except RaceError as error:
            found = {ends_of(plan, race) for race in error.races}
        assert found <= races
        assert {actors_of(race) for race in found} == {actors_of(race) for race in races}
