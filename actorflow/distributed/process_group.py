"""One process among the ranks that run a job together.

`ProcessGroup` is this process, alone or one of several. Before a run all ranks compare plan, data,
steps and first values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from actorflow.data import DataSource
from actorflow.data.source import content_hash
from actorflow.environment.native import toolchain_of
from actorflow.environment.settings import MOST_SECONDS, Settings
from actorflow.tensor.tracer import find_source
from actors.machine.protocol import AllGatherObject, Communicator, OpenDevice
from compiler.contract.attrs import PlainValue
from compiler.contract.errors import CompileError, DeviceError, InternalError, PlanFormatError
from compiler.contract.placement import HOST, STAGE, DeviceKind, Mesh
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import ActorKind
from compiler.contract.rank_plans import RankPlans
from compiler.verify.cross_rank import verify_ranks

if TYPE_CHECKING:
    from actorflow.distributed.member import RankClient


_HASH = re.compile("[0-9a-f]{12,}")
_MOST_CHARACTERS = 40


def source_difference(own: str, first: str) -> str:
    """Describe the first difference between two fingerprints of a source; "" if they are equal."""
    # A fingerprint is words apart by ":", "," or ";", each of them "name=value" or a bare value. Of
    # a pipeline it is stages apart by "|", with bare words in brackets: told as a whole.
    stages = [re.split("[:;|]", text) for text in (own, first)]
    for pair in zip_longest(*stages, fillvalue=""):
        words = [re.split("[,()]", stage) for stage in pair]
        for mine, its in zip_longest(*words, fillvalue=""):
            if mine == its:
                continue
            texts = [word.rpartition("=") for word in (mine, its)]
            # Two hashes tell a reader nothing but that they differ.
            if all([_HASH.fullmatch(text[2]) for text in texts]):
                name = texts[0][0] if texts[0][0] == texts[1][0] else ""
                return f"the content of {name!r} is another" if name else "its content is another"
            if mine.isdecimal() and its.isdecimal() and "(" not in pair[0]:
                return f"its length is {mine} and not {its}"
            mine, its = pair if "(" in "".join(pair) else (mine, its)
            return f"{_cut(mine) or 'nothing more'} and not {_cut(its) or 'nothing more'}"
    return ""


def position_difference(own: Any, first: Any) -> str:
    """Describe the first difference between two positions of a source."""
    if isinstance(own, Mapping) and isinstance(first, Mapping):
        # In the order of the first rank, and each name once: a set would make the message differ by
        # run.
        for name in dict.fromkeys([*first, *own]):
            if own.get(name) != first.get(name):
                values = [_cut(f"{name}={at.get(name)!r}") for at in (own, first)]
                return f"it stands at {values[0]} and not at {values[1]}"
    return f"it stands at {_cut(repr(own))} and not at {_cut(repr(first))}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


class ProcessGroup:
    """This process among the ranks that run a job together, all of which run the same script.

    Args:
        rank: its number in the mesh.
        gather: the all-gather of objects over all ranks.
        member: starts and ends runs on all ranks together; None for runs of this process alone.
    """

    def __init__(
        self, rank: int, gather: AllGatherObject, member: RankClient | None = None
    ) -> None:
        self.rank = rank
        self.is_first = rank == 0
        """Whether this is the rank that writes checkpoints."""
        self.member = member
        self.host = "" if member is None else member.host
        """The name of its host, "" where all ranks run on one."""
        self.local_rank = rank if member is None else member.local_rank
        """Its number among the ranks of its host, which have GPUs of their own each."""
        self._gather = gather

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self is SINGLE_PROCESS

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """How many ranks each host has, in their order; () where all are on one."""
        return sizes_of_hosts(self.member.hosts if self.member else ())

    def all_gather_object(self, name: str, value: PlainValue) -> list[PlainValue]:
        """Return the values of all ranks, by rank; as `AllGatherObject`."""
        return self._gather(name, value)

    def communicator(
        self,
        plan: Plan,
        settings: Settings,
        devices: Sequence[OpenDevice],
        beside: Callable[[], Communicator] | None = None,
    ) -> Communicator | None:
        """Return a new end of the transport to the other ranks, where a plan meets them.

        `devices` are open. `beside` makes it for a plan that takes turns with others. Raises
        DeviceError where there can be none.
        """
        meeting = {
            plan.streams[actor.stream].device: plan.sources[actor.launches[0].source]
            for actor in plan.actors
            if actor.kind is ActorKind.COMM
        }
        if not meeting:
            return None
        places = ", ".join(map(str, meeting))
        device, line = next(iter(meeting.items()))
        if len(meeting) > 1 or device.kind is DeviceKind.SIM:
            raise DeviceError(
                f"{line}: plan {plan.name!r} has collectives on {places}, and ranks communicate"
                " through host memory, or between one GPU each: leave out device=, devices= and"
                ' ACTORFLOW_DEVICE, or mesh=, or give device="cuda"'
            )
        if beside is not None:
            return beside()
        # 0 stands for ever in the settings; the transport takes a deadline in any case.
        wait_s = settings.rank_seconds or MOST_SECONDS
        # Imported late: a plan without collectives needs no compiler on the machine.
        if device == HOST:
            from actors.collectives.shared_memory import SharedMemory  # which builds C

            toolchain = toolchain_of(settings)
            rank, mesh, gather = self.rank, plan.mesh, self.all_gather_object
            if not self.host:
                return SharedMemory(rank, mesh, gather, toolchain, deadline_s=wait_s)
            from actors.collectives.hierarchical import HierarchicalCommunicator
            from actors.collectives.mpi import connect  # and mpi4py, where a group crosses hosts

            return HierarchicalCommunicator(
                rank, mesh, gather, toolchain, host=self.host, connect=connect, deadline_s=wait_s
            )
        if STAGE in plan.mesh.names and (settings.sync or settings.trace is not None):
            raise DeviceError(
                f"{line}: plan {plan.name!r} has stages on GPUs. ACTORFLOW_SYNC and ACTORFLOW_TRACE"
                " wait after each launch, so two stages would wait for data from each other: unset"
                " them"
            )
        from actors.collectives.nccl import NcclCommunicator

        gpu: Any = next(opened for opened in devices if opened.device == device)
        return NcclCommunicator(
            self.rank, plan.mesh, self.all_gather_object, gpu, host=self.host, deadline_s=wait_s
        )


def sizes_of_hosts(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return how many ranks each host has, by the names of the ranks' hosts.

    Raises CompileError where a host has not ranks that follow each other.
    """
    runs = [(name, len(list(ranks))) for name, ranks in groupby(hosts)]
    names = [name for name, _ in runs]
    for name in names:
        if names.count(name) > 1:
            ranks = [rank for rank, host in enumerate(hosts) if host == name]
            raise CompileError(
                f"host {name!r} has ranks {', '.join(map(str, ranks))}, and others in between are"
                " on other hosts; number the ranks host by host"
            )
    return tuple([size for _, size in runs])


