"""The random graphs are what they promise, and every sort of scenario occurs."""

from collections import Counter
from random import Random

import pytest

from actors.testing.oracle import Command, EventOrder, make_scenario, random_table

SCENARIOS = [make_scenario(Random(seed)) for seed in range(2000)]


def schedule(table, num_slots):
    """Fire whoever can, one at a time, for one period; return whether all could."""
    tokens = [edge.initial for edge in table.edges]
    left = list(table.repetitions)
    progress = True
    while progress:
        progress = False
        for actor in range(table.num_actors):
            inputs, outputs = table.inputs[actor], table.outputs[actor]
            if (
                left[actor]
                and all(tokens[e] >= table.edges[e].consume for e in inputs)
                and all(tokens[e] + table.edges[e].produce <= num_slots(e) for e in outputs)
            ):
                for e in inputs:
                    tokens[e] -= table.edges[e].consume
                for e in outputs:
                    tokens[e] += table.edges[e].produce
                left[actor] -= 1
                progress = True
    return not any(left)


def test_every_graph_has_a_schedule_within_its_slots():
    for scenario in SCENARIOS[:500]:
        assert schedule(scenario.table, lambda e, t=scenario.table: t.edges[e].num_slots)


def test_many_graphs_have_no_slot_to_spare():
    tight = 0
    for scenario in SCENARIOS[:500]:
        edges = scenario.table.edges
        slots = [[e.num_slots - (i == j) for j, e in enumerate(edges)] for i in range(len(edges))]
        tight += any(not schedule(scenario.table, fewer.__getitem__) for fewer in slots)
    assert tight > 250


def test_consumers_of_one_register_see_the_same_slots_and_tokens():
    num_shared = 0
    for scenario in SCENARIOS:
        registers = {}
        for edge in scenario.table.edges:
            if edge.producer >= 0:
                seen = (edge.produce, edge.num_slots, edge.initial)
                assert registers.setdefault((edge.producer, edge.name), seen) == seen
        num_shared += len(registers) < len(scenario.table.edges) - len(scenario.table.sources)
    assert num_shared > 200


FEATURES = {
    "a rate of three": lambda s: any(e.consume == 3 for e in s.table.edges),
    "credits": lambda s: any(e.initial for e in s.table.edges),
    "two sources": lambda s: len(s.table.sources) == 2,
    "a shared stream": lambda s: len(set(s.table.streams)) < s.table.num_actors,
    "a flushed actor": lambda s: any(s.table.is_flushed),
    "a detached actor": lambda s: any(s.table.is_detached),
    "no step": lambda s: not any(c.order is EventOrder.ADMIT for c in s.commands),
    "three parts": lambda s: (
        sum(c.order is EventOrder.ADMIT and not c.source for c in s.commands) == 3
    ),
    "a limit": lambda s: any(c.order is EventOrder.END and c.count is not None for c in s.commands),
    "two ends": lambda s: sum(c.order is EventOrder.END and not c.source for c in s.commands) == 2,
    "a halt": lambda s: Command(EventOrder.HALT) in s.commands,
    "the end of data": lambda s: bool(s.ends),
    "a failure": lambda s: s.fails is not None,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_scenarios_with_and_without_it_occur(feature):
    counts = Counter(FEATURES[feature](scenario) for scenario in SCENARIOS)
    assert min(counts[True], counts[False]) >= 40


def test_equal_seeds_make_equal_scenarios():
    assert make_scenario(Random(5)) == make_scenario(Random(5))
    assert random_table(Random(5)) != random_table(Random(6))
