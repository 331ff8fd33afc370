"""The kernel texts that walks of a program may launch on a GPU."""

from __future__ import annotations

from actors.kernels.cuda.emit import SumPlace
from actors.kernels.cuda.programs import scheduled_for_device, text_of


def texts_of(program, *, is_cut):
    """Return the kernels of all places in which walks of a program have sums over rows."""
    plan = scheduled_for_device(program).schedule
    places = (SumPlace.NONE,)
    if plan.column_sums:
        reduces = any([phase.reductions for phase in plan.phases])
        places = (SumPlace.SHARED, SumPlace.SCRATCH) if reduces else (SumPlace.REGISTERS,)
        places = (SumPlace.SCRATCH,) if is_cut else places
    return tuple([text_of(program, place, is_cut=is_cut) for place in places])
