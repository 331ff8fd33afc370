"""The machine beside a model of plain counters: any call at any moment, and the same answer.

The model knows an actor's rules as sentences: it looks at what is there and does what can be done.
It has no levels, no counts of what is missing and no table of transitions.
"""

from collections import deque
from random import Random

import pytest
import tiers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.machine.errors import ProtocolError
from actors.machine.machine import Machine
from actors.machine.table import OUTSIDE
from actors.machine.transitions import KIND_BITS, Message, message
from actors.testing.spin import FAMILY

PLANS = {name: study.table for name, study in FAMILY.items()}
LIMIT = 3
RUNNING = ("FIRING", "FLUSHING")


class Model:
    """What every actor and every edge has. Edges are numbered as in the plan's table."""

    def __init__(self, table):
        self.table = table
        self.edges = table.edges
        self.state = ["WAITING" for _ in table.names]
        self.fired = [0 for _ in table.names]
        self.tokens = [edge.initial for edge in table.edges]
        self.slots = [edge.num_slots - edge.initial for edge in table.edges]
        self.read = [0 for _ in table.edges]
        self.ended = set()
        self.halted = False
        self.forward = [deque() for _ in table.edges]
        self.backward = [deque() for _ in table.edges]
        self.started = []
        for actor in range(table.num_actors):
            self.look(actor)

    def inputs(self, actor):
        return [i for i, edge in enumerate(self.edges) if edge.consumer == actor]

    def outputs(self, actor):
        return [i for i, edge in enumerate(self.edges) if edge.producer == actor]

    def has_tokens(self, edge):
        return self.tokens[edge] >= self.edges[edge].consume

    def has_slots(self, actor):
        return all(self.slots[e] >= self.edges[e].produce for e in self.outputs(actor))

    # -- what an actor does by itself ------------------------------------------------------------

    def look(self, actor):
        """Let an actor do what it can do now."""
        if self.state[actor] == "WAITING" and not self.halted:
            if all(map(self.has_tokens, self.inputs(actor))):
                if self.has_slots(actor):
                    self.start(actor, "FIRING", [self.edges[e].consume for e in self.inputs(actor)])
            elif any(e in self.ended and not self.has_tokens(e) for e in self.inputs(actor)):
                if self.table.is_flushed[actor]:
                    self.state[actor] = "CLOSING"
                else:
                    self.leave(actor)
        if self.state[actor] == "CLOSING" and not self.halted and self.has_slots(actor):
            edges = self.inputs(actor)
            if all(e in self.ended or self.has_tokens(e) for e in edges):
                rest = [min(self.tokens[e], self.edges[e].consume) for e in edges]
                self.start(actor, "FLUSHING", rest)
        if self.state[actor] == "DRAINING":
            is_home = all(self.slots[e] == self.edges[e].num_slots for e in self.outputs(actor))
            if is_home and self.ended.issuperset(self.inputs(actor)):
                self.state[actor] = "ENDED"

    def start(self, actor, state, counts):
        for e, count in zip(self.inputs(actor), counts, strict=True):
            self.tokens[e] -= count
            self.read[e] = count
        for e in self.outputs(actor):
            self.slots[e] -= self.edges[e].produce
        self.state[actor] = state
        self.fired[actor] += 1
        self.started.append(actor)

    def leave(self, actor):
        """Give back what nobody will read, and say that nothing follows."""
        for e in self.inputs(actor):
            self.give_back(e, self.tokens[e])
            self.tokens[e] = 0
        for e in self.outputs(actor):
            self.forward[e].append(Message.END)
        self.state[actor] = "DRAINING"

    def give_back(self, edge, count):
        if self.edges[edge].producer != OUTSIDE:
            self.backward[edge].extend([Message.RETURN] * count)

    # -- what happens to it ----------------------------------------------------------------------

    def finish(self, actor, kind):
        was_flush = self.state[actor] == "FLUSHING"
        if kind is Message.FAILED:
            self.state[actor], self.halted = "FAILED", True
            return
        if kind is Message.EXHAUSTED:
            self.fired[actor] -= 1
            for e in self.outputs(actor):
                self.slots[e] += self.edges[e].produce
            self.ended.add(self.table.admission[actor])
            self.leave(actor)
        else:
            for e in self.outputs(actor):
                self.forward[e].append(Message.READY)
            for e in self.inputs(actor):
                if was_flush:
                    self.give_back(e, self.read[e])
                elif self.edges[e].producer != OUTSIDE:
                    self.backward[e].append(Message.FREE)
            if was_flush:
                self.leave(actor)
            else:
                self.state[actor] = "WAITING"
        self.look(actor)

    def forward_arrives(self, edge, kind):
        actor = self.edges[edge].consumer
        if kind is Message.END:
            self.ended.add(edge)
        elif self.state[actor] == "DRAINING":
            self.give_back(edge, self.edges[edge].produce)
        else:
            self.tokens[edge] += self.edges[edge].produce
        self.look(actor)

    def backward_arrives(self, edge, kind):
        self.slots[edge] += 1 if kind is Message.RETURN else self.edges[edge].consume
        self.look(self.edges[edge].producer)

    def accepts(self, code):
        """Whether a message may arrive now, from wherever it comes."""
        kind, subject = code & 7, code >> KIND_BITS
        if code < 0 or kind == 7:
            return False
        if kind in (Message.DONE, Message.FAILED, Message.EXHAUSTED):
            if subject >= len(self.state) or self.state[subject] not in RUNNING:
                return False
            is_source = self.table.admission[subject] is not None
            return kind != Message.EXHAUSTED or (is_source and self.state[subject] == "FIRING")
        if subject >= len(self.edges):
            return False
        edge = self.edges[subject]
        if kind == Message.END:
            return subject not in self.ended and self.state[edge.consumer] != "ENDED"
        if kind == Message.READY:
            state = self.state[edge.consumer]
            is_room = self.tokens[subject] + edge.produce <= edge.num_slots
            return state != "ENDED" and (state == "DRAINING" or edge.producer == OUTSIDE or is_room)
        if edge.producer == OUTSIDE or self.state[edge.producer] == "ENDED":
            return False
        count = 1 if kind == Message.RETURN else edge.consume
        return self.slots[subject] + count <= edge.num_slots

    def lacks(self, actor):
        """What an actor waits for, in the words of the machine; admission is named last."""
        edges = sorted(self.inputs(actor), key=lambda e: (self.edges[e].producer == OUTSIDE, e))
        tokens = [(self.edges[e].consume - self.tokens[e], "tokens", e) for e in edges]
        slots = [(self.edges[e].produce - self.slots[e], "slots", e) for e in self.outputs(actor)]
        lacking = [row for row in tokens + slots if row[0] > 0]
        return tuple(f"{n} more {what} of {self.edges[e].name!r}" for n, what, e in lacking)


