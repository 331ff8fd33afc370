"""Prove that the plans of all ranks fit together, before the first step, from the plans alone.

Each plan is proven by itself (`compiler.verify.verify`). Together they must say the same of every
meeting, and nobody may wait for ever. Three parts:

- *Turns.* Firings of one stream run in the order in which they were started. So at no time may two
  meetings of a stream be ready: then their order would follow from durations, and ranks that have
  chosen differently wait for each other (`memory.registers`).
- *Meetings.* The ranks of a group come to the same meetings in the same order, with the same op,
  reduction, elements and whole tensor; their parts add up to it; and all of them come. There is
  one order of all meetings that every stream keeps (`check_one_order`).
- *Token game.* Each meeting is ONE actor in the graph of all ranks, that fires when all of its
  ranks could. The rates of that graph balance, and one period completes with the slots there are
  (`memory.registers`). Actors never take away what makes others ready, so no order of events
  deadlocks if one completes. As each stream's order is forced by edges, streams add nothing.

Ranks of other jobs, options or meshes are the user's doing. Where these are the same, whoever
compiled the plans made them not fit: that is a bug of ours, and said to be one.

Ranks that are alike (`compiler.contract.rank_plans`) are one in the game: when one of them can fire
all can, for what they wait for is alike, so that the game of all ranks completes where the small
one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from compiler.contract.collective import RECEIVE, SEND, Collective
from compiler.contract.errors import CompileError, InternalError
from compiler.contract.plan import Plan
from compiler.contract.rank_plans import CollectiveGroup, RankPlans
from compiler.contract.types import RegisterId
from compiler.graph.target import in_words
from compiler.verify.verify import edges_of
from memory.registers import (
    Deadlock,
    RateEdge,
    RatesError,
    find_forced_order,
    play_period,
    repetition_vector,
)

# That the plans are of one job, for their mesh, is what the user has to see to.

_MEND = "do all ranks run the same script with the same options, and the same version?"

_OWN = ("streams", "num_streams")
"""Options that ranks choose by what their own kernels take; no order of collectives follows."""

THREADS = "threads-"
"""The prefix of the word in `Plan.target` that states the number of kernel threads."""

_WITHOUT = {
    "accumulate": (1, "accumulate="),
    "zero": (False, "zero=True"),
    "clip_norm": (0.0, "clip_norm="),
    "skips_broken_steps": (False, "on_nan='skip'"),
    "evaluate_every": (0, "evaluation="),
    "memory_budget": (0, "memory_budget="),
    "recompute": ("auto", "recompute="),
    "num_streams": (1, "streams="),
}
"""By option that collectives depend on: its value where it is not asked for, and how it is."""


def check_same_job(ranks: RankPlans) -> None:
    """Check that plans are of one job with the same options, and for this mesh.

    Raises CompileError that names a rank.
    """
    _check_options(ranks)
    _check_sizes(ranks)


def fallback_hint(plan: Plan) -> str:
    """Return the end of a sentence: the options that ask for collectives and may be left out."""
    options = dict(plan.options)
    words = [word for name, (none, word) in _WITHOUT.items() if options.get(name, none) != none]
    return (
        f"; until the bug is fixed, try the job without one of {', '.join(words)}" if words else ""
    )


def _check_options(ranks: RankPlans) -> None:
    """Check that plans are of one job and for this mesh, with options that are alike."""
    first = ranks.plans[0]
    for number, plan in enumerate(ranks.plans):
        # `plans` may hold one that no rank runs.
        if number not in ranks.class_of:
            continue
        rank = ranks.class_of.index(number)
        if plan.mesh.names and plan.mesh != ranks.mesh:
            raise CompileError(
                f"the plan of rank {rank} is for a mesh of {plan.mesh}, and the ranks are a mesh of"
                f" {ranks.mesh}; compile the job for this mesh"
            )
        if plan.hosts != first.hosts:
            raise CompileError(
                f"the plan of rank {rank} is for {plan.hosts or 'one host'}, that of rank 0 for"
                f" {first.hosts or 'one host'}; compile the job anew on all ranks"
            )
        if plan.name != first.name:
            raise CompileError(
                f"rank {rank} runs job {plan.name!r} where rank 0 runs job {first.name!r}; {_MEND}"
            )
        if plan.graph_hash != first.graph_hash:
            raise CompileError(
                f"rank {rank} runs another job {plan.name!r} than rank 0: what was traced there is"
                f" not the same; {_MEND}"
            )
        if _kernels(plan) != _kernels(first):
            raise CompileError(
                f"the plan of rank {rank} is for {plan.target!r}, that of rank 0 for"
                f" {first.target!r}: with other kernels what both have would part by and by; set"
                " ACTORFLOW_NATIVE alike, and give all ranks the same compiler and libraries"
            )
        theirs, ours = dict(plan.options), dict(first.options)
        # Sorted, so that every rank names the same option.
        for name in sorted({*theirs, *ours}.difference(_OWN)):
            if theirs.get(name) != ours.get(name):
                words, has = in_words(name, theirs.get(name))
                raise CompileError(
                    f"ranks run job {plan.name!r} differently: {words} is {has} on rank {rank} and"
                    f" {in_words(name, ours.get(name))[1]} on rank 0; {_MEND}"
                )


def _kernels(plan: Plan) -> list[str]:
    """Return what the bits of a plan's results depend on: not on how many threads there are."""
    return [word for word in plan.target.split() if not word.startswith(THREADS)]