SINGLE_PROCESS = ProcessGroup(0, lambda name, value: [value])
"""The only rank of a job."""


def process_group_from_env(environ: Mapping[str, str], job: str, mesh: Mesh) -> ProcessGroup:
    """Return this process among the ranks of a job, which `actorflow launch` has started, or alone.

    Raises CompileError where there are more or less of them than the job's mesh has.
    """
    member = None
    if "RANK" in environ:
        # Imported late: a process that `actorflow launch` did not start needs no zmq.
        from actorflow.distributed.member import current_rank  # and zmq

        member = current_rank(environ)
    launched = 1 if member is None else member.num_ranks
    if launched != mesh.num_ranks:
        mend = (
            f"launch {mesh.num_ranks}, or give the job a mesh of {launched}; an axis of -1, such as"
            " af.Mesh(data=-1), has as many ranks as are launched"
        )
        if launched == 1:
            mend = f"start it by 'actorflow launch -n {mesh.num_ranks} SCRIPT', or leave out mesh="
        elif not mesh.names:
            mend = f"give it one, such as mesh=af.Mesh(data={launched}), or run it without launch"
        raise CompileError(
            f"{find_source()}: job {job!r} is for {_ranks(mesh.num_ranks)}"
            f" ({mesh if mesh.names else 'it has no mesh'}), and {launched} run it; {mend}"
        )
    return (
        SINGLE_PROCESS
        if member is None
        else ProcessGroup(member.rank, member.all_gather_object, member)
    )


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def check_same_plan(group: ProcessGroup, plan: Plan, seed: int) -> None:
    """Check that all ranks of a plan's mesh are here, with the same job and the same first values.

    What plans do together is proven on the first rank, once for all (`compiler.verify.cross_rank`).

    Raises on every rank CompileError, and InternalError where plans of one job do not fit together.
    """
    if group is SINGLE_PROCESS:
        return
    raw = group.all_gather_object(f"begin job {plan.name!r}", (plan.name, plan.graph_hash, seed))
    mesh = plan.mesh
    # `process_group_from_env` checks the job's mesh; a plan from a file comes with a mesh of its
    # own.
    if len(raw) != mesh.num_ranks:
        raise CompileError(
            f"plan {plan.name!r} is for {_ranks(mesh.num_ranks)} (mesh {mesh}), and {len(raw)} run"
            f" it; launch {mesh.num_ranks}, or give the job a mesh of {len(raw)}"
        )
    rows = _rows(raw)
    for rank, row in enumerate(rows):
        if row[:2] != rows[0][:2]:
            job = "job" if row[0] != rows[0][0] else "another job"
            raise CompileError(
                f"{find_source()}: rank {rank} runs {job} {row[0]!r} where rank 0 runs"
                f" {rows[0][0]!r}: what was traced is not the same; run the same script on all"
                " ranks"
            )
    _check_equal("seed", [row[2] for row in rows], "give all ranks the same seed")
    _prove_together(group, plan)