def everything_in(machine):
    """The whole state of a machine, for the question whether anything has changed."""
    columns = machine.columns
    names = [name for name in columns.__slots__ if name not in ("table", "wiring")]
    return [repr(getattr(columns, name)) for name in names] + [repr(machine.start_causes)]


class MachineBesideModel(RuleBasedStateMachine):
    """Does everything to both; `forward` and `backward` hold what the machine has sent."""

    @initialize(
        name=st.sampled_from(sorted(PLANS)), steps=st.integers(0, 4), is_short=st.booleans()
    )
    def begin(self, name, steps, is_short):
        self.table = PLANS[name]
        self.machine, self.model = Machine(self.table), Model(self.table)
        self.forward = [deque() for _ in self.table.edges]
        self.backward = [deque() for _ in self.table.edges]
        self.running = set()
        self.closed = set()
        for actor in self.table.sources if steps else ():
            self.permit(actor, steps * self.table.firings_per_step[actor])
        for actor in self.table.sources if is_short else ():
            self.close(actor, None)

    def pick(self, data, choices):
        return data.draw(st.sampled_from(sorted(choices)))

    def open_sources(self):
        return [a for a in self.table.sources if self.model.state[a] not in ("DRAINING", "ENDED")]

    @precondition(lambda self: set(self.open_sources()) - self.closed)
    @rule(data=st.data(), count=st.integers(1, LIMIT))
    def admit(self, data, count):
        self.permit(self.pick(data, set(self.open_sources()) - self.closed), count)

    def permit(self, actor, count):
        self.machine.admit(actor, count)
        if self.model.state[actor] != "FAILED":
            self.model.tokens[self.table.admission[actor]] += count
            self.model.look(actor)

    @precondition(lambda self: self.open_sources())
    @rule(data=st.data(), limit=st.none() | st.integers(0, 2 * LIMIT))
    def end_admission(self, data, limit):
        self.close(self.pick(data, self.open_sources()), limit)

    def close(self, actor, limit):
        self.machine.end_admission(actor, limit)
        self.closed.add(actor)
        if self.model.state[actor] == "FAILED":
            return
        edge = self.table.admission[actor]
        if limit is not None:
            left = max(0, limit - self.model.fired[actor])
            self.model.tokens[edge] = min(self.model.tokens[edge], left)
        self.model.ended.add(edge)
        self.model.look(actor)

    def deliver_forward(self, edge):
        kind = self.forward[edge].popleft()
        self.machine.receive(message(kind, edge))
        self.model.forward_arrives(edge, self.model.forward[edge].popleft())

    def deliver_backward(self, edge):
        kind = self.backward[edge].popleft()
        self.machine.receive(message(kind, edge))
        self.model.backward_arrives(edge, self.model.backward[edge].popleft())

    @precondition(lambda self: self.events())
    @rule(seed=st.integers(0, 10**6), num_events=st.integers(1, 12))
    def go_on(self, seed, num_events):
        self.run_on(seed, num_events)

    def run_on(self, seed, num_events):
        """Deliver messages and finish firings in a random order, and try something illegal."""
        rng = Random(seed)
        for _ in range(num_events):
            if not self.events():
                return
            event, *subject = rng.choice(self.events())
            event(*subject)
            self.both_agree()
            self.refuses(rng.randrange(-8, 8 * len(self.table.edges)))

    @precondition(lambda self: self.events())
    @rule(seed=st.integers(0, 10**6))
    def go_on_for_long(self, seed):
        self.run_on(seed, 200)

    def events(self):
        return [
            *[(self.deliver_forward, e) for e, channel in enumerate(self.forward) if channel],
            *[(self.deliver_backward, e) for e, channel in enumerate(self.backward) if channel],
            *[(self.finish, actor, Message.DONE) for actor in sorted(self.running)],
        ]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data):
        self.finish(self.pick(data, self.running), Message.FAILED)

    def exhaustible(self):
        firing = {a for a in self.running if self.model.state[a] == "FIRING"}
        return firing.intersection(self.table.sources)

    @precondition(lambda self: self.exhaustible())
    @rule(data=st.data())
    def exhaust(self, data):
        self.finish(self.pick(data, self.exhaustible()), Message.EXHAUSTED)

    def finish(self, actor, kind):
        self.running.remove(actor)
        self.machine.receive(message(kind, actor))
        self.model.finish(actor, kind)

    @precondition(lambda self: sum(self.model.fired) > 6)
    @rule()
    def halt(self):
        self.machine.halt()
        self.model.halted = True

    def refuses(self, code):
        """Check that a message which the model does not accept changes nothing."""
        if self.model.accepts(code):
            return
        before = everything_in(self.machine)
        with pytest.raises(ProtocolError):
            self.machine.receive(code)
        assert everything_in(self.machine) == before

    @rule(kind=st.integers(0, 7))
    def refuse_everything_of_a_kind(self, kind):
        for subject in range(-2, len(self.table.edges) + 2):
            self.refuses((subject << KIND_BITS) | kind)

    @rule()
    def refuse_illegal_calls(self):
        before = everything_in(self.machine)
        others = [a for a, edge in enumerate(self.table.admission) if edge is None]
        for actor in (-1, *others, len(self.table.names)):
            with pytest.raises(ProtocolError):
                self.machine.admit(actor, 1)
            with pytest.raises(ProtocolError):
                self.machine.end_admission(actor)
        for actor in self.closed.intersection(self.open_sources()):
            if self.model.state[actor] != "FAILED":
                with pytest.raises(ProtocolError):
                    self.machine.admit(actor, 1)
        assert everything_in(self.machine) == before

    @invariant()
    def both_agree(self):
        machine, model = self.machine, self.model
        while machine.outbox:
            code = machine.outbox.pop(0)
            kind, edge = Message(code & 7), code >> KIND_BITS
            is_forward = kind in (Message.READY, Message.END)
            (self.forward if is_forward else self.backward)[edge].append(kind)
        started = [*machine.fireable, *machine.detached, *machine.flushing]
        for queue in (machine.fireable, machine.detached, machine.flushing):
            queue.clear()
        assert sorted(started) == sorted(model.started)
        self.running.update(started)
        model.started.clear()
        assert self.forward == model.forward
        assert self.backward == model.backward
        actors = range(self.table.num_actors)
        assert [machine.state(a).name for a in actors] == model.state
        assert [machine.firing_index(a) + 1 for a in actors] == model.fired
        waiting = [a for a in actors if model.state[a] == "WAITING"]
        assert [machine.waits_for(a) for a in waiting] == [model.lacks(a) for a in waiting]
        assert machine.is_halted == model.halted
        assert machine.is_finished == all(state == "ENDED" for state in model.state)
        machine.validate(
            message(kind, edge)
            for channels in (self.forward, self.backward)
            for edge, channel in enumerate(channels)
            for kind in channel
        )


@pytest.mark.parametrize("name", PLANS)
def test_long_runs_agree_with_the_model(name):
    for seed in range(20):
        beside = MachineBesideModel()
        beside.begin(name, 1 + seed % 5, is_short=seed % 3 > 0)
        beside.both_agree()
        beside.run_on(seed, 30)
        for actor in beside.open_sources():
            beside.close(actor, seed // 2 if seed % 2 else None)
            beside.both_agree()
        beside.run_on(seed, 1000)
        assert beside.machine.is_finished


TestMachineBesideModel = MachineBesideModel.TestCase
TestMachineBesideModel.settings = settings(
    max_examples=tiers.examples(400),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
