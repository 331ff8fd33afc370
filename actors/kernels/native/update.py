"""Updates of variables in C (`update.c`): one pass over parameter, gradient and moments.

The formulas are those of the numpy kernels; results differ by rounding at most. The outputs may lie
over the inputs. A last operand `skip` that is not 0 leaves all as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.kernels import cost
from actors.kernels.attributes import flag, number
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, Workspace
from actors.kernels.native import chunks, runtime
from actors.kernels.native.axes import Axis, rows_and_columns
from actors.kernels.native.launch import Word, address, native_launch
from actors.kernels.work import NATIVE_CALLS, BytePass, Work
from actors.protocol import Array, Arrays, Launch
from compiler.errors import InternalError
from compiler.types import DType, contiguous_strides

_FORMS = ("sgd_update", "momentum_update", "adamw_update", "accumulate")
"""The algorithms of update.c, in its order."""

_TYPES = (DType.FLOAT32, DType.FLOAT64)
_TILE = (32, 64)


@dataclass(frozen=True, slots=True)
class UpdateKernel:
    """An optimizer's update, or a sum over batches.

    `num_states` tensors follow the gradient among the inputs and the parameter among the outputs;
    the scalars come last: rate, step, and whether to skip, which is optional.
    """

    op: str
    num_states: int
    factors: Callable[[Attrs], tuple[float, float, float, float]]
    has_rate: bool = True
    has_step: bool = False

    @property
    def name(self) -> str:
        """Name in the plan."""
        return f"c.{self.op}"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take float32 and float64; all dense but the gradient, which may be transposed."""
        param, grad = inputs[:2]
        states = inputs[2 : 2 + self.num_states]
        is_float = runtime.is_on() and param.type.dtype in _TYPES
        if not is_float or not all([x.is_dense for x in (param, *states, *outputs)]):
            return None
        if _walk_of(param.shape, grad.strides_bytes, param.dtype.itemsize) is None:
            return None
        moved = sum([x.type.size_bytes for x in (grad, *outputs)])
        pairs = ((0, 0), *[(1 + i, 2 + i) for i in range(self.num_states)])
        work = Work(NATIVE_CALLS, passes=((BytePass.SIMPLE, float(moved)),))
        return cost.needs(inputs, outputs, work, in_place=pairs)

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one launch."""
        param, grad = inputs[:2]
        found = _walk_of(param.shape, grad.strides, param.itemsize)
        if found is None:
            raise InternalError(f"{self.name} was bound to a gradient that it does not take")
        rows, columns = found
        item = param.itemsize
        height, width = (1, chunks.RUN_BYTES // item) if columns.steps[1] == item else _TILE
        blocks = -(-rows.extent // height) * -(-columns.extent // width)
        moved = sum([x.size * item for x in (*inputs, *outputs)])
        nothing: list[Array | None] = [None] * (2 - self.num_states)
        news = [*outputs, *nothing]
        olds = [param, *inputs[2 : 2 + self.num_states], *nothing]
        scalars = inputs[2 + self.num_states :]
        step = int(self.has_rate)
        skip = step + self.has_step
        words: list[Word] = [
            2 * _FORMS.index(self.op) + _TYPES.index(DType(param.dtype.name)),
            *[address(x) for x in (*news, *olds, grad)],
            *(rows.extent, columns.extent, rows.steps[1] // item, columns.steps[1] // item),
            *(width, blocks, chunks.units_per_chunk(blocks, moved), runtime.num_threads()),
            address(scalars[0]) if self.has_rate else 0,
            address(scalars[step]) if self.has_step else 0,
            address(scalars[skip]) if len(scalars) > skip else 0,
            *self.factors(attrs),
            *(0.0, 0.0, 0.0, 0),  # what a launch computes first
        ]
        where = runtime.address_in("update.c", "af_update")
        return native_launch(where, words, (inputs, outputs))


def _walk_of(shape: tuple[int, ...], grad: tuple[int, ...], item: int) -> tuple[Axis, Axis] | None:
    """Return rows and columns of a dense tensor and its gradient; None where they are more."""
    dense = contiguous_strides(shape, item)
    return rows_and_columns(shape, (dense, grad), item, in_order=True)


def _sgd(attrs: Attrs) -> tuple[float, float, float, float]:
    return 0.0, 0.0, 0.0, number(attrs, "weight_decay")


def _momentum(attrs: Attrs) -> tuple[float, float, float, float]:
    is_nesterov = float(flag(attrs, "nesterov"))
    return number(attrs, "momentum"), is_nesterov, 0.0, number(attrs, "weight_decay")


def _adamw(attrs: Attrs) -> tuple[float, float, float, float]:
    betas = number(attrs, "beta1"), number(attrs, "beta2")
    return *betas, number(attrs, "eps"), number(attrs, "weight_decay")


def _accumulate(attrs: Attrs) -> tuple[float, float, float, float]:
    return number(attrs, "every"), 0.0, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class NativeIncrement:
    """`increment`(step, by) -> step + by; 1 where `by` is left out."""

    name: str = "c.increment"
    op: str = "increment"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every call."""
        if not runtime.is_on():
            return None
        return cost.needs(inputs, outputs, Work(NATIVE_CALLS), in_place=((0, 0),))

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return one addition."""
        where = runtime.address_in("update.c", "af_increment")
        step, *by = inputs
        words = [address(outputs[0]), address(step), address(by[0]) if by else 0]
        return native_launch(where, words, (inputs, outputs))


NATIVE_UPDATE_KERNELS = (
    NativeIncrement(),
    UpdateKernel("sgd_update", 0, _sgd),
    UpdateKernel("momentum_update", 1, _momentum),
    UpdateKernel("adamw_update", 2, _adamw, has_step=True),
    UpdateKernel("accumulate", 0, _accumulate, has_rate=False, has_step=True),
)
