"""The plan of a body, as an attribute of the launch that runs it: a frame within the outer plan.

A body is compiled as a job is: its steps are those of the loop. What it shares with the outside are
variables, the carries and constants, which lie where the operands of the launch lie; entries of the
xs are its batch, entries of the ys its outputs. All else is its *frame*: bytes of its own, laid out
when it was compiled, for which the outer plan gives the launch a workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from compiler.errors import InternalError
from compiler.plan import Launch, Plan, Register, RegisterKind
from compiler.row_values import Bounds
from compiler.rows import Structure, structure
from compiler.types import TensorType
from memory.liveness import align_up

Number = Annotated[int, Bounds(0, 1 << 16)]


@structure("sub_plan")
@dataclass(frozen=True, slots=True, eq=False)
class SubPlan(Structure):
    """A plan with the types of its operands and results, in the order of the launch's.

    Operand i is variable or field `str(i)` of the plan, and result i is field `out{i}`, where the
    plan has them: what no launch touches has no place in it. The first `carries` operands are
    carries, and the first results; the `xs` after them are operands by the step.
    """

    plan: Plan
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    carries: Number
    xs: Number

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What a step runs, in order."""
        return tuple([launch for actor in self.plan.actors for launch in actor.launches])

    @property
    def duration_ns(self) -> float:
        """The estimated time of a step."""
        return sum([launch.duration_ns for launch in self.launches])

    def check(self) -> None:
        """Check that the plan's variables and fields are the operands and results.

        Raises InternalError.
        """
        if [len(actor.launches) > 0 for actor in self.plan.actors].count(True) > 1:
            raise InternalError("a step of a body is several chains")
        elsewhere = [r for r in self.plan.registers if r.size_bytes and r.arena]
        if elsewhere or self.plan.constants:
            raise InternalError("a body has bytes of its own besides its frame")
        names = [str(i) for i in range(len(self.operands))]
        types = dict(zip(names, self.operands, strict=True))
        types |= {f"out{i}": type_ for i, type_ in enumerate(self.results)}
        outside = names[: self.carries] + names[self.carries + self.xs :]
        views = [(v.name, v.view, v.name in outside) for v in self.plan.variables]
        views += [(f.name, f.view, f.name not in outside) for f in self.plan.fields]
        for name, view, is_right in views:
            if not is_right or types.get(name) != self.plan.views[view].type:
                raise InternalError(f"a body has no operand or result {name!r} of that type")


@dataclass(frozen=True, slots=True)
class BodyFrame:
    """Where the bytes of a body's own lie in its workspace.

    `offsets_bytes` has, per register, its place; -1 for one that lies outside, in an operand.
    """

    size_bytes: int
    offsets_bytes: tuple[int, ...]


def frame_of(plan: Plan) -> BodyFrame:
    """Return the frame of a body's plan: its arena, without what lies outside or in further slots.

    What is left out lives through the whole plan, so no other register has its bytes.
    """
    alignment = plan.arenas[0].alignment
    gone: list[tuple[int, int]] = []
    for register in plan.registers:
        if not register.size_bytes:
            continue
        first = 0 if _is_outside(register) else 1
        size = align_up(register.size_bytes, alignment)
        gone += [(offset, size) for offset in register.offsets_bytes[first:]]
    gone.sort()

    def moved(offset: int) -> int:
        return offset - sum([size for start, size in gone if start < offset])

    offsets = [
        -1 if _is_outside(r) else moved(r.offsets_bytes[0] if r.size_bytes else 0)
        for r in plan.registers
    ]
    ends = [o + r.size_bytes for o, r in zip(offsets, plan.registers, strict=True) if o >= 0]
    return BodyFrame(align_up(max(ends, default=0), alignment), tuple(offsets))


def _is_outside(register: Register) -> bool:
    return register.kind is RegisterKind.VARIABLE


def sub_plans(plan: Plan) -> Iterator[SubPlan]:
    """Yield the distinct plans of bodies in a plan, those within others first."""
    seen: set[SubPlan] = set()
    for actor in plan.actors:
        for launch in actor.launches:
            for _, value in launch.attrs:
                if isinstance(value, SubPlan) and value not in seen:
                    seen.add(value)
                    yield from sub_plans(value.plan)
                    yield value