def _prove_together(group: ProcessGroup, plan: Plan) -> None:
    """Prove on the first rank that the plans of all ranks match; raise the result on all."""
    # Two gathers: fingerprints are short, and one plan of megabytes a class travels, not one a
    # rank.
    prints = group.all_gather_object(f"compare plans of job {plan.name!r}", plan.fingerprint)
    classes = list(dict.fromkeys(prints))
    # Of a class of ranks one says what they all have.
    is_asked = len(classes) > 1 and prints.index(plan.fingerprint) == group.rank
    plan_bytes = group.all_gather_object(
        f"prove the plans of job {plan.name!r}", plan.to_bytes() if is_asked else b""
    )
    reason, is_bug = "", False
    if group.is_first:
        rows = [plan_bytes[prints.index(fingerprint)] for fingerprint in classes]
        class_of = tuple([classes.index(fingerprint) for fingerprint in prints])
        try:
            # Empty bytes: a single class, or the first rank's own class when all ranks share its
            # plan.
            plans = [Plan.from_bytes(r) if isinstance(r, bytes) and r else plan for r in rows]
            verify_ranks(RankPlans(plan.mesh, tuple(plans), class_of))
        except InternalError as error:
            reason, is_bug = error.reason, True
        except (CompileError, PlanFormatError) as error:
            reason = str(error)
    text, *is_bug_there = _rows(
        group.all_gather_object(f"hear of the proof of job {plan.name!r}", (reason, is_bug))
    )[0]
    if text:
        kind = InternalError if is_bug_there == [True] else CompileError
        raise kind(f"{find_source()}: {text!s}")


