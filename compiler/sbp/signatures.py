"""What an op makes of split, broadcast and partial operands, along one axis of a mesh.

A `SbpSignature` promises: where each rank has its part of the operands, and runs the op on them as
`compiler.sbp.project` has it, each has its part of the results. The cells of the column are of
primitive ops; of an op that is a program, signatures follow from the program
(`compiler.sbp.derive`). Every op takes operands that each rank has whole (`whole`).

A signature over several axes of a mesh is one of these for each axis: what holds of an op on any
shapes holds of the op on parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.attrs import Attrs
from compiler.registry import OpAttr, Types
from compiler.sbp.words import BROADCAST, PARTIAL, Partial, Sbp, Split


@dataclass(frozen=True, slots=True)
class SbpSignature:
    """How operands must lie, and how the results lie then."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all operands and results are whole."""
        return {*self.inputs, *self.outputs} <= {BROADCAST}

    def __str__(self) -> str:
        sides = [", ".join(map(str, side)) for side in (self.inputs, self.outputs)]
        return " -> ".join(sides)


SignaturesOf = Callable[[Types, Types, Attrs, int], Sequence[SbpSignature]]
"""The signatures of a call, beside that of whole operands: (inputs, outputs, attrs, parts).

Types are those of the whole tensors. Where extents are no multiples of the `parts`, a split may be
uneven; whatever a signature says holds of uneven ones, too.
"""

Labels = Sequence[str]
"""A name for each axis of an operand; "" where it cannot be split."""

sbp_signatures = OpAttr[SignaturesOf](
    "sbp_signatures",
    "what the op makes of operands that lie on several ranks; read by the choice of SBP. Without a"
    " cell: what follows from the op's program, or whole operands alone",
)


def whole(inputs: Types, outputs: Types) -> SbpSignature:
    """Return the signature that every op has."""
    return SbpSignature((BROADCAST,) * len(inputs), (BROADCAST,) * len(outputs))


def by_axes(
    inputs: Sequence[Labels], outputs: Sequence[Labels], *, sums: bool = False
) -> list[SbpSignature]:
    """Return the signatures of an op whose axes correspond by name, as in einsum.

    Along a name, whoever has it is split, and other operands are whole. With `sums`, results that
    do not have it are partial; without, all results must have it.
    """
    names = dict.fromkeys([name for labels in inputs for name in labels if name])
    found = []
    for name in names:
        made = [_word(labels, name, PARTIAL if sums else None) for labels in outputs]
        if None not in made:
            given = [_word(labels, name, BROADCAST) for labels in inputs]
            found.append(SbpSignature(tuple(filter(None, given)), tuple(filter(None, made))))
    return found


def linear_in(number: int, inputs: int, outputs: int = 1, by: Partial = PARTIAL) -> SbpSignature:
    """Return the signature of an op that is linear in one operand, the others being whole."""
    given = [by if i == number else BROADCAST for i in range(inputs)]
    return SbpSignature(tuple(given), (by,) * outputs)


def _word(labels: Labels, name: str, other: Sbp | None) -> Sbp | None:
    return Split(list(labels).index(name)) if name in labels else other


def last_labels(names: Sequence[str], shape: Sequence[int], wide: Sequence[int]) -> Labels:
    """Return the names of the axes of an operand that numpy's rule stretches to a wide shape."""
    own = names[len(names) - len(shape) :]
    last = wide[len(wide) - len(shape) :]
    return [name if n == m else "" for name, n, m in zip(own, shape, last, strict=True)]
