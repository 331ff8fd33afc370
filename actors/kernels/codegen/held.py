"""Where the wide values of a region are while a chunk is worked on: as few buffers as can be.

A value takes the buffer of one that nobody reads any more; an output of a program also that of an
operand which the program reads no later than it stores the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.kernels.codegen.phases import last_reads, store_phases
from actors.kernels.codegen.programs import Made, made_of
from actors.kernels.kernel import Attrs
from compiler.fusion.region import Region, Step
from compiler.types import numpy_dtype


@dataclass(frozen=True, slots=True)
class HeldBuffers:
    """The type of each buffer, and which one a wide value is in."""

    dtypes: tuple[np.dtype[np.generic], ...]
    of_value: dict[int, int]


def buffers_of(region: Region) -> HeldBuffers:
    """Return the buffers of a region's wide values. O(steps x buffers)."""
    dtypes: list[np.dtype[np.generic]] = []
    of_value: dict[int, int] = {}
    free: list[int] = []
    last = region.last_reads()
    for index, step in enumerate(region.steps):
        dying = [v for v in dict.fromkeys(step.reads) if region.is_wide(v) and last[v] == index]
        for value in [v for v in step.makes if region.is_wide(v)]:
            wanted = numpy_dtype(region.held[value - region.num_inputs].dtype)
            over = next(
                (v for v in dying if dtypes[of_value[v]] == wanted and _may_lie(step, value, v)),
                None,
            )
            place = next((b for b in free if dtypes[b] == wanted), None)
            if over is not None:
                dying.remove(over)
                place = of_value[over]
            elif place is not None:
                free.remove(place)
            else:
                place = len(dtypes)
                dtypes.append(wanted)
            of_value[value] = place
        free += [of_value[v] for v in dying]
        free += [of_value[v] for v in step.makes if region.is_wide(v) and v not in last]
    return HeldBuffers(tuple(dtypes), of_value)


def program_attrs(step: Step) -> Attrs:
    """Return the program of a step as the attributes of a launch have it."""
    if step.program is None:
        raise ValueError(f"a step {step.kind.value} has no program")
    return {"program": step.program}


def made_of_step(step: Step) -> Made:
    """Return the program of a step with its schedule."""
    return made_of(program_attrs(step))


def _may_lie(step: Step, made: int, read: int) -> bool:
    """Whether a program may store an output over an operand."""
    if step.program is None:
        return False
    found = made_of_step(step)
    reads, stores = last_reads(found.schedule, found.program), store_phases(found.schedule)
    out = step.makes.index(made)
    places = [place for place, v in enumerate(step.reads) if v == read]
    return all([reads.get(place, -1) <= stores[out] for place in places])