def check_same_data(group: ProcessGroup, source: DataSource, seed: int, what: str = "data") -> None:
    """Check that all ranks read the same data in the same order, and draw the same numbers.

    Each takes its part of a batch that none of them has whole, so another order on one of them
    would be noticed nowhere. Reads all of the data, as a checkpoint does. Raises CompileError on
    every rank.
    """
    if group is SINGLE_PROCESS:
        return
    # As text, since a state may hold values that do not travel between ranks.
    position = json.dumps(source.state(), sort_keys=True, default=str)
    rows = _rows(group.all_gather_object(f"compare {what}", (source.fingerprint(), position, seed)))
    for rank, (fingerprint, at, _) in enumerate(rows):
        apart = source_difference(str(fingerprint), str(rows[0][0]))
        if not apart and at != rows[0][1]:
            apart = position_difference(*[json.loads(str(row[1])) for row in (rows[rank], rows[0])])
        if apart:
            raise CompileError(
                f"{find_source()}: rank {rank} has other {what} than rank 0: {apart}. Each rank is"
                " given the whole batches of all, and takes its part of them: give all the same"
                " files, seq, batch and seed, at the same position"
            )
    _check_equal("seed", [row[2] for row in rows], "give all ranks the same seed")


def check_same_steps(group: ProcessGroup, steps: int | None, resume: str = "") -> None:
    """Check that all ranks are asked for as many steps, and to resume in one way.

    Raises CompileError on every rank.
    """
    if group is not SINGLE_PROCESS:
        rows = _rows(group.all_gather_object("steps", (steps, resume)))
        mend = "give all ranks the same steps=, for each step takes all ranks"
        _check_equal("steps", [row[0] for row in rows], mend)
        _check_equal("resume", [row[1] for row in rows], "give all ranks the same resume=")


def check_same_values(
    group: ProcessGroup, plan: Plan, given: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Check that all ranks begin with the same values, of variables that are given some.

    Each takes its part of them, and nothing brings together again what begins apart: sums of
    gradients are the same on all ranks whatever they are of. Values by an initialiser and the seed
    are the same without a look. What other stages have counts, too: their ranks were to be given it
    as well. Reads what is given, once. Raises CompileError on every rank.
    """
    if group is SINGLE_PROCESS:
        return
    # `atleast_1d`, since the hash is made by rows, and a scalar array has none.
    hashes = [
        (name, content_hash(np.atleast_1d(given[name])) if name in given else "")
        # Plan order, then names of other stages sorted, as `given` may have another order on each
        # rank.
        for name in dict.fromkeys([*[variable.name for variable in plan.state], *sorted(given)])
    ]
    first: dict[PlainValue, tuple[int, PlainValue]] = {}
    for rank, rows in enumerate(
        group.all_gather_object(f"begin job {plan.name!r} with values", tuple(hashes))
    ):
        for name, value in _rows(list(rows)) if isinstance(rows, tuple) else []:
            # Of a variable that ranks of one stage have, by the first of them.
            other, expected = first.setdefault(name, (rank, value))
            if value != expected:
                raise CompileError(
                    f"{find_source()}: {name!r} begins on rank {rank} with other values than on"
                    f" rank {other}; give all ranks the same: draw random numbers of your own from"
                    " one seed, load the same file, write the same to the model"
                )


def agree_on_writes(group: ProcessGroup, written: int, line: str) -> None:
    """Check that all ranks wrote the same to variables since the last step; by its digest.

    Raises CompileError on every rank.
    """
    rows = _rows(group.all_gather_object("compare what was written to variables", (written, line)))
    for rank, (digest, where) in enumerate(rows):
        if digest != rows[0][0]:
            lines = " and ".join([str(text) for text in (where, rows[0][1]) if text])
            raise CompileError(
                f"{lines or find_source()}: rank {rank} and rank 0 wrote other values to the"
                " variables of the job since its last step; write the same on all ranks"
            )


def _rows(said: list[PlainValue]) -> list[tuple[PlainValue, ...]]:
    return [row if isinstance(row, tuple) else (row,) for row in said]


def _check_equal(what: str, values: list[Any], mend: str) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise CompileError(
                f"{find_source()}: rank {rank} has {what} {value!r}, rank 0 has {values[0]!r};"
                f" {mend}"
            )
