from fractions import Fraction
from math import gcd

import pytest
from error_texts import raises
from hypothesis import assume, given
from hypothesis import strategies as st

from memory.registers import (
    Deadlock,
    RateEdge,
    RatesError,
    StuckActor,
    play_period,
    repetition_vector,
)


def edge(producer, consumer, produce=1, consume=1, num_slots=1, initial=0):
    return RateEdge(producer, consumer, produce, consume, num_slots, initial)


@st.composite
def consistent_graphs(draw):
    """Edges whose rates follow from drawn firings, so that a repetition vector exists."""
    firings = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    edges = []
    for _ in range(draw(st.integers(0, 7))):
        a, b = (draw(st.integers(0, len(firings) - 1)) for _ in range(2))
        common = gcd(firings[a], firings[b])
        factor = draw(st.integers(1, 2))
        produce, consume = factor * firings[b] // common, factor * firings[a] // common
        num_slots = draw(st.integers(1, 10))
        initial = draw(st.integers(0, num_slots))
        edges.append(RateEdge(a, b, produce, consume, num_slots, initial))
    return len(firings), edges


def solve_balance(num_actors, edges):
    """A basis of the null space of the topology matrix, by elimination over fractions."""
    rows = []
    for e in edges:
        row = [Fraction(0)] * num_actors
        row[e.producer] += e.produce
        row[e.consumer] -= e.consume
        rows.append(row)
    pivots = {}
    for row in rows:
        for column, pivot in pivots.items():
            row = [x - row[column] * y for x, y in zip(row, pivot, strict=True)]
        first = next((i for i, x in enumerate(row) if x), None)
        if first is None:
            continue
        row = [x / row[first] for x in row]
        for column, pivot in pivots.items():
            pivots[column] = [x - pivot[first] * y for x, y in zip(pivot, row, strict=True)]
        pivots[first] = row
    free = [i for i in range(num_actors) if i not in pivots]
    return {
        f: [Fraction(int(i == f)) if i not in pivots else -pivots[i][f] for i in range(num_actors)]
        for f in free
    }


@given(consistent_graphs())
def test_the_repetition_vector_solves_the_balance_equations(graph):
    num_actors, edges = graph
    firings = repetition_vector(num_actors, edges)
    assert all(n >= 1 for n in firings)
    assert all(firings[e.producer] * e.produce == firings[e.consumer] * e.consume for e in edges)


@given(consistent_graphs())
def test_the_repetition_vector_is_the_smallest_of_each_component(graph):
    num_actors, edges = graph
    firings = repetition_vector(num_actors, edges)
    # One basis vector of the null space per component; its support is the component.
    for vector in solve_balance(num_actors, edges).values():
        component = [i for i in range(num_actors) if vector[i]]
        assert len({Fraction(firings[i]) / vector[i] for i in component}) == 1
        assert gcd(*(firings[i] for i in component)) == 1


rates = st.integers(1, 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), rates, rates), max_size=6))
def test_rates_are_refused_exactly_where_an_actor_would_never_fire(rows):
    edges = [edge(*row) for row in rows]
    has_solution = {i for v in solve_balance(4, edges).values() for i in range(4) if v[i]}
    if has_solution == set(range(4)):
        assert len(repetition_vector(4, edges)) == 4
    else:
        with pytest.raises(RatesError) as caught:
            repetition_vector(4, edges)
        assert caught.value.edge < len(edges)


def short_edges(deadlock):
    """The edges of the cycle on which slots are short."""
    return tuple(deadlock.waits[i].edge for i in deadlock.cycle if deadlock.waits[i].is_for_slots)


def test_gradient_accumulation_is_a_rate():
    # data -> micro-step -> update after four of them
    assert repetition_vector(3, [edge(0, 1), edge(1, 2, 1, 4)]) == (4, 4, 1)


def test_components_are_scaled_on_their_own():
    assert repetition_vector(5, [edge(0, 1, 2, 3), edge(2, 3, 1, 5)]) == (3, 2, 5, 1, 1)