def _check_sizes(ranks: RankPlans) -> None:
    """Check that collectives are over as many ranks as the mesh has along their axis."""
    for number in dict.fromkeys(ranks.class_of):
        rank = ranks.class_of.index(number)
        for meeting in [m for m in ranks.meetings[number] if m.peer is None]:
            move, count = meeting.moves[0], len(ranks.group(rank, meeting))
            if move.group_size != count:
                raise CompileError(
                    f"{move} is over {move.group_size} ranks along {meeting.group!r}, where rank"
                    f" {rank} is with {count - 1} others; compile the job for this mesh"
                )


# Ranks of a group may agree while another group's collective comes before theirs on one rank, and
# after it on another one. Where nobody happens to wait for ever, launches would still be in each
# other's place: whoever compiled those plans did not have one graph.

_Place = tuple[str, tuple[int, int]]
"""A group's name, and the place of a meeting."""

_Before = dict[_Place, dict[_Place, tuple[int, CollectiveGroup, CollectiveGroup]]]
"""By meetings what comes next on some stream: of which class of ranks, and the two."""


def check_one_order(ranks: RankPlans, in_turn: Sequence[Sequence[CollectiveGroup]]) -> None:
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
    stuck = {place for place, count in waiting.items() if count}
    if stuck:
        rows = _circle(before, stuck)
        texts = [
            f"rank {ranks.class_of.index(number)} runs {first.moves[0]} before {then.moves[0]}"
            for number, first, then in rows[:6]
        ]
        raise CompileError(
            f"the ranks have no order of their collectives in common: {', '.join(texts)}"
        )


def _before(ranks: RankPlans, in_turn: Sequence[Sequence[CollectiveGroup]]) -> _Before:
    before: _Before = {}
    for number in dict.fromkeys(ranks.class_of):
        plan, last = ranks.plans[number], dict[int, CollectiveGroup]()
        for meeting in in_turn[number]:
            stream = plan.actors[meeting.actor].stream
            if stream in last:
                first = last[stream]
                after = before.setdefault((first.group, first.place), {})
                after.setdefault((meeting.group, meeting.place), (number, first, meeting))
            last[stream] = meeting
    return before


def _circle(
    before: _Before, left: set[_Place]
) -> list[tuple[int, CollectiveGroup, CollectiveGroup]]:
    """Return the pairs along a circle, by going back from one that waits to one that does."""
    back: dict[_Place, _Place] = {}
    for place in sorted(left):
        for other in before.get(place, ()):
            if other in left:
                back[other] = place
    # Each one left waits for one that is left, so the way back closes a circle.
    place = min(left)
    seen: dict[_Place, int] = {}
    path: list[_Place] = []
    while place not in seen:
        seen[place] = len(path)
        path.append(place)
        place = back[place]
    # Found backwards, and begun at the least, so that the text is the same on every rank.
    circle = path[seen[place] :][::-1]
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    return [before[a][b] for a, b in zip(circle, [*circle[1:], circle[0]], strict=True)]


_NUM_NAMED = 6
"""The most waiting actors that an error message names."""


@dataclass(frozen=True, slots=True)
class JointReport:
    """What was proven: ranks, kinds of ranks that differ, and the actors and edges of the game."""

    num_ranks: int
    num_kinds: int
    num_actors: int
    num_edges: int


