"""What a probe does with its values: print them, hold them against a predicate, stop at them.

The values are arrays of the host, whoever computed them: a plan step by step, or eager code at
once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np

from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.probe import ProbeKind, TensorProbe
from compiler.contract.types import TensorType

Array = np.ndarray[Any, Any]

Predicate = Callable[[Array], object]
"""Whether an array is as it should be: a bool, or something that is true or false."""

Predicates = Mapping[str, Mapping[int, Predicate]]
"""What the checks of a plan are held against, by the sink that sees them and their number."""


class CheckFailed(ActorflowError):
    """A value is not what `af.debug.check` wants; the message names step and user line."""


@dataclass(frozen=True, slots=True)
class ProbeEvent:
    """When a probe has its values: `text` tells it, such as "step 3, batch 2 of 8".

    `line` is the user's line of the probe, `rank` "" where there is one rank alone.
    """

    line: str
    text: str = ""
    rank: str = ""

    def at(self, step: int, length: int) -> ProbeEvent:
        """Return what happens at one step of a loop within."""
        more = f"iteration {step} of {length}"
        return ProbeEvent(self.line, f"{self.text}, {more}" if self.text else more, self.rank)


def check_format(text: str, types: Sequence[TensorType], where: object) -> None:
    """Raise CompileError, with the user's line, for a format that does not fit its operands."""
    try:
        fields = try_format(text, types)
    except (ValueError, TypeError, IndexError) as error:
        given = ", ".join(map(str, types)) or "no tensors"
        raise CompileError(
            f"{where}: the format {text!r} of af.debug.print does not fit {given}: {error}. Write a"
            " {} for each tensor; a form such as {:.3f} is for scalars"
        ) from None
    # Of the fields {} each takes the next operand; of {0} and {1} some may be left out.
    if len(fields) < len(types) and ("" in fields or not fields):
        raise CompileError(
            f"{where}: the format {text!r} of af.debug.print has {len(fields)} fields for"
            f" {len(types)} tensors; write a {{}} for each"
        )


def try_format(text: str, types: Sequence[TensorType]) -> list[str]:
    """Return the fields of a format. Raises ValueError, TypeError or IndexError for a misfit."""
    fields = _fields(text)
    formatted(text, [np.zeros((1,) * t.rank, _plain(t)) for t in types])
    return fields


_WIDE = re.compile(r"\d{4}")


def _fields(text: str) -> list[str]:
    """Return the fields of a format. Raises ValueError for one that looks into its operand.

    Formats come with plans, so they may do nothing but show: no attributes, no endless width.
    """
    fields: list[str] = []
    for _, name, form, _ in Formatter().parse(text):
        if name is None:
            continue
        if name and not name.isdecimal():
            raise ValueError(f"a field is {{}}, or a number, not {{{name}}}")
        if "{" in (form or "") or _WIDE.search(form or ""):
            raise ValueError(f"the form {form!r} is none of up to 999 letters")
        fields.append(name)
    return fields


def _plain(type_: TensorType) -> str:
    return "float32" if type_.dtype.is_float else type_.dtype.value


def formatted(text: str, arrays: Sequence[Array]) -> str:
    """Return the text of a print: scalars are numbers of Python, all else arrays of numpy."""
    return text.format(*[x.item() if x.ndim == 0 else x for x in arrays])


def fire(
    probe: TensorProbe,
    arrays: Sequence[Array],
    event: ProbeEvent,
    predicate: Predicate | None = None,
) -> None:
    """Do what a probe does, outside of loops.

    `predicate` is that of a check, where it has one. Raises CheckFailed, with the line of the
    check and what was found.
    """
    if probe.kind is ProbeKind.PRINT:
        # The line and its end at once: ranks may be threads that print side by side.
        print(f"{event.rank}{formatted(probe.text, arrays)}\n", end="", flush=True)
    elif probe.kind is ProbeKind.BREAK:
        _stop(event, arrays)
    elif probe.kind is ProbeKind.CHECK and (fault := _fault(arrays[0], probe.text, predicate)):
        raise CheckFailed(
            f"{event.line}: af.debug.check failed {event.text}: {event.rank}{arrays[0].dtype}"
            f"{list(arrays[0].shape)} {fault}"
        )


def _fault(array: Array, name: str, predicate: Predicate | None) -> str:
    """Return what is wrong with an array; nothing where it is as it should be."""
    if predicate is None:
        return "" if np.isfinite(array).all() else f"is not finite: {summary(array)}"
    try:
        is_right = bool(predicate(array))
    # The user's code: whatever it raises is told with the line of the check.
    except Exception as error:
        return f"made the predicate {name} raise {type(error).__name__}: {error}"
    return "" if is_right else f"does not fulfil {name}: {summary(array)}"


def summary(array: Array) -> str:
    """Return range, NaN and infinities of an array in words."""
    if array.dtype.kind == "f":
        finite = array[np.isfinite(array)]
        num_nan, num_inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    else:
        finite, num_nan, num_inf = array, 0, 0
    least, most = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
    return range_text(float(least), float(most), num_nan, num_inf)


def range_text(least: float, most: float, num_nan: float, num_inf: float) -> str:
    """Return what is known of the elements of an array in words."""
    finite = f"finite from {least:.6g} to {most:.6g}" if least <= most else "none finite"
    return f"{finite}, {num_nan:.0f} NaN, {num_inf:.0f} infinite"


def _stop(event: ProbeEvent, arrays: Sequence[Array]) -> None:
    """Stop in the debugger, where `values` are what the probe was given."""
    values = arrays[0] if len(arrays) == 1 else tuple(arrays)
    print(f"{event.rank}af.debug.breakpoint {event.text} ({event.line}): see `values`")
    breakpoint()  # PYTHONBREAKPOINT may name another debugger
    del values
