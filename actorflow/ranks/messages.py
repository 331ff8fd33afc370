"""What ranks and their coordinator say to each other.

Every message is a statement that stays true ("has come to step 12", not "one more"), so that one
that comes twice, or after a newer one, changes nothing. Ranks, runs and meetings are numbered; runs
and meetings from 1 up, on each rank by itself, which is why a number says which one is meant.
Steps are the user's: steps of training, in all, whatever the first of the run was.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank is there."""


@dataclass(frozen=True, slots=True)
class Came:
    """A rank has come to a meeting, and brings a packed value.

    `name` says what for, the same on all ranks, as what follows on "to": "compile job 'train'".
    `where` is the user's line there, of each its own, or nothing.
    """

    number: int
    name: str
    value: bytes
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True, slots=True)
class WaitedInVain:
    """A rank has waited for so many seconds in all at a meeting, which is enough."""

    number: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Began:
    """A rank is ready for a run whose next step comes after `first_step`."""

    run: int
    first_step: int


@dataclass(frozen=True, slots=True)
class Reached:
    """A rank has come to a step, and so to all before it: it has the data of that."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A rank asks for the end of the run, for a reason."""

    run: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """A rank asks for a checkpoint."""

    run: int


@dataclass(frozen=True, slots=True)
class EndsAfter:
    """A rank's run has no step after this one: its data ended, or the run is over.

    `why` says what ended the data before its last batch, or nothing.
    """

    run: int
    step: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class WouldEnd:
    """A rank that was told of a stop has begun no step after this one, and begins none until told.

    So the end may be there, although more was granted: its source does not answer, or another's.
    """

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchGiven:
    """The whole batch of a step, as a rank was given it, has this digest.

    `line` is the user's line that reads it, or nothing.
    """

    run: int
    step: int
    digest: int
    line: str


@dataclass(frozen=True, slots=True)
class HasData:
    """A rank has data for a step that comes after the end of another's."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank failed, by the fault of `rank`, as this one knows it: mostly itself.

    `op` and `line` say where, or nothing; `shown` is what its user is shown.
    """

    rank: int
    text: str
    op: str
    line: str
    shown: str


@dataclass(frozen=True, slots=True)
class Left:
    """A rank's script has ended well."""


FromRank = (
    Hello
    | Came
    | WaitedInVain
    | Began
    | Reached
    | StopAsked
    | CheckpointAsked
    | EndsAfter
    | WouldEnd
    | BatchGiven
    | HasData
    | RankFailed
    | Left
)
"""What a rank says."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator knows this rank."""

    num_ranks: int


@dataclass(frozen=True, slots=True)
class Met:
    """All ranks have come to a meeting; their values, by rank."""

    number: int
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    """A run may begin so many steps in all; with `is_last` never more, for a reason."""

    run: int
    steps: int
    is_last: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointAt:
    """Every rank writes the state after this step, which none has begun yet."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class HoldAsked:
    """A rank of a run that is to stop holds; all others do so, too, and say WouldEnd."""

    run: int


@dataclass(frozen=True, slots=True)
class EndAt:
    """A run that holds ends after this step, which a rank has begun, and none has gone beyond."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class OtherEndsAfter:
    """A rank's run has no step after this one; who has data for more says so."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The job has failed, by a rank, somewhere or nowhere."""

    rank: int
    text: str
    op: str
    line: str


@dataclass(frozen=True, slots=True)
class Noted:
    """What this rank said last, that it failed or left, was heard: it may end."""


ToRank = (
    Welcome | Met | Granted | CheckpointAt | HoldAsked | EndAt | OtherEndsAfter | Aborted | Noted
)
"""What the coordinator says."""
