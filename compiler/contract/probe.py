"""Probes: outputs of a plan that a run shows or checks itself, and returns to nobody.

A probe is a name of an output (`Field.name`), so it goes wherever outputs go: through every pass,
from every device and rank to the host, one value for each batch, and into a file without the user's
code.

    debug/3/0/print/1,-2/loss {:.3f} of {}
    debug/3/1/print/1,-2/

is the probe 3 with two operands, inside of two loops, of which the inner one runs backwards. Which
line it is on, its field says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from compiler.contract.errors import PlanFormatError

PREFIX = "debug/"
"""How the names of outputs begin that are probes."""

_NAME = re.compile(r"debug/(\d{1,9})/(\d{1,9})/([a-z]+)/((?:-?\d{1,9},?)*)/(.*)", re.DOTALL)


class ProbeKind(Enum):
    """What is done with the values of a probe."""

    PRINT = "print"
    """Printed by a format."""
    CHECK = "check"
    """Held against a predicate, by its name; "" wants finite numbers."""
    BREAK = "break"
    """Given to a debugger."""
    RANGE = "range"
    """Least and largest finite number, NaN and infinities of a value, of which the text tells."""


@dataclass(frozen=True, slots=True)
class TensorProbe:
    """What is done with some outputs of a plan.

    `number` counts the probes of a job in the order in which they were written. `loops` are the
    numbers of the loops around it, outermost first, negative where a loop goes from its end: its
    values have a first axis for each.
    """

    number: int
    kind: ProbeKind
    text: str
    loops: tuple[int, ...] = ()

    def name(self, operand: int) -> str:
        """Return the name of the output that is an operand of the probe."""
        loops = ",".join(map(str, self.loops))
        text = "" if operand else self.text
        return f"{PREFIX}{self.number}/{operand}/{self.kind.value}/{loops}/{text}"


def is_probe(name: str) -> bool:
    """Whether an output of this name is a probe's, and none of the job's own."""
    return name.startswith(PREFIX)


def read_probe(name: str) -> tuple[TensorProbe, int]:
    """Return the probe that an output is of, and its operand. Raises PlanFormatError."""
    match = _NAME.fullmatch(name)
    if match is None or match[3] not in [kind.value for kind in ProbeKind]:
        raise PlanFormatError(f"the plan has an output {name!a:.60}, which is no probe")
    loops = tuple([int(loop) for loop in match[4].split(",") if loop])
    return TensorProbe(int(match[1]), ProbeKind(match[3]), match[5], loops), int(match[2])


def have_breakpoint(names: Iterable[str]) -> bool:
    """Whether one of some outputs stops its step in a debugger. Raises PlanFormatError."""
    kinds = [read_probe(name)[0].kind for name in names if is_probe(name)]
    return ProbeKind.BREAK in kinds


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The text of a probe of the kind RANGE: which value it is of.

    `phase` is the pass of its op, "" for what a step begins with: a batch or a variable. `what` is
    the op and its module, or the name of the batch's entry, `type` its dtype and shape. `inputs`
    are the numbers of the ranges of what the op reads.
    """

    phase: str
    what: str
    type: str
    inputs: tuple[int, ...]

    def text(self) -> str:
        """Return it as a text."""
        return "|".join([self.phase, self.type, ",".join(map(str, self.inputs)), self.what])

    @staticmethod
    def parse(text: str) -> ValueRange:
        """Return what `text` has made. Raises PlanFormatError."""
        parts = text.split("|", 3)
        numbers = parts[2].split(",") if len(parts) == 4 else ["none"]
        if not all([number.isdecimal() for number in numbers if number]):
            raise PlanFormatError(f"the plan has a value range {text!a:.60}, which is none")
        inputs = tuple([int(number) for number in numbers if number])
        return ValueRange(parts[0], parts[3], parts[1], inputs)