def verify_ranks(ranks: RankPlans) -> JointReport:
    """Prove that the collectives of all ranks match, and that no rank waits for ever.

    O(plans of all kinds + ranks x groups of a rank).

    Raises:
        CompileError: The plans are of several jobs, or for another mesh.
        InternalError: They do not fit, or one leaves open in which order its collectives come. The
            message names ranks, ops and the user's lines.
    """
    check_same_job(ranks)
    try:
        return verify_cross_rank(ranks)
    except CompileError as error:
        raise InternalError(
            f"{error}. All ranks have the same job and options, so the script is"
            f" correct{fallback_hint(ranks.plans[0])}"
        ) from error


def verify_cross_rank(ranks: RankPlans) -> JointReport:
    """Prove that plans fit together; the error does not say who is at fault.

    Raises CompileError, and InternalError as `verify_ranks` does.
    """
    in_turn = [_in_turn(plan, row) for plan, row in zip(ranks.plans, ranks.meetings, strict=True)]
    _check_groups(ranks, in_turn)
    _check_peers(ranks)
    game = _JointGame.of(ranks)
    game.play()
    check_one_order(ranks, in_turn)
    return JointReport(ranks.mesh.num_ranks, len(game.first_rank), len(game.names), len(game.edges))


def _in_turn(plan: Plan, meetings: Sequence[CollectiveGroup]) -> list[CollectiveGroup]:
    """Return meetings in the order in which a rank comes to them, stream by stream."""
    of_actor: dict[int, list[CollectiveGroup]] = {}
    for meeting in meetings:
        of_actor.setdefault(meeting.actor, []).append(meeting)
    streams: dict[int, list[int]] = {}
    for actor in of_actor:
        streams.setdefault(plan.actors[actor].stream, []).append(actor)
    edges, _ = edges_of(plan)
    repetitions = _balanced(plan, edges)
    ordered: list[CollectiveGroup] = []
    for stream, actors in sorted(streams.items()):
        turns = find_forced_order(len(plan.actors), edges, repetitions, actors)
        if turns.concurrent_pair is not None:
            first, second = [of_actor[actor][0].moves[0] for actor in turns.concurrent_pair]
            raise InternalError(
                f"plan {plan.name!r} does not say which comes first on stream"
                f" {plan.streams[stream].name!r}, {first} or {second}: ranks that begin them in"
                " different orders wait for each other; a control edge between their actors"
                f" {' and '.join([repr(plan.actors[a].name) for a in turns.concurrent_pair])} is"
                " missing"
            )
        # Those that never have a turn are stuck, and named where the game of all is.
        for actor in dict.fromkeys([*turns.first, *actors]):
            ordered += of_actor[actor]
    return ordered


def _balanced(plan: Plan, edges: Sequence[RateEdge]) -> tuple[int, ...]:
    try:
        return repetition_vector(len(plan.actors), edges)
    except RatesError as error:
        raise CompileError(f"plan {plan.name!r}: {error}") from None


def _check_groups(ranks: RankPlans, in_turn: Sequence[Sequence[CollectiveGroup]]) -> None:
    """Check that the ranks of every group come to the same meetings; alike groups once."""
    class_of = ranks.class_of
    checked: set[tuple[str, tuple[int, ...]]] = set()
    for rank, number in enumerate(class_of):
        for group, meeting in {m.group: m for m in in_turn[number] if m.peer is None}.items():
            members = ranks.group(rank, meeting)
            key = group, tuple([class_of[member] for member in members])
            if key not in checked:
                checked.add(key)
                _check_group(group, members, [in_turn[class_of[member]] for member in members])


def _check_group(
    group: str, members: Sequence[int], in_turn: Sequence[Sequence[CollectiveGroup]]
) -> None:
    rows = [[m for m in meetings if m.group == group and m.peer is None] for meetings in in_turn]
    for rank, row in zip(members[1:], rows[1:], strict=True):
        for number, (ours, theirs) in enumerate(zip_longest(rows[0], row)):
            _check_same(group, number, (members[0], ours), (rank, theirs))
    for together in zip(*rows, strict=True):
        for moves in zip(*[meeting.moves for meeting in together], strict=True):
            _check_parts(members, moves)


