"""Elementwise kernels written as tables of steps.

A recipe is a tuple of steps `(function, operands, target)`, one pass over a block each:

- "a", "b", "c": the inputs; "out", and "out2" where there are two: the outputs, of one type, each
  written by one of the last steps, behind which no step reads an input, which makes it safe to
  lay an output over any input of the same type;
- "t", "u", "v", "w": scratch of the output's type; "mask": scratch of booleans; "zeros": a block of
  zeros;
- a suffix ":bits" sees the same bytes as signed integers, for selections that multiply nothing (0
  * inf);
- a number is a constant of the output's type.

A recipe of one step is one call on the whole tensor. A longer one is bound block by block (see
`blocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.interpret.blocks import block_elements, cut, expand, num_elements
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, equal_operands, in_sequence
from actors.kernels.scratch import Piece
from actors.kernels.work import Pass, Work, broadcast_strides, over_blocks, over_operands
from actors.protocol import Array, Launch
from compiler.types import DType

Step = tuple[Callable[..., Any], tuple[str | float, ...], str]
Recipe = tuple[Step, ...]

_INPUTS = ("a", "b", "c")
_OUTPUTS = ("out", "out2")
_SCRATCH = ("t", "u", "v", "w", "zeros", "mask")
_SORTS: dict[Callable[..., Any], Pass] = {
    np.divide: Pass.DIVIDE,
    np.reciprocal: Pass.DIVIDE,
    np.sqrt: Pass.ROOT,
    np.exp: Pass.EXP,
    np.log: Pass.EXP,
    np.tanh: Pass.TANH,
    np.power: Pass.POWER,
    np.sin: Pass.POWER,
    np.cos: Pass.POWER,
}
_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class RecipeKernel:
    """An elementwise kernel.

    `accepts` are the dtypes of the inputs, equal among each other; with `has_condition` input 0
    is boolean and the rest are equal. Inputs broadcast; all operands may be strided.
    """

    op: str
    recipe: Recipe
    accepts: frozenset[DType]
    has_condition: bool = False

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"numpy.{self.op}"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take calls with the accepted dtypes; scratch is at most one block per name."""
        if not self._takes(tuple([operand.type.dtype for operand in inputs])):
            return None
        out = outputs[0]
        return cost.needs(
            inputs,
            outputs,
            _work(self.recipe, (*inputs, out)),
            scratch.size_bytes(_pieces(self.recipe, num_elements(out.shape), out.dtype)),
            _in_place(outputs, inputs),
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return one call, or the steps of every block in order."""
        return bind_recipe(self.recipe, inputs, outputs, workspace)

    def _takes(self, dtypes: tuple[DType, ...]) -> bool:
        if self.has_condition:
            if dtypes[0] is not DType.BOOL:
                return False
            dtypes = dtypes[1:]
        return dtypes[0] in self.accepts and all(dtype is dtypes[0] for dtype in dtypes)


def _in_place(
    outputs: tuple[Operand, ...], inputs: tuple[Operand, ...]
) -> tuple[tuple[int, int], ...]:
    return tuple([pair for i in range(len(outputs)) for pair in equal_operands(i, outputs, inputs)])


def _work(recipe: Recipe, operands: tuple[Operand, ...]) -> Work:
    out = operands[-1]
    if len(recipe) > 1:
        sorts = Counter([_sort(step) for step in recipe])
        return over_blocks(num_elements(out.shape), out.dtype.itemsize, sorts)
    strides = [broadcast_strides(x.shape, x.strides_bytes, out.shape) for x in operands]
    sizes = [x.dtype.itemsize for x in operands]
    return over_operands(out.shape, strides, sizes, _SORTS.get(recipe[0][0]))


def _sort(step: Step) -> Pass:
    function, operands, _ = step
    arrays = {operand for operand in operands if isinstance(operand, str)}
    return _SORTS.get(function, Pass.PLAIN if len(arrays) > 1 else Pass.SIMPLE)


def bind_recipe(
    recipe: Recipe, inputs: tuple[Array, ...], outputs: tuple[Array, ...], workspace: Array | None
) -> Launch:
    """Return the launch of a recipe on these arrays."""
    out = outputs[0]
    constants = _constants(recipe, out.dtype if out.dtype != np.bool_ else inputs[0].dtype)
    if len(recipe) == 1 and not _scratch_names(recipe):
        names = dict(zip(_INPUTS, inputs, strict=False)) | {"out": out}
        return _bind_step(recipe[0], names, constants)
    pieces = _pieces(recipe, num_elements(out.shape), out.dtype)
    flat = dict(zip(_scratch_names(recipe), scratch.carve(workspace, pieces), strict=True))
    calls: list[Launch] = []
    if "zeros" in flat:
        calls.append(partial(flat["zeros"].fill, 0))
    operands = (*outputs, *expand(inputs, out.shape))
    for block in cut(operands, out.ndim, block_elements(out.dtype.itemsize)):
        names = {name: scratch.window(array, block[0].shape) for name, array in flat.items()}
        names |= dict(zip(_OUTPUTS, block[: len(outputs)], strict=False))
        names |= dict(zip(_INPUTS, block[len(outputs) :], strict=False))
        calls += [_bind_step(step, names, constants) for step in recipe]
    return in_sequence(calls)


def _bind_step(step: Step, names: dict[str, Array], constants: dict[float, Array]) -> Launch:
    function, operands, target = step
    arrays = [
        _operand(names, operand) if isinstance(operand, str) else constants[operand]
        for operand in operands
    ]
    out = _operand(names, target)
    if function is np.copyto:
        return partial(np.copyto, out, arrays[0], casting="unsafe")
    return partial(function, *arrays, out=out)


def _operand(names: dict[str, Array], text: str) -> Array:
    name, _, view = text.partition(":")
    array = names[name]
    return array.view(_BITS[array.dtype.itemsize]) if view else array


def _constants(recipe: Recipe, dtype: np.dtype[np.generic]) -> dict[float, Array]:
    """Return 0-d arrays: a Python number as operand would build one at every call."""
    values = {
        value for _, operands, _ in recipe for value in operands if not isinstance(value, str)
    }
    return {value: np.array(value, dtype) for value in sorted(values)}


def _texts(recipe: Recipe) -> Iterator[str]:
    for _, operands, target in recipe:
        for text in (*operands, target):
            if isinstance(text, str):
                yield text.partition(":")[0]


def _scratch_names(recipe: Recipe) -> tuple[str, ...]:
    used = set(_texts(recipe))
    return tuple([name for name in _SCRATCH if name in used])


def _pieces(recipe: Recipe, elements: int, dtype: np.dtype[np.generic]) -> tuple[Piece, ...]:
    shape = (min(elements, block_elements(dtype.itemsize)),)
    return tuple(
        [
            Piece(shape, np.dtype(np.bool_) if name == "mask" else dtype)
            for name in _scratch_names(recipe)
        ]
    )
