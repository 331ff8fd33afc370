"""Every state that ranks with their plans can reach: whether some order of events is the end.

Independent of the proofs: the ranks as they run, each with its tokens, actors, and streams that
execute one firing at a time in the order in which they were started. A meeting is over when all of
its ranks have it at the head of their streams.
"""

from compiler.contract.rank_plans import collective_groups


class TooMany(Exception):
    """There are more states than are looked at."""


class RankSearch:
    def __init__(self, mesh, plans, class_of, periods=2, limit=20_000):
        self.mesh, self.class_of, self.limit = mesh, class_of, limit
        self.plans = [plans[number] for number in class_of]
        self.periods = periods
        self.edges = [self._edges(plan) for plan in self.plans]
        self.meets = []
        for plan in self.plans:
            of_actor = {}
            for meeting in collective_groups(plan):
                of_actor.setdefault(meeting.actor, []).append(meeting)
            self.meets.append(of_actor)

    @staticmethod
    def _edges(plan):
        makers = {p.register: (a.id, p.rate) for a in plan.actors for p in a.outputs}
        return [
            (*makers[p.register], a.id, p.rate, plan.registers[p.register].num_slots)
            for a in plan.actors
            for p in a.inputs
        ]

    def is_stuck(self, firings):
        """Whether a state can be reached in which nothing can happen and firings are left.

        Or in which two ranks come to different meetings of one group. `firings` are those of every
        rank's actors in a period. A state is, by rank, the full and the taken slots of edges,
        firings left, and the streams' queues of actors with the number of their next meeting.
        """
        first = tuple(
            (
                (0,) * len(edges),
                (0,) * len(edges),
                tuple(self.periods * n for n in counts),
                tuple(() for _ in plan.streams),
            )
            for plan, edges, counts in zip(self.plans, self.edges, firings, strict=True)
        )
        seen, todo = {first}, [first]
        while todo:
            state = todo.pop()
            after = list(self._after(state))
            if None in after:
                return True
            if not after and any(sum(unfired) or any(queues) for _, _, unfired, queues in state):
                return True
            for new in after:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            if len(seen) > self.limit:
                raise TooMany
        return False

    def _after(self, state):
        for rank, own in enumerate(state):
            for actor in self._ready(rank, own):
                yield self._with(state, {rank: self._started(rank, own, actor)})
            for queue in own[3]:
                if not queue:
                    continue
                actor, turn = queue[0]
                meetings = self.meets[rank].get(actor, ())
                if not meetings:
                    yield self._with(state, {rank: self._ended(rank, own, actor)})
                else:
                    yield from self._met(state, rank, meetings[turn])

    def _met(self, state, rank, meeting):
        group = meeting.ranks_at(self.mesh, rank)
        if rank != group[0]:
            return
        news = {}
        for member in group:
            heads = [queue[0] for queue in state[member][3] if queue]
            heads = [(a, t, self.meets[member].get(a, ())) for a, t in heads]
            heads = [(a, t, meetings) for a, t, meetings in heads if meetings]
            same = [h for h in heads if self._is_of(meeting, h[2][h[1]], group, member)]
            if not same:
                return
            actor, turn, meetings = same[0]
            if meetings[turn].place != meeting.place:
                yield None
                return
            news[member] = self._ended(member, state[member], actor, turn + 1, len(meetings))
        yield self._with(state, news)

    def _is_of(self, meeting, other, group, member):
        return other.group == meeting.group and other.ranks_at(self.mesh, member) == group

    def _ready(self, rank, own):
        full, taken, unfired, queues = own
        queued = {actor for queue in queues for actor, _ in queue}
        for actor, count in enumerate(unfired):
            if not count or actor in queued:
                continue
            if all(
                (reader != actor or full[i] >= consume)
                and (maker != actor or slots - taken[i] >= produce)
                for i, (maker, produce, reader, consume, slots) in enumerate(self.edges[rank])
            ):
                yield actor

    def _started(self, rank, own, actor):
        """Tokens are taken out of what is full, slots are taken; both end with the firing."""
        full, taken, unfired, queues = own
        full, taken = list(full), list(taken)
        for i, (maker, produce, reader, consume, _) in enumerate(self.edges[rank]):
            full[i] -= consume * (reader == actor)
            taken[i] += produce * (maker == actor)
        stream = self.plans[rank].actors[actor].stream
        queues = tuple(
            (*queue, (actor, 0)) if i == stream else queue for i, queue in enumerate(queues)
        )
        unfired = tuple(n - (a == actor) for a, n in enumerate(unfired))
        return tuple(full), tuple(taken), unfired, queues

    def _ended(self, rank, own, actor, turn=1, turns=1):
        full, taken, unfired, queues = own
        stream = self.plans[rank].actors[actor].stream
        queue = queues[stream][1:] if turn == turns else ((actor, turn), *queues[stream][1:])
        queues = tuple(queue if i == stream else other for i, other in enumerate(queues))
        if turn < turns:
            return full, taken, unfired, queues
        full, taken = list(full), list(taken)
        for i, (maker, produce, reader, consume, _) in enumerate(self.edges[rank]):
            full[i] += produce * (maker == actor)
            taken[i] -= consume * (reader == actor)
        return tuple(full), tuple(taken), unfired, queues

    @staticmethod
    def _with(state, news):
        return tuple(news.get(rank, old) for rank, old in enumerate(state))
