"""Turns of actors, against all states that a run of a few periods can reach."""

from math import gcd

from hypothesis import assume, given
from hypothesis import strategies as st

from memory.registers import RateEdge, RatesError, find_forced_order, play_period, repetition_vector


def edge(producer, consumer, produce=1, consume=1, num_slots=1, initial=0):
    return RateEdge(producer, consumer, produce, consume, num_slots, initial)


def rivals_by_search(num_actors, edges, repetitions, actors, periods):
    """Return all pairs of the actors that are ready together in some state, by visiting all."""

    def is_ready(state, actor):
        tokens, left = state
        return (
            left[actor] > 0
            and all(
                t >= e.consume for t, e in zip(tokens, edges, strict=True) if e.consumer == actor
            )
            and all(
                e.num_slots - t >= e.produce
                for t, e in zip(tokens, edges, strict=True)
                if e.producer == actor
            )
        )

    def after(state, actor):
        tokens, left = map(list, state)
        left[actor] -= 1
        for i, e in enumerate(edges):
            tokens[i] += e.produce * (e.producer == actor) - e.consume * (e.consumer == actor)
        return tuple(tokens), tuple(left)

    first = tuple(e.initial for e in edges), tuple(periods * n for n in repetitions)
    seen, todo, found = {first}, [first], set()
    while todo:
        state = todo.pop()
        ready = [a for a in range(num_actors) if is_ready(state, a)]
        own = [a for a in ready if a in actors]
        found |= {(a, b) for a in own for b in own if a < b}
        for actor in ready:
            new = after(state, actor)
            if new not in seen:
                seen.add(new)
                todo.append(new)
        assume(len(seen) < 4000)
    return found


@st.composite
def live_graphs(draw):
    num_actors = draw(st.integers(2, 5))
    firings = draw(
        st.lists(st.sampled_from([1, 1, 1, 2]), min_size=num_actors, max_size=num_actors)
    )
    edges = []
    for _ in range(draw(st.integers(1, 7))):
        a, b = draw(st.integers(0, num_actors - 1)), draw(st.integers(0, num_actors - 1))
        if a == b:
            continue
        common = gcd(firings[a], firings[b])
        produce, consume = firings[b] // common, firings[a] // common
        slots = draw(st.integers(produce + consume - 1, produce + consume))
        initial = draw(st.integers(0, slots)) if a > b else 0
        edges.append(edge(a, b, produce, consume, slots, initial))
    return num_actors, edges


@given(live_graphs(), st.integers(2, 3))
def test_two_are_rivals_where_some_order_of_events_makes_both_ready(graph, num_held):
    num_actors, edges = graph
    try:
        repetitions = repetition_vector(num_actors, edges)
    except RatesError:
        assume(False)
    assume(play_period(num_actors, edges, repetitions) is None)
    actors = list(range(min(num_held, num_actors)))
    wanted = rivals_by_search(num_actors, edges, repetitions, actors, periods=3)
    turns = find_forced_order(num_actors, edges, repetitions, actors)
    assert (turns.concurrent_pair is not None) == bool(wanted)
    if turns.concurrent_pair is None:
        assert sorted(turns.first) == actors
    else:
        assert tuple(sorted(turns.concurrent_pair)) in wanted


@given(live_graphs())
def test_rounds_played_at_once_find_what_single_firings_do(graph):
    num_actors, edges = graph
    edges = [*edges, edge(0, num_actors, 1, 7, num_slots=15)]
    try:
        repetitions = repetition_vector(num_actors + 1, edges)
    except RatesError:
        assume(False)
    assume(play_period(num_actors + 1, edges, repetitions) is None)
    actors = [0, num_actors]
    found = find_forced_order(num_actors + 1, edges, repetitions, actors)
    assert find_forced_order(num_actors + 1, edges, repetitions, actors, long_period=0) == found


def test_a_chain_with_a_way_back_holds_its_actors_in_turn():
    chain = [edge(0, 1), edge(1, 2), edge(2, 3)]
    again = edge(0, 3, num_slots=1)
    assert find_forced_order(4, chain, (1,) * 4, [1, 3]).concurrent_pair == (1, 3)
    assert find_forced_order(4, [*chain, again], (1,) * 4, [3, 1]).first == (1, 3)


def test_what_comes_after_a_hundred_thousand_steps_is_found_as_well():
    every = 100_000
    edges = [edge(0, 1), edge(1, 2, 1, every, num_slots=every), edge(0, 2, 1, every, every)]
    repetitions = repetition_vector(3, edges)
    assert find_forced_order(3, edges, repetitions, [1, 2]).first == (1, 2)
    slack = [edge(0, 1), edge(1, 2, 1, every, num_slots=every + 1), edge(0, 2, 1, every, 2 * every)]
    assert find_forced_order(3, slack, repetitions, [1, 2]).concurrent_pair == (1, 2)
