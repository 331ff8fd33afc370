"""The program of a launch, and what follows from it, worked out once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from actors.kernels.attributes import fused_program
from actors.kernels.codegen.emit import emit, is_taken
from actors.kernels.codegen.phases import Schedule, schedule
from actors.kernels.kernel import Attrs
from actors.kernels.native.runtime import CFunction
from actors.protocol import Array, Arrays
from compiler.fusion.check import check_program
from compiler.fusion.program import FusedProgram


@dataclass(frozen=True, slots=True)
class Made:
    """A program, and how it is walked."""

    program: FusedProgram
    schedule: Schedule


def made_of(attrs: Attrs) -> Made:
    """Return the program in the attributes of a launch, with its schedule."""
    return _made(fused_program(attrs, "program"))


def function_of(attrs: Attrs) -> CFunction | None:
    """Return the function of a launch; None where there is no C for its program."""
    found = _function(fused_program(attrs, "program"))
    members = attrs.get("members")
    if found is None or not isinstance(members, tuple):
        return found
    names = ", ".join(dict.fromkeys([str(name) for name in members]))
    return replace(found, about=f"{names}: {found.about}")


def split_skip(program: FusedProgram, inputs: Arrays) -> tuple[Arrays, Array | None]:
    """Return the operands of a program, and what says whether to leave out its launch."""
    own = len(program.inputs)
    return inputs[:own], next(iter(inputs[own:]), None)


@functools.lru_cache(maxsize=4096)
def _made(program: FusedProgram) -> Made:
    check_program(program)  # text and scratch are made of it, and a launch may come from a file
    return Made(program, schedule(program))


@functools.lru_cache(maxsize=4096)
def _function(program: FusedProgram) -> CFunction | None:
    made = _made(program)
    return emit(program, made.schedule) if is_taken(program) else None