def _check_same(
    group: str,
    number: int,
    one: tuple[int, CollectiveGroup | None],
    other: tuple[int, CollectiveGroup | None],
) -> None:
    """Check that two ranks come to the same meeting as number so-and-so of their group."""
    (first, ours), (rank, theirs) = one, other
    at = f"collective {number + 1} of their group along {group!r}"
    if ours is None or theirs is None:
        comer, absent = ((first, ours), rank) if ours is not None else ((rank, theirs), first)
        move = comer[1].moves[0] if comer[1] is not None else ""
        raise CompileError(
            f"rank {comer[0]} runs {move} as {at}, and rank {absent} has no further one"
        )
    for mine, yours in zip_longest(ours.moves, theirs.moves):
        if mine is None or yours is None or (mine.op, mine.order) != (yours.op, yours.order):
            texts = [str(m) if m is not None else "nothing more" for m in (yours, mine)]
            raise CompileError(
                f"rank {rank} runs {texts[0]} where rank {first} runs {texts[1]}, as {at}"
            )
        if _words(mine) != _words(yours):
            raise CompileError(
                f"rank {rank} runs {yours} with {_words(yours)}, and rank {first} with"
                f" {_words(mine)}"
            )


def _words(move: Collective) -> str:
    """Return the properties of a collective that must be equal on all its ranks."""
    by = f" by {move.by}" if move.by else ""
    cuts = " and ".join([str(axis) for axis, _, _ in move.parts])
    axes = f" along axis {cuts}" if cuts else ""
    return f"{move.whole}{by}{axes} over {move.group_size} ranks"


def _check_parts(members: Sequence[int], moves: Sequence[Collective]) -> None:
    """Check that their parts add up to the whole."""
    first = moves[0]
    for (axis, whole, _), *peers in zip(first.parts, *[move.parts for move in moves], strict=True):
        rows = [part for _, _, part in peers]
        if sum(rows) != whole:
            parts = ", ".join(
                [f"{n} on rank {r}" for n, r in zip(rows, members, strict=True)][:_NUM_NAMED]
            )
            raise CompileError(
                f"the parts of {first} have {sum(rows)} of the {whole} rows of {first.whole} along"
                f" axis {axis}: {parts}"
            )


def _check_peers(ranks: RankPlans) -> None:
    """Check that what a rank sends its peer receives, and the other way round."""
    checked: set[tuple[int, int, int]] = set()
    for rank, number in enumerate(ranks.class_of):
        for index, meeting in enumerate(ranks.meetings[number]):
            if meeting.peer is None:
                continue
            group = ranks.group(rank, meeting)
            # Two ranks in order, of which one is this; where it is its own peer, a group of one.
            peer = group[0] if group[-1] == rank else group[-1]
            place = ranks.mesh.coordinates(rank)[ranks.mesh.axis(meeting.group)]
            key = number, index, ranks.class_of[peer]
            if key not in checked:
                checked.add(key)
                _check_peer(ranks, (rank, place), peer, meeting)


def _check_peer(
    ranks: RankPlans, own: tuple[int, int], peer: int, meeting: CollectiveGroup
) -> None:
    (rank, place), move = own, meeting.moves[0]
    if peer == rank:
        raise CompileError(f"rank {rank} would run {move} with itself")
    for theirs in ranks.meetings[ranks.class_of[peer]]:
        if (theirs.place, theirs.group, theirs.peer) != (meeting.place, meeting.group, place):
            continue
        ends = [tuple([(m.op, m.whole) for m in side.moves]) for side in (meeting, theirs)]
        turned = tuple([({SEND: RECEIVE, RECEIVE: SEND}[op], whole) for op, whole in ends[0]])
        if turned == ends[1]:
            return
        raise CompileError(
            f"rank {rank} runs {move} with {move.whole} where rank {peer} runs {theirs.moves[0]}"
            f" with {theirs.moves[0].whole}"
        )
    verb = "receives" if move.op == SEND else "sends"
    raise CompileError(f"rank {rank} runs {move} with rank {peer}, which {verb} nothing there")


_Key = tuple[str, frozenset[int], tuple[int, int]]
"""A group's name, the kinds of its ranks, and the place of the meeting."""


@dataclass(slots=True)
class _JointGame:
    """The graph of one rank of each kind, each meeting one actor.

    `owners` has for every edge the kind of rank whose it is, and its register, None between the
    meetings of one firing. `names` are those of actors, for people.
    """

    ranks: RankPlans
    first_rank: list[int]
    names: list[str] = field(default_factory=list)
    edges: list[RateEdge] = field(default_factory=list)
    owners: list[tuple[int, RegisterId | None]] = field(default_factory=list)

    @staticmethod
    def of(ranks: RankPlans) -> _JointGame:
        """Return the game of some ranks."""
        kinds = ranks.equivalence_classes()
        game = _JointGame(ranks, [kinds.index(kind) for kind in range(max(kinds, default=-1) + 1)])
        met: dict[_Key, int] = {}
        edges = [edges_of(plan) for plan in ranks.plans]
        for kind, rank in enumerate(game.first_rank):
            nodes = game._add_actors(rank, kinds, met)
            for members in nodes:
                game._join(kind, members)
            for edge, register in zip(*edges[ranks.class_of[rank]], strict=True):
                makers, readers = nodes[edge.producer], nodes[edge.consumer]
                # Who is several meetings has its tokens from the last one, and its slots from the
                # first one on; and the same the other way round.
                for ends in dict.fromkeys([(makers[-1], readers[0]), (makers[0], readers[-1])]):
                    game._add_edge(kind, register, ends, edge)
        return game

    def _add_actors(
        self, rank: int, kinds: Sequence[int], met: dict[_Key, int]
    ) -> list[tuple[int, ...]]:
        """Add those of a rank that are not there yet; return the ones that each actor is."""
        plan, nodes = self.ranks.plans[self.ranks.class_of[rank]], []
        meetings: dict[int, list[int]] = {}
        for meeting in self.ranks.meetings[self.ranks.class_of[rank]]:
            group = self.ranks.group(rank, meeting)
            key = meeting.group, frozenset([kinds[member] for member in group]), meeting.place
            if key not in met:
                met[key] = len(self.names)
                self.names.append(f"{meeting.moves[0]} of ranks {_some(group)}")
            meetings.setdefault(meeting.actor, []).append(met[key])
        for actor in plan.actors:
            if actor.id in meetings:
                nodes.append(tuple(meetings[actor.id]))
                continue
            nodes.append((len(self.names),))
            self.names.append(f"{actor.name!r} of rank {rank}")
        return nodes

    def _join(self, kind: int, nodes: Sequence[int]) -> None:
        """Let the meetings of one firing follow each other, and the next firing all of them."""
        if len(nodes) < 2:
            return
        # One token and one slot: the first meeting of a firing waits for the last of the one
        # before.
        once = RateEdge(0, 0, 1, 1, 1)
        for ends in dict.fromkeys([*pairwise(nodes), (nodes[0], nodes[-1])]):
            self._add_edge(kind, None, ends, once)

    def _add_edge(
        self, kind: int, register: RegisterId | None, ends: tuple[int, int], edge: RateEdge
    ) -> None:
        self.edges.append(RateEdge(*ends, edge.produce, edge.consume, edge.num_slots, edge.initial))
        self.owners.append((kind, register))

    def play(self) -> None:
        """Play a period. Raises CompileError where it cannot be completed."""
        try:
            repetitions = repetition_vector(len(self.names), self.edges)
        except RatesError as error:
            edge = self.edges[error.edge]
            raise CompileError(
                f"the ranks do not fire equally often: {self._where(error.edge)} between"
                f" {self.names[edge.producer]} and {self.names[edge.consumer]} has other rates than"
                f" the plans of the others"
            ) from None
        deadlock = play_period(len(self.names), self.edges, repetitions)
        if deadlock is not None:
            raise CompileError(
                f"the ranks deadlock: {'; '.join(self._waits(deadlock))}. The plans of some ranks"
                " have their collectives in another order, or a register lacks a slot"
            )

    def _waits(self, deadlock: Deadlock) -> Iterator[str]:
        """Yield, along the cycle, each waiting actor and what it waits for."""
        for index in deadlock.cycle[:_NUM_NAMED]:
            wait = deadlock.waits[index]
            edge = self.edges[wait.edge]
            other = self.names[edge.producer + edge.consumer - wait.actor]
            resource = "free slots" if wait.is_for_slots else "tokens"
            yield (
                f"{self.names[wait.actor]} waits for {wait.needed} {resource} of"
                f" {self._where(wait.edge)}, and so for {other}"
            )
        if len(deadlock.cycle) > _NUM_NAMED:
            yield f"and so on, by way of {len(deadlock.cycle) - _NUM_NAMED} more"

    def _where(self, edge: int) -> str:
        kind, register = self.owners[edge]
        rank = self.first_rank[kind]
        if register is None:
            return f"its own actor on rank {rank}"
        plan = self.ranks.plans[self.ranks.class_of[rank]]
        return f"register {plan.registers[register].name!r} on rank {rank}"


def _some(ranks: Sequence[int]) -> str:
    """Return numbers for people, the first few of many."""
    named = ", ".join(map(str, ranks[:_NUM_NAMED]))
    return named if len(ranks) <= _NUM_NAMED else f"{named}, ... ({len(ranks)} in all)"
