"""Jobs as users call them, on ranks that are threads of this process and have a coordinator."""

import threading
from contextlib import contextmanager

import ranks_in_process

from actorflow.distributed import process_group
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from compiler.contract.errors import PeerFailed


@contextmanager
def launched(monkeypatch):
    """Have jobs find the rank of the thread that calls them, as under `actorflow launch`.

    A thread that it starts is of the same rank.
    """

    def group_of(thread):
        return getattr(thread, "group_of_rank", SINGLE_PROCESS)

    def group(environ, job, mesh):
        return group_of(threading.current_thread())

    start = threading.Thread.start

    def start_of_rank(thread):
        thread.group_of_rank = group_of(threading.current_thread())
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_of_rank)
        patch.setattr(process_group, "process_group_from_env", group)
        patch.setenv("RANK", "that of the thread")
        yield


def on_ranks(count, script, wait_s=60.0, gathers=None):
    """Return what script(rank) returned or raised, by rank; an error is told as by a launcher.

    Ranks learn of another's fault while they run on, so a script may end before it hears of one.
    The launcher knows, and it is the end of every rank that returned.

    `gathers` is a list for the names of what ranks gather.
    """
    with ranks_in_process.joined(count, wait_s=wait_s) as (job, members):

        def one(member):
            def gather(name, value):
                if gathers is not None:
                    gathers.append(name)
                return member.all_gather_object(name, value)

            group = ProcessGroup(member.rank, gather, member)
            threading.current_thread().group_of_rank = group
            try:
                return script(member.rank)
            except Exception as error:
                member.fail(error)
                return error

        ends = ranks_in_process.at_once(*[lambda m=member: one(m) for member in members])
        ranks_in_process.at_once(*[member.leave for member in members])
        if (failure := job.coordinator.failure) is None:
            return ends
        error = PeerFailed(failure.told, rank=failure.rank)
        return [end if isinstance(end, BaseException) else error for end in ends]
