"""A kernel that calls a Python function with the arrays of a launch: for ops from outside.

The function gets inputs and outputs as they lie in the plan's memory, outputs last, and the op's
attributes by keyword. It reads the inputs, which are read-only, and fills the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.protocol import Array, Arrays, Launch
from compiler.types import DType


@dataclass(frozen=True, slots=True)
class PythonKernel:
    """Computes `op` by a function. It takes every call but those of bfloat16, which numpy lacks."""

    op: str
    function: Callable[..., object]

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"python.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Estimate a nanosecond per byte: no one knows what the function does."""
        operands = (*inputs, *outputs)
        if DType.BFLOAT16 in [operand.type.dtype for operand in operands]:
            return None
        return KernelNeeds(duration_ns=float(sum([o.type.size_bytes for o in operands])))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the call of the function.

        It raises TypeError where the function returns an array that is no part of an output, and
        where it leaves an output as it was: what nobody fills holds what lay there before.
        """
        call = partial(self.function, *[_read_only(x) for x in inputs], *outputs, **attrs)
        is_known = False

        def launch() -> None:
            nonlocal is_known
            if not is_known:
                self._expect_filled(call, outputs)
                is_known = True
                return
            made = call()
            if made is not None:
                self._expect_outputs(made, outputs)

        return launch

    def _expect_outputs(self, made: object, outputs: Arrays) -> None:
        for item in made if isinstance(made, (tuple, list)) else (made,):
            is_data = isinstance(item, (np.ndarray, np.generic))
            if is_data and not any([np.may_share_memory(item, out) for out in outputs]):
                raise self._unfilled(f"returned an array of {item.dtype}{list(item.shape)}")

    def _expect_filled(self, call: Launch, outputs: Arrays) -> None:
        """Call, once more with another pattern where an output is what it was filled with."""
        left = list(range(len(outputs)))
        for pattern in (0xABABABABABABABAB, 0x5454545454545454):
            words = [outputs[i].view(f"u{outputs[i].itemsize}") for i in left]
            marks = [w.dtype.type(pattern & (1 << 8 * w.itemsize) - 1) for w in words]
            for word, mark in zip(words, marks, strict=True):
                word[...] = mark
            self._expect_outputs(call(), outputs)
            held = zip(left, words, marks, strict=True)
            left = [i for i, word, mark in held if word.size and (word == mark).all()]
            if not left:
                return
        raise self._unfilled(f"left its output {left[0] + 1} as it was")

    def _unfilled(self, what: str) -> TypeError:
        code = self.function.__code__
        return TypeError(
            f"{self.op} ({code.co_filename}:{code.co_firstlineno}) {what}: a function of"
            " af.numpy_op fills the arrays that it gets for its outputs, as in y[...] = x + 1"
        )


def _read_only(array: Array) -> Array:
    """Return a view that refuses to be written: others read the same bytes."""
    view = array.view()
    view.flags.writeable = False
    return view
