"""Whether edges alone hold some actors of a dataflow graph to one order, and which.

Actors that share what only one of them can have at a time (a stream, whose firings run in the order
in which they were started) run in an order that the edges leave open, unless at no time two of them
are ready. That is seen in one game: everyone else plays as far as they can, and only then the one
of them that is ready fires, once. A firing never takes away what makes another actor ready, so what
is not ready then is not ready in any order of events before that firing has ended.

Two periods are played: in the first no edge has come round yet, so that whatever may be out of turn
later is there, too (as in `actors.race`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memory.registers import Game, GameRounds, RateEdge

_PERIODS = 2


@dataclass(frozen=True, slots=True)
class Turns:
    """The order of actors: `first` has each of them where it fires for the first time.

    `rivals` are two that may be ready at the same time, of which nothing says who is first; None
    where there are none.
    """

    first: tuple[int, ...]
    rivals: tuple[int, int] | None


def find_turns(
    num_actors: int, edges: Sequence[RateEdge], repetitions: Sequence[int], actors: Sequence[int]
) -> Turns:
    """Return the order in which some actors fire, up to two that are ready at once.

    Args:
        num_actors: Actors are numbered from 0.
        edges: The edges between them; a period completes (`memory.registers.play_period`).
        repetitions: Firings of each actor in a period.
        actors: Those that are asked about.

    Raises:
        ValueError: As `memory.registers.play_period`.
    """
    repetitions = [_PERIODS * count for count in repetitions]
    game = Game(num_actors, edges, repetitions)
    # A round is left out only between two turns: there it is known who is ready.
    rounds = GameRounds(game, edges, repetitions, actors)
    is_held = [False] * num_actors
    for actor in actors:
        is_held[actor] = True
    first: dict[int, None] = {}
    queue = deque([a for a in range(num_actors) if not is_held[a]])
    asked = set(actors)
    while True:
        while queue:
            actor = queue.popleft()
            if game.fire(actor):
                _ask_next(game.neighbours[actor], game, is_held, queue, asked)
        # Who is not ready has to be asked again only when a neighbour has fired.
        asked = {a for a in asked if game.ready(a) > 0}
        if len(asked) != 1:
            rivals = sorted(asked, key=actors.index)[:2]
            return Turns(tuple(first), (rivals[0], rivals[1]) if rivals else None)
        (actor,) = asked
        first.setdefault(actor)
        game.fire(actor, 1)
        is_repeated = rounds.repeat(actor, None)
        others = range(num_actors) if is_repeated else game.neighbours[actor]
        _ask_next(others, game, is_held, queue, asked)


def _ask_next(
    others: Iterable[int],
    game: Game,
    is_held: Sequence[bool],
    queue: deque[int],
    asked: set[int],
) -> None:
    """Note who may be ready now, those that are held back apart."""
    for other in others:
        if is_held[other]:
            asked.add(other)
        elif game.left[other]:
            queue.append(other)
