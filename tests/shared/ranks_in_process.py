"""A job of several ranks whose members are all in this process, with its coordinator beside."""

import threading
from contextlib import contextmanager

import zmq

from actorflow.distributed.coordinator import Coordinator
from actorflow.distributed.member import RankClient


class Served:
    """A coordinator on a thread of its own; `refused` is what it turned away."""

    def __init__(self, num_ranks, wait_s=60.0, **options):
        self.refused, self._were_refused = [], threading.Semaphore(0)
        self._calls, self._is_over = [], False
        self._bell = zmq.Context.instance().socket(zmq.PAIR)
        name = f"inproc://served-{id(self)}"
        self._bell.bind(name)
        is_up = threading.Event()

        def serve():
            self.coordinator = Coordinator(num_ranks, wait_s, self._refuse, **options)
            ring = zmq.Context.instance().socket(zmq.PAIR)
            ring.connect(name)
            poller = zmq.Poller()
            for socket in (*self.coordinator.sockets, ring):
                poller.register(socket, zmq.POLLIN)
            is_up.set()
            while not self._is_over:
                if ring in dict(poller.poll()):
                    ring.recv()
                while self._calls:
                    self._calls.pop(0)()
                self.coordinator.serve()
            self.coordinator.close()
            ring.close(0)

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        assert is_up.wait(60)

    def _refuse(self, text):
        self.refused.append(text)
        self._were_refused.release()

    def wait_refused(self, count):
        """Wait until so many more were turned away."""
        for _ in range(count):
            assert self._were_refused.acquire(timeout=60), self.refused

    def lost(self, rank, text):
        self._calls.append(lambda: self.coordinator.lost(rank, text))
        self._bell.send(b"")

    def close(self):
        self._is_over = True
        self._bell.send(b"")
        self._thread.join()
        self._bell.close(0)


@contextmanager
def joined(num_ranks, wait_s=60.0):
    """Yield the coordinator and the members of a job."""
    job, members = Served(num_ranks, wait_s=wait_s), []
    try:
        for rank in range(num_ranks):
            members.append(RankClient(job.coordinator.keys(rank)))
        yield job, members
    finally:
        for member in members:
            member._link.close()
        job.close()


def at_once(*functions):
    """Run functions on threads of their own; return what each returned, or raised."""
    ends = [None] * len(functions)

    def call(number):
        try:
            ends[number] = functions[number]()
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends
