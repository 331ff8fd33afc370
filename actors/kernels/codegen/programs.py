"""The program of a launch, and what follows from it, worked out once.

Programs are remembered by their plain form. Equality takes 0.0 and -0.0 for one, arithmetic does
not, so the signs of zeros are part of the key.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import cast

from actors.kernels.codegen.emit import emit, is_taken
from actors.kernels.codegen.phases import Schedule, schedule
from actors.kernels.kernel import Attrs
from actors.kernels.native.runtime import CFunction
from compiler.fusion.check import check_program
from compiler.fusion.program import FusedProgram, Plain, from_plain

_Key = tuple[Plain, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Made:
    """A program, and how it is walked."""

    program: FusedProgram
    schedule: Schedule


def made_of(attrs: Attrs) -> Made:
    """Return the program in the attributes of a launch, with its schedule."""
    return _made(_key(attrs))


def function_of(attrs: Attrs) -> CFunction | None:
    """Return the function of a launch; None where there is no C for its program."""
    found = _function(_key(attrs))
    members = attrs.get("members")
    if found is None or not isinstance(members, tuple):
        return found
    names = ", ".join(dict.fromkeys([str(name) for name in members]))
    return replace(found, about=f"{names}: {found.about}")


def _key(attrs: Attrs) -> _Key:
    plain = cast("Plain", attrs["program"])
    instructions = cast("tuple[tuple[object, ...], ...]", plain[1])
    constants = [c for i in instructions for c in cast("tuple[float, ...]", i[4])]
    return plain, tuple([math.copysign(1.0, c) for c in constants if c == 0])


@functools.lru_cache(maxsize=4096)
def _made(key: _Key) -> Made:
    program = _checked(key[0])
    return Made(program, schedule(program))


@functools.lru_cache(maxsize=4096)
def _function(key: _Key) -> CFunction | None:
    program = _checked(key[0])
    return emit(program) if is_taken(program) else None


def _checked(plain: Plain) -> FusedProgram:
    """Return a program that text and scratch may be made of: a launch may come from a file."""
    program = from_plain(plain)
    check_program(program)
    return program
