"""The first failure of a job, and the words for what ranks do wrong."""

from __future__ import annotations

from dataclasses import dataclass

from actorflow.ranks.messages import Aborted, BatchGiven, RankFailed


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first failure of a job: which rank it was, what it did (a predicate), and where.

    `shown` is what the failed rank would have printed itself, or nothing. `is_hearsay` says that
    another rank told of it.
    """

    rank: int
    text: str
    op: str = ""
    line: str = ""
    shown: str = ""
    is_hearsay: bool = False

    @property
    def told(self) -> str:
        """The failure in a sentence that names the rank."""
        return f"rank {self.rank} {self.text}"


def failure_of(teller: int, message: RankFailed) -> RankFailure:
    """Return the failure that a rank tells of."""
    where = f" in {message.op}" if message.op else ""
    where += f" ({message.line})" if message.line else ""
    is_hearsay = message.rank != teller
    said = f", says rank {teller}" if is_hearsay else ""
    text = f"failed{where}{said}: {message.text}"
    return RankFailure(
        message.rank, text, message.op, message.line, message.shown, is_hearsay=is_hearsay
    )


def aborted(failure: RankFailure) -> Aborted:
    """Return what every rank is told of a failure."""
    return Aborted(failure.rank, failure.told, failure.op, failure.line)


def left_early(rank: int) -> RankFailure:
    """Return the failure of a rank whose script ended amid a run."""
    return RankFailure(rank, "has ended its script, where the others train on")


def listed(ranks: tuple[int, ...]) -> str:
    """Return ranks in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def other_batch(rank: int, other: int, given: BatchGiven) -> RankFailure:
    """Return the failure of a rank that was given another batch than the other one."""
    where = f" ({given.line})" if given.line else ""
    return RankFailure(
        rank,
        f"was given another batch for step {given.step}{where} than rank {other}: every rank gives"
        " the whole batch of all ranks, of which each takes its part. Do not shard the data, nor"
        " draw or shuffle it by RANK: the same batches, from the same seed, on all ranks",
        line=given.line,
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
