"""Whether there is one order of all meetings that each stream of each rank keeps.

Ranks of a group may agree while another group's collective comes before theirs on one rank, and
after it on another one. Where nobody happens to wait for ever, launches would still be in each
other's place: whoever compiled those plans did not have one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.errors import CompileError
from compiler.meetings import Meeting
from compiler.rank_plans import RankPlans

_Place = tuple[str, tuple[int, int]]
"""A group's name, and the place of a meeting."""

_Before = dict[_Place, dict[_Place, tuple[int, Meeting, Meeting]]]
"""By meetings what comes next on some stream: of which class of ranks, and the two."""


def check_one_order(ranks: RankPlans, in_turn: Sequence[Sequence[Meeting]]) -> None:
    """Check meetings of each class of ranks, in turn and stream by stream. O(meetings).

    Raises CompileError with what goes round in a circle.
    """
    before = _before(ranks, in_turn)
    waiting: dict[_Place, int] = {}
    for place, others in before.items():
        waiting.setdefault(place, 0)
        for other in others:
            waiting[other] = waiting.get(other, 0) + 1
    free = [place for place, count in waiting.items() if not count]
    for place in free:  # grows while it is walked
        for other in before.get(place, ()):
            waiting[other] -= 1
            if not waiting[other]:
                free.append(other)
    left = {place for place, count in waiting.items() if count}
    if left:
        rows = _circle(before, left)
        texts = [
            f"rank {ranks.class_of.index(number)} comes to {first.moves[0]} before {then.moves[0]}"
            for number, first, then in rows[:6]
        ]
        raise CompileError(
            f"the ranks have no order of their collectives in common: {', '.join(texts)}"
        )


def _before(ranks: RankPlans, in_turn: Sequence[Sequence[Meeting]]) -> _Before:
    found: _Before = {}
    for number in dict.fromkeys(ranks.class_of):
        plan, last = ranks.plans[number], dict[int, Meeting]()
        for meeting in in_turn[number]:
            stream = plan.actors[meeting.actor].stream
            if stream in last:
                first = last[stream]
                after = found.setdefault((first.group, first.place), {})
                after.setdefault((meeting.group, meeting.place), (number, first, meeting))
            last[stream] = meeting
    return found


def _circle(before: _Before, left: set[_Place]) -> list[tuple[int, Meeting, Meeting]]:
    """Return the pairs along a circle, by going back from one that waits to one that does."""
    back: dict[_Place, _Place] = {}
    for place in sorted(left):
        for other in before.get(place, ()):
            if other in left:
                back[other] = place
    place = min(left)
    seen: dict[_Place, int] = {}
    path: list[_Place] = []
    while place not in seen:
        seen[place] = len(path)
        path.append(place)
        place = back[place]
    circle = path[seen[place] :][::-1]
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    return [before[a][b] for a, b in zip(circle, [*circle[1:], circle[0]], strict=True)]
