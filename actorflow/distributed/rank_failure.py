"""What a failure of a job is: which rank, what it did, of what kind, and in which words.

The first failure of a job counts; `CoordinatorState` tells it to every rank in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from actorflow.distributed.messages import Aborted, BatchDigest, RankFailed


class FailureKind(Enum):
    """What a failure is, as far as it decides whether the job may be started again."""

    ERROR = "an exception of the script"
    MISTAKE = "an error that every start meets: the script is wrong, or ranks differ"
    EXIT = "an exit that the rank chose itself"
    CRASH = "a signal that a fault of the process itself raises, such as SIGSEGV"
    KILL = "any other signal"
    SILENCE = "a rank that does not answer: it hangs, is stopped, or cannot be reached"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first failure of a job: which rank it was, what it did (a predicate), and where.

    `shown` is what the failed rank would have printed itself, or nothing. `is_hearsay` says that
    another rank told of it. `host` names the rank's host, "" where all ranks run on one. `step` is
    the last step whose data the rank had, None where it was in no run.
    """

    rank: int
    text: str
    op: str = ""
    line: str = ""
    shown: str = ""
    is_hearsay: bool = False
    kind: FailureKind = FailureKind.MISTAKE
    step: int | None = None
    host: str = ""

    @property
    def who(self) -> str:
        """The rank, with its host if there are several."""
        return f"rank {self.rank} on host {self.host}" if self.host else f"rank {self.rank}"

    @property
    def told(self) -> str:
        """The failure in a sentence that names the rank."""
        return f"{self.who} {self.text}"


def failure_of(teller: int, message: RankFailed) -> RankFailure:
    """Return the failure that a rank tells of."""
    where = f" in {message.op}" if message.op else ""
    where += f" ({message.line})" if message.line else ""
    is_hearsay = message.rank != teller
    hearsay = f", says rank {teller}" if is_hearsay else ""
    text = f"failed{where}{hearsay}: {message.text}"
    kind = FailureKind.MISTAKE if message.is_mistake else FailureKind.ERROR
    return RankFailure(
        message.rank,
        text,
        message.op,
        message.line,
        message.shown,
        is_hearsay=is_hearsay,
        # All that others can say of a rank is that it did not come, or not in time.
        kind=FailureKind.SILENCE if is_hearsay else kind,
    )


def aborted(failure: RankFailure) -> Aborted:
    """Return the message that reports a failure to every rank."""
    return Aborted(failure.rank, failure.told, failure.op, failure.line)


def left_early(rank: int) -> RankFailure:
    """Return the failure of a rank whose script ended amid a run."""
    return RankFailure(rank, "ended its script while the other ranks train")


def listed(ranks: tuple[int, ...]) -> str:
    """Return ranks in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def other_batch(rank: int, other: int, given: BatchDigest, before: BatchDigest) -> RankFailure:
    """Return the failure of a rank that was `given` another batch than the other one, `before`."""
    where = f" ({given.line})" if given.line else ""
    if given.types != before.types:
        return other_types(rank, other, given.step, (given.types, before.types), given.line)
    return RankFailure(
        rank,
        f"was given another batch for step {given.step}{where} than rank {other}: every rank gives"
        " the whole batch of all ranks, of which each takes its part. Do not shard the data, nor"
        " draw or shuffle it by RANK: the same batches, from the same seed, on all ranks",
        line=given.line,
    )


def other_types(
    rank: int, other: int, step: int, types: tuple[str, str], line: str = ""
) -> RankFailure:
    """Return the failure of a rank that was given a batch of other types than the other one.

    `types` are those of both.
    """
    where = f" ({line})" if line else ""
    return RankFailure(
        rank,
        f"was given a batch of other types for step {step}{where} than rank {other}: {types[0]},"
        f" and {types[1]}; give all ranks the same batches in one order",
        line=line,
    )


def other_values(rank: int, other: int, step: int, wrote: str, *, is_alone: bool) -> RankFailure:
    """Return the failure of a rank that wrote to the model what the other one did not."""
    where = f" ({wrote})" if wrote else ""
    did = f"which rank {other} did not" if is_alone else f"other values than rank {other}"
    return RankFailure(
        rank,
        f"wrote to the variables of the job before step {step}{where}, {did}: ranks would train two"
        " models. Write the same values on all ranks, before the same step",
        line=wrote,
    )


def other_end(rank: int, step: int, others: str, why: str) -> RankFailure:
    """Return the failure of a rank that ended after a step; `others` says where another was."""
    mend = "the data of all ranks must have the same number of batches"
    by = f" by {why}" if why else ""
    if why:
        mend = (
            "others have begun steps that need its data. Raise StopTraining in on_step, which ends"
            " all ranks after one and the same step, or in the data of all at the same batch"
        )
    return RankFailure(rank, f"ended after step {step}{by}, {others}: {mend}")
