"""The numbers of a plan, with the bounds that a plan from a file is held to."""

from __future__ import annotations

from typing import Annotated

from compiler.row_values import Bounds

MAX_BYTES = 1 << 48
"""Of an arena, a register, an offset: more than any machine has, and sums of them are no trouble
for 64 bits."""

Bytes = Annotated[int, Bounds(0, MAX_BYTES)]
Index = Annotated[int, Bounds(0, (1 << 31) - 1)]
"""A place in a tuple of the plan; `compiler.references` knows whether that is long enough."""

Count = Annotated[int, Bounds(1, 1 << 24)]
"""Slots, and tokens per firing."""

Duration = Annotated[float, Bounds(0.0, 1e18)]
"""Nanoseconds."""
