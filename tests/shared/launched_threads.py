"""Jobs as users call them, on ranks that are threads of this process and have a coordinator."""

import threading
from contextlib import contextmanager

import ranks_in_process

from actorflow.distributed import process_group
from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup

_own = threading.local()


@contextmanager
def launched(monkeypatch):
    """Have jobs find the rank of the thread that calls them, as under `actorflow launch`."""

    def group(environ, job, mesh):
        return getattr(_own, "group", SINGLE_PROCESS)

    with monkeypatch.context() as patch:
        patch.setattr(process_group, "process_group_from_env", group)
        patch.setenv("RANK", "that of the thread")
        yield


def on_ranks(count, script, wait_s=60.0):
    """Return what script(rank) returned or raised, by rank; an error is told as by a launcher."""
    with ranks_in_process.joined(count, wait_s=wait_s) as (_, members):

        def one(member):
            _own.group = ProcessGroup(member.rank, member.all_gather_object, member)
            try:
                return script(member.rank)
            except Exception as error:
                member.fail(error)
                return error

        return ranks_in_process.at_once(*[lambda m=member: one(m) for member in members])
