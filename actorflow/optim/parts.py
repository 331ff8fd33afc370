"""Several optimizers in one job, each for some parameters and one loss.

    @af.job(
        optimizer=[
            af.optim.on("generator.*", af.optim.Adam(2e-4), loss="g_loss"),
            af.optim.on("discriminator.*", af.optim.Adam(2e-4), loss="d_loss"),
        ]
    )
    def train(model, batch):
        ...
        return {"g_loss": g_loss, "d_loss": d_loss}

A parameter gets the gradient of its own part's loss and of no other; what no part names is read as
if frozen. All gradients are of the values before the step, and all updates happen at its end:
simultaneous descent, where a loop in torch that steps one optimizer after the other has the second
see what the first has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actorflow.optim.recipes import Optimizer
from actorflow.patterns import Patterns, chosen, wrong_patterns
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.graph import SourceLocation


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """See `on`, which makes one."""

    patterns: Patterns
    optimizer: Optimizer
    loss: str
    source: SourceLocation


def on(patterns: Patterns, optimizer: Optimizer, *, loss: str = "loss") -> OptimizerPart:
    """Return a part of a job's optimizer: which parameters it trains, how, and on what loss.

    Args:
        patterns: globs over paths, such as "generator.*" or ["head.*", "!*.bias"].
        optimizer: how they are updated.
        loss: the key of their loss in what the job returns.

    Raises CompileError with the user's line.
    """
    where = find_source()
    if wrong := wrong_patterns(patterns):
        raise CompileError(f"{where}: on() needs {wrong}")
    if not is_optimizer(optimizer):
        raise CompileError(
            f"{where}: on() needs an optimizer, such as af.optim.AdamW(1e-3), got {optimizer!r}"
        )
    if not isinstance(loss, str) or not loss:
        raise CompileError(f"{where}: loss must be a key of what the job returns, got {loss!r}")
    kept = patterns if isinstance(patterns, str) else tuple(patterns)
    return OptimizerPart(kept, optimizer, loss, where)


def is_optimizer(value: object) -> bool:
    """Whether something can give the rules of a job."""
    return callable(getattr(value, "rules", None)) and not isinstance(value, type)


def parts_of(given: object, where: SourceLocation) -> tuple[OptimizerPart, ...] | None:
    """Return the parts of what a job got as its optimizer; None for what is none."""
    if is_optimizer(given):
        return (OptimizerPart("*", given, "loss", where),)  # type: ignore[arg-type]  # it has rules
    listed = [given] if isinstance(given, OptimizerPart) else given
    if not isinstance(listed, (list, tuple)) or not listed:
        return None
    return tuple(listed) if all([isinstance(part, OptimizerPart) for part in listed]) else None


def claims(
    parts: Sequence[OptimizerPart], paths: Sequence[str], trained: Mapping[str, object]
) -> list[list[str]]:
    """Return the paths that each part trains, of those that a job trains.

    Raises CompileError, with the line of the part, for a path that two parts claim, and for a part
    that has nothing to train.
    """
    owner: dict[str, OptimizerPart] = {}
    found = []
    for part in parts:
        named = chosen(part.patterns, paths, f"{part.source}: on()") if paths else ()
        own = [path for path in named if path in trained]
        for path in own:
            other = owner.setdefault(path, part)
            if other is not part:
                raise CompileError(
                    f"{part.source}: parameter {path!r} is claimed by {part.patterns!r} here and by"
                    f" {other.patterns!r} at {other.source}; one optimizer can train it: take it"
                    f" out of the other with '!{path}'"
                )
        if not own and len(parts) > 1:
            raise CompileError(
                f"{part.source}: all that {part.patterns!r} names is frozen, or left out with"
                " trainable=; leave the part out, or unfreeze() some of it"
            )
        found.append(own)
    return found
