"""`actorflow plan SCRIPT --largest-batch MEMORY`: the largest batch that fits, without a run.

The job is planned with other numbers of rows, by doubling and then by halving the gap, so some
dozen plans tell. Memory is that of the arenas of one rank, which is all that a step uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actorflow.environment.option_values import parse_bytes
from actorflow.jobs.job_spec import PlanFor
from compiler.contract.errors import BudgetError, CompileError
from compiler.contract.types import TensorType
from memory.report import format_bytes

MOST_ROWS = 1 << 20
_STEPS = 64
"""A batch of more rows than this is sought to within a 64th of them."""


def report(spec: Mapping[str, TensorType], plan_for: PlanFor, memory: str) -> list[str]:
    """Return lines: the largest batch that fits into a memory, and what twice as much costs.

    `spec` are the types of the batches that the script has. Raises CompileError where they have no
    common number of rows, or `memory` is none.
    """
    try:
        limit_bytes = parse_bytes(memory)
    except ValueError as error:
        raise CompileError(f"--largest-batch: {error}") from None
    rows = rows_of(spec)

    def size(count: int) -> int:
        plan = plan_for(of_rows(spec, count), None)
        return sum([arena.size_bytes for arena in plan.arenas])

    largest, its_bytes = largest_that_fits(size, rows, limit_bytes)
    limit = format_bytes(limit_bytes)
    if not largest:
        return [f"no batch fits into {limit}: one row takes {format_bytes(size(1))}"]
    lines = [
        f"largest batch in {limit}: {largest:,} rows ({format_bytes(its_bytes)}), without"
        f" recomputation; the script has {rows:,}"
    ]
    if largest >= MOST_ROWS:
        return lines
    try:
        plan = plan_for(of_rows(spec, 2 * largest), memory)
    except BudgetError as error:
        return [*lines, f"{2 * largest:,} rows do not fit, with recomputation either: {error}"]
    again = sum([note.num_launches for note in plan.recomputation])
    extra = sum([note.extra for note in plan.recomputation])
    return [
        *lines,
        f"{2 * largest:,} rows fit as well where {again} launches run again, {extra:.1%} of the"
        f" step's time: @af.job(memory_budget={memory!r})",
    ]


def largest_that_fits(size: Callable[[int], int], start: int, limit: int) -> tuple[int, int]:
    """Return the largest count whose size is within a limit, and its size; zeros where none is.

    Sizes are taken to grow with the count. Of more than 64, to within a 64th.
    """
    low, low_size, high = 0, 0, 0
    count = min(start, MOST_ROWS)
    while not high and count <= MOST_ROWS:
        count_size = size(count)
        if count_size > limit:
            high = count
        else:
            low, low_size, count = count, count_size, 2 * count
    while high and high - low > max(1, low // _STEPS):
        middle = (low + high) // 2
        middle_size = size(middle)
        if middle_size > limit:
            high = middle
        else:
            low, low_size = middle, middle_size
    return low, low_size


def rows_of(spec: Mapping[str, TensorType]) -> int:
    """Return the rows of a batch: the first extent, which all of its arrays have."""
    counts = {type_.shape[0] for type_ in spec.values() if type_.shape}
    if len(counts) != 1 or not all([type_.shape for type_ in spec.values()]):
        shapes = ", ".join([f"{name}: {type_}" for name, type_ in spec.items()])
        raise CompileError(
            f"--largest-batch wants batches whose arrays have as many rows each, came {shapes}"
        )
    return counts.pop()


def of_rows(spec: Mapping[str, TensorType], rows: int) -> dict[str, TensorType]:
    """Return the types of a batch with other rows."""
    return {name: TensorType(t.dtype, (rows, *t.shape[1:])) for name, t in spec.items()}
