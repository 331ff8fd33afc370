"""What `actorflow replay` asks of the script that it starts: `ACTORFLOW_REPLAY`, as JSON.

The `fit` of a job with the run's checkpoint directory replays in place of training
(`actorflow.run.replay`). Any other way to train in that directory is refused meanwhile: a replay
changes nothing of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from actorflow.environment.settings import REPLAY
from compiler.contract.codec import Bounds, Text, from_json, from_object, to_json, to_object
from compiler.contract.errors import ActorflowError

MOST_STEPS = 10**10
Step = Annotated[int, Bounds(1, MOST_STEPS)]


class ReplayError(ActorflowError):
    """A step cannot be replayed; the message says why, and how to mend it."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What is to be replayed: the run's folder, steps, patterns of ops, and the file of results.

    `checkpoint` is what the run's folder was called by `fit`; it may have been moved since.
    """

    run: Text
    checkpoint: Text
    steps: tuple[Step, ...]
    shown: tuple[Text, ...]
    result: Text

    def text(self) -> str:
        """Return it as the variable has it."""
        return to_json(to_object(self)).decode()


def requested(environ: Mapping[str, str], checkpoint: object) -> ReplayRequest | None:
    """Return what is to be replayed in place of a run with this checkpoint directory."""
    text = environ.get(REPLAY)
    if not text or not isinstance(checkpoint, (str, os.PathLike)):
        return None
    request = from_object(ReplayRequest, from_json(text.encode()))
    is_it = os.path.realpath(os.fspath(checkpoint)) == os.path.realpath(request.checkpoint)
    return request if is_it else None


def refuse_training(environ: Mapping[str, str], checkpoint: object) -> None:
    """Raise ReplayError for a run in the directory whose steps are to be replayed."""
    if requested(environ, checkpoint) is not None:
        raise ReplayError(
            f"a replay changes nothing of {checkpoint}: this fit would train on in it. Only fit of"
            " a job can be replayed; a plan from a file has no other plan, which shows values"
        )
