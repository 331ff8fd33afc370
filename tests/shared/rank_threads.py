"""Ranks as threads of this process, and how they agree."""

import threading
from collections import Counter

from compiler.contract.errors import PeerFailed


class RankThreads:
    """Runs a function once per rank, each in a thread; `gather(rank)` is how that rank agrees."""

    def __init__(self, count, timeout_s=60):
        self.count = count
        self.barrier = threading.Barrier(count, timeout=timeout_s)
        self.said, self.turns = {}, Counter()
        self.errors = {}

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
        for rank in sorted(self.errors, key=lambda rank: isinstance(self.errors[rank], PeerFailed)):
            raise self.errors[rank]
        return [results[rank] for rank in range(self.count)]
