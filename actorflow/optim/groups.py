"""Parameter groups: what an optimizer does otherwise for parameters chosen by their paths.

    af.optim.AdamW(
        1e-3,
        groups=[
            af.optim.group("*.bias", "*norm*", weight_decay=0.0),
            af.optim.group("head.*", lr_scale=10.0),
            af.optim.group("embedding.*", frozen=True),
        ],
    )

Of several groups that match a path the first decides; a parameter that none matches is treated as
if there were none. A group adds no launches of its own on devices that join updates: parameters
that are treated alike are joined, whatever groups they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from actorflow.optim.rates import Schedule, check_rate, not_negative
from actorflow.patterns import chosen, wrong_patterns
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.graph import SourceLocation


@dataclass(frozen=True, slots=True)
class Group:
    """See `group`, which makes one. `options` are settings of the optimizer, by name."""

    patterns: tuple[str, ...]
    lr_scale: float
    is_frozen: bool
    options: tuple[tuple[str, object], ...]
    source: SourceLocation

    def matches(self, path: str) -> bool:
        """Whether a parameter is in the group, if it is in none before."""
        return any([fnmatchcase(path, pattern) for pattern in self.patterns])


def group(
    *patterns: str,
    lr: float | Schedule | None = None,
    lr_scale: float = 1.0,
    frozen: bool = False,
    **options: object,
) -> Group:
    """Return a group of the parameters whose paths match one of some patterns.

    Args:
        patterns: globs over paths, such as "blocks.*.bias": `*` stands for any letters, dots too.
        lr: their learning rate, a number or a schedule, in place of the optimizer's.
        lr_scale: what the learning rate is multiplied by.
        frozen: True leaves them as they are: no update, no state, no gradient.
        options: other settings of the optimizer, by its own names: weight_decay=0.0.

    Raises CompileError with the user's line; a setting that the optimizer has not, and a pattern
    that matches no parameter, is told of where the optimizer is made and where a job is compiled.
    """
    where = find_source()
    if wrong := wrong_patterns(patterns):
        raise CompileError(f"{where}: a group needs {wrong}")
    if not isinstance(frozen, bool):
        raise CompileError(f"{where}: frozen must be True or False, got {frozen!r}")
    scale = not_negative(lr_scale, "lr_scale")
    if lr is not None:
        check_rate(lr)
        options = {"lr": lr, **options}
    if frozen and (options or scale != 1.0):
        raise CompileError(f"{where}: a frozen group has no other settings; leave them out")
    return Group(patterns, scale, frozen, tuple(options.items()), where)


def check_groups(groups: object, known: Sequence[str], optimizer: str) -> None:
    """Raise CompileError for what are no groups, or groups with settings that nothing reads."""
    if not isinstance(groups, (list, tuple)):
        came = type(groups).__name__
        raise CompileError(
            f"{find_source()}: groups must be a list of af.optim.group(...), got {came}"
        )
    for own in groups:
        if not isinstance(own, Group):
            raise CompileError(
                f"{find_source()}: groups must be a list of af.optim.group(...), one is {own!r:.60}"
            )
        for name, _ in own.options:
            if name not in known:
                raise CompileError(
                    f"{own.source}: {optimizer} has no setting {name!r} for a group; it has"
                    f" {', '.join(known)}"
                )


def check_patterns(groups: Sequence[Group], paths: Sequence[str]) -> None:
    """Raise CompileError, with the line of the group, for a pattern that matches no parameter."""
    for own in groups:
        for pattern in own.patterns:
            chosen(pattern, paths, f"{own.source}: a group of an optimizer")