def test_a_rates_error_names_the_edge_and_both_rates():
    with raises(RatesError) as caught:
        repetition_vector(2, [edge(0, 1, 1, 1), edge(0, 1, 3, 2)])
    assert caught.value.edge == 1


@pytest.mark.parametrize("bad", [edge(0, 2), edge(-1, 0), edge(0, 1, 0, 1)])
def test_an_edge_that_is_not_one_is_refused(bad):
    with raises(ValueError):
        repetition_vector(2, [bad])


def play_naively(num_actors, edges, repetitions):
    """Fire any actor that can, one firing at a time, until none can; return what is left."""
    tokens = [e.initial for e in edges]
    left = list(repetitions)

    def can_fire(actor):
        return (
            left[actor] > 0
            and all(tokens[i] >= e.consume for i, e in enumerate(edges) if e.consumer == actor)
            and all(
                e.num_slots - tokens[i] >= e.produce
                for i, e in enumerate(edges)
                if e.producer == actor
            )
        )

    while ready := [actor for actor in range(num_actors) if can_fire(actor)]:
        actor = ready[-1]
        left[actor] -= 1
        for i, e in enumerate(edges):
            tokens[i] += e.produce * (e.producer == actor) - e.consume * (e.consumer == actor)
    return left


@given(consistent_graphs())
def test_a_period_completes_exactly_where_single_firings_complete_it(graph):
    num_actors, edges = graph
    repetitions = repetition_vector(num_actors, edges)
    left = play_naively(num_actors, edges, repetitions)
    deadlock = play_period(num_actors, edges, repetitions)
    stuck = [actor for actor in range(num_actors) if left[actor]]
    assert [wait.actor for wait in deadlock.waits] == stuck if deadlock else stuck == []


@given(consistent_graphs())
def test_the_waits_along_a_deadlock_close_a_cycle(graph):
    num_actors, edges = graph
    deadlock = play_period(num_actors, edges, repetition_vector(num_actors, edges))
    assume(deadlock is not None)
    assert deadlock.cycle
    for k, i in enumerate(deadlock.cycle):
        wait = deadlock.waits[i]
        ahead = deadlock.waits[deadlock.cycle[(k + 1) % len(deadlock.cycle)]]
        e = edges[wait.edge]
        assert wait.available < wait.needed
        if wait.is_for_slots:
            assert (e.producer, e.consumer) == (wait.actor, ahead.actor)
        else:
            assert (e.consumer, e.producer) == (wait.actor, ahead.actor)


def test_a_pipeline_completes_with_one_slot_per_edge():
    edges = [edge(0, 1), edge(1, 2)]
    assert play_period(3, edges, (1, 1, 1)) is None


def test_an_accumulation_with_too_few_slots_names_the_edge_that_needs_more():
    deadlock = play_period(2, [edge(0, 1, 1, 4, num_slots=3)], (4, 1))
    assert deadlock == Deadlock(
        waits=(StuckActor(0, 0, True, 1, 0), StuckActor(1, 0, False, 4, 3)), cycle=(0, 1)
    )
    assert short_edges(deadlock) == (0,)
    assert deadlock.cycle_edges == (0, 0)


def test_a_loop_without_an_initial_token_waits_for_tokens_only():
    deadlock = play_period(3, [edge(0, 1), edge(1, 0), edge(1, 2)], (1, 1, 1))
    assert deadlock.cycle_edges == (1, 0)
    assert short_edges(deadlock) == ()
    assert [wait.actor for wait in deadlock.waits] == [0, 1, 2]
    assert play_period(3, [edge(0, 1), edge(1, 0, initial=1), edge(1, 2)], (1, 1, 1)) is None


def test_state_carried_to_oneself_needs_a_slot_to_read_and_one_to_write():
    deadlock = play_period(1, [edge(0, 0, num_slots=1, initial=1)], (1,))
    assert short_edges(deadlock) == (0,)
    assert play_period(1, [edge(0, 0, num_slots=2, initial=1)], (1,)) is None


