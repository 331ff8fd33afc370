"""What a race check does for plans of many actors, counted in comparisons and not in seconds."""

from dataclasses import replace

import pytest

from actors.race.race import RaceError, check_races
from compiler.contract.plan_tables import ActorKind, RegisterKind
from compiler.contract.types import StreamId
from compiler.verify.verify import check_shared_bytes


def towers(make, height, *, is_cut=False):
    """Two streams of `height` actors, in order by credits; all write the same scratch bytes.

    Right comes after left, and the next step after this one. `is_cut` leaves out the credit that
    makes right come after left.
    """
    scratch = make.view(make.register("scratch", RegisterKind.TEMPORARY))
    count = 2 * height
    inputs, outputs = [[] for _ in range(count)], [[] for _ in range(count)]
    pairs = [(a, a + 1) for a in range(count - 1) if not (is_cut and a == height - 1)]
    for a, b in [*pairs, (0, count - 1)]:
        credit = make.register(f"c{a}.{b}", RegisterKind.CONTROL, 1, size=0)
        outputs[a].append((credit, 1))
        inputs[b].append((credit, 1))
    batch = make.edge("batch", 2)
    make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
    inputs[0].append((batch, 1))
    if is_cut:
        inputs[height].append((batch, 1))
    for a in range(count):
        launches = [make.launch(f"k{a}", [], [scratch])]
        make.actor(f"a{a}", ActorKind.COMPUTE, inputs[a], outputs[a], launches)
    plan = make.plan()
    streams = [0] + [1] * height + [2] * height
    actors = [replace(a, stream=StreamId(s)) for a, s in zip(plan.actors, streams, strict=True)]
    return replace(plan, actors=tuple(actors))


def test_comparisons_grow_as_actors_do(plan_maker):
    few, many = (check_races(towers(plan_maker(), height)) for height in (12, 485))
    assert (few.num_lines, many.num_lines) == (3, 3)
    for report in (few, many):
        assert report.is_exhaustive
        assert report.num_pairs == report.num_firings - report.periods


def test_a_race_among_many_is_still_found_with_all_who_take_part(plan_maker):
    with pytest.raises(RaceError) as caught:
        check_races(towers(plan_maker(), 6, is_cut=True))
    pairs = {frozenset((race.first.actor, race.second.actor)) for race in caught.value.races}
    assert frozenset(("a5", "a6")) in pairs
    assert len(pairs) > 6


def test_bytes_that_many_actors_share_are_compared_between_neighbours_only(plan_maker, monkeypatch):
    compared = []
    from compiler.verify import verify

    ordered = verify._neighbours

    def counted(*arguments):
        for pair in ordered(*arguments):
            compared.append(pair)
            yield pair

    monkeypatch.setattr(verify, "_neighbours", counted)
    make = plan_maker()
    plan = towers(make, 40)
    scratch = plan.registers[0]
    # A register of its own for every actor, all on the same bytes.
    own = [replace(scratch, id=len(plan.registers) + i, name=f"s{i}") for i in range(80)]
    views = [replace(plan.views[0], register=register.id) for register in own]
    actors = [
        replace(a, launches=(replace(a.launches[0], outputs=(len(plan.views) + i,)),))
        for i, a in enumerate(plan.actors[1:])
    ]
    plan = replace(
        plan,
        registers=(*plan.registers, *own),
        views=(*plan.views, *views),
        actors=(plan.actors[0], *actors),
    )
    check_shared_bytes(plan)
    assert 79 <= len(compared) <= 2 * 79
