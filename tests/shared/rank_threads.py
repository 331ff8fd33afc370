"""Ranks as threads of this process, and how they agree."""

import threading
from collections import Counter
from queue import SimpleQueue

from actorflow.distributed.agreement import CoordinatorState
from actorflow.distributed.messages import Aborted, OfRun, RankFailed, RunReady
from compiler.contract.errors import PeerFailed


class RankThreads:
    """Runs a function once per rank, each in a thread; `gather(rank)` is how that rank agrees."""

    def __init__(self, count, timeout_s=60):
        self.count = count
        self.barrier = threading.Barrier(count, timeout=timeout_s)
        self.said, self.turns = {}, Counter()
        self.errors = {}
        self._coordinator = None

    def gather(self, rank):
        def gathered(name, value):
            self.turns[rank, name] += 1
            values = self.said.setdefault((name, self.turns[rank, name]), {})
            values[rank] = value
            try:
                self.barrier.wait()
            except threading.BrokenBarrierError:
                if len(values) < self.count:  # else others have failed since they were let go
                    raise PeerFailed("a rank has failed, or is late") from None
            return [values[rank] for rank in range(self.count)]

        return gathered

    def members(self):
        """Return a member for each rank, by which runs agree as under a coordinator."""
        self._coordinator = CoordinatorOfThreads(self)
        return self._coordinator.members

    def run(self, do):
        """Return what `do(rank)` returns by rank; raise what the first one raised.

        `errors` has what each rank raised, by rank.
        """
        results = {}

        def one(rank):
            try:
                results[rank] = do(rank)
            except BaseException as error:
                self.errors[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._coordinator is not None:
            self._coordinator.close()
        for rank in sorted(self.errors, key=lambda rank: isinstance(self.errors[rank], PeerFailed)):
            raise self.errors[rank]
        return [results[rank] for rank in range(self.count)]


class CoordinatorOfThreads:
    """The real agreement, which a thread serves: what ranks say goes in, what it says comes out."""

    def __init__(self, ranks):
        self.state = CoordinatorState(ranks.count)
        self.members = [ThreadMember(rank, ranks, self) for rank in range(ranks.count)]
        self.said = SimpleQueue()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while (came := self.said.get()) is not None:
            for rank, message in self.state.on_message(*came):
                self.members[rank].hear(message)

    def close(self):
        self.said.put(None)
        self._thread.join()


class ThreadMember:
    """What a run asks of its rank, here of a thread."""

    def __init__(self, rank, ranks, coordinator):
        self.rank, self.num_ranks, self.epoch = rank, ranks.count, 1
        self.host, self.hosts, self.local_rank = "", (), rank
        self.failure = None
        self._ranks, self._coordinator, self._runs = ranks, coordinator, []

    def begin_run(self, run):
        self._ranks.gather(self.rank)("begin a run", None)
        run.number = len(self._runs) + 1
        self._runs.append(run)
        self.say(RunReady(run.number, run.first_step))

    def say(self, message):
        self._coordinator.said.put((self.rank, message))

    def fail(self, error, *, op="", line=""):
        self.say(RankFailed(self.rank, str(error), op, line, ""))
        return True

    def hear(self, message):
        if isinstance(message, Aborted):
            self.failure = self.failure or PeerFailed(message.text, rank=message.rank)
            for run in self._runs:
                run.abort(self.failure)
        elif isinstance(message, OfRun):
            for run in self._runs:
                run.hear(message)