def test_a_register_is_free_only_when_all_its_consumers_have_freed_it():
    # Both consumers read register 0 of one slot; the second also waits for the second token.
    edges = [edge(0, 1, 1, 1), edge(0, 2, 1, 2)]
    assert short_edges(play_period(3, edges, (2, 2, 1))) == (1,)
    edges = [edge(0, 1, 1, 1, num_slots=2), edge(0, 2, 1, 2, num_slots=2)]
    assert play_period(3, edges, (2, 2, 1)) is None


@pytest.mark.parametrize(
    ("edges", "repetitions"),
    [([edge(0, 1, num_slots=1, initial=2)], (1, 1)), ([edge(0, 1)], (2, 1)), ([], (1,))],
)
def test_a_game_that_cannot_be_played_is_refused(edges, repetitions):
    with raises(ValueError):
        play_period(2, edges, repetitions)


# -- rounds that are played at once ----------------------------------------------------------------


@st.composite
def nested_graphs(draw):
    """Loops of rare actors around a common one, with rates up to 12 and sometimes too few slots."""
    edges, slack = [edge(0, 1, 1, 1, num_slots=draw(st.integers(1, 3)))], st.integers(-1, 1)
    for rare in range(2, 2 + draw(st.integers(1, 3))):
        rate = draw(st.integers(2, 12))
        maker = draw(st.sampled_from([0, 1]))
        edges.append(edge(maker, rare, 1, rate, num_slots=max(1, rate + draw(slack))))
        if draw(st.booleans()):
            edges.append(edge(rare, 1, rate, 1, num_slots=rate + draw(slack)))
    return 1 + max([e.consumer for e in edges]), edges


@given(nested_graphs() | consistent_graphs())
def test_rounds_played_at_once_end_where_single_firings_do(graph):
    num_actors, edges = graph
    repetitions = repetition_vector(num_actors, edges)
    left = play_naively(num_actors, edges, repetitions)
    deadlock = play_period(num_actors, edges, repetitions, long_period=0)
    stuck = [actor for actor in range(num_actors) if left[actor]]
    assert [wait.actor for wait in deadlock.waits] == stuck if deadlock else stuck == []


def training(every, *, slots=None):
    """data -> gradient -> update, 64 to 1, a snapshot every 500, an evaluation after `every`."""
    return 5, [
        edge(0, 1, 1, 1, num_slots=16),
        edge(1, 2, 1, 64, num_slots=64),
        edge(2, 3, 1, 500, num_slots=500),
        edge(2, 4, 1, every, num_slots=every),
        edge(1, 4, 1, 64 * every, num_slots=slots or 64 * every),
    ]


def visits_of(graph):
    """How many visits a period takes, and what was visited and skipped in all, by actor."""
    num_actors, edges = graph
    repetitions = repetition_vector(num_actors, edges)
    seen, visits = [0] * num_actors, []

    def visit(actor, firing, times):
        assert firing == seen[actor]
        seen[actor] += times
        visits.append(actor)

    def skip(fired, times):
        assert times > 0
        seen[:] = [n + times * more for n, more in zip(seen, fired, strict=True)]

    deadlock = play_period(num_actors, edges, repetitions, visit, skip)
    assert (seen == list(repetitions)) == (deadlock is None)
    return len(visits)


def test_a_long_period_of_many_actors_of_one_rate_is_hardly_longer_to_play():
    """Those that fire most often, one after the other, with one slot between any two."""

    def chain(every):
        steps = [edge(a, a + 1) for a in range(9)]
        return 11, [*steps, edge(0, 9), edge(9, 10, 1, every, num_slots=every)]

    few, many = visits_of(chain(1_000)), visits_of(chain(10_000_000))
    assert few < 100
    assert many <= few


def test_a_rare_actor_makes_a_period_hardly_longer_to_play():
    few, many = visits_of(training(1_000)), visits_of(training(10_000_000))
    assert few < 200
    assert many < 2 * few


def test_one_slot_too_few_stops_a_period_of_any_length():
    num_actors, edges = training(100_000, slots=6_399_999)
    deadlock = play_period(num_actors, edges, repetition_vector(num_actors, edges))
    assert short_edges(deadlock) == (4,)
