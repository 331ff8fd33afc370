"""Calls of cuBLASLt and cuDNN on the host: numpy computes what a record of a call says.

Where the library is installed the record is what its own descriptors or graphs say, read back: they
can be made without a GPU. Operands are checked before a call, and guards after it.

Epilogues of products are cuBLASLt's. A bias has an entry for each row of d, in d's element type
where it says no other, and lies dense; aux is a matrix like d with a stride of its own. BIAS adds
the bias, GELU is the tanh form of what was added, GELU_AUX and GELU_AUX_BIAS also store what goes
into it. DGELU multiplies by the slope of GELU at aux, and DGELU_BGRAD puts the sums of d's rows
into the bias. BGRAD_A and BGRAD_B put there the sums of op(a) and op(b) over the inner extent.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actors.device.cuda import cudnn
from actors.device.cuda.cublaslt import LIBRARY, CublasLt
from actors.device.cuda.cudnn import read_back
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import (
    AUX_BYTES,
    AUX_ELEMENTS,
    CONV,
    CONV_INPUT_GRAD,
    ConvCall,
    CudnnCall,
    CudnnTensor,
    LtEpilogue,
    LtLayout,
    LtProduct,
    SdpaCall,
)
from actors.kernels.cuda.nvrtc import find_library
from actors.machine.protocol import Array
from actors.testing.emulated.memory import INVALID_VALUE, EmulatedMemory
from compiler.contract.types import DType, numpy_dtype

MISALIGNED_ADDRESS = 716
_WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LibraryOperand:
    """Bytes that a call of a library reads or writes."""

    name: str
    address: int
    size_bytes: int
    alignment: int

    def lies_over(self, other: LibraryOperand) -> bool:
        """Whether any byte is of both."""
        return (
            self.address < other.address + other.size_bytes
            and other.address < self.address + self.size_bytes
        )

    def __str__(self) -> str:
        rule = f"should lie at a multiple of {self.alignment}"
        return f"{self.name} of a library's call, which {rule},"


@contextmanager
def library_call(
    memory: EmulatedMemory,
    call: str,
    operands: Sequence[LibraryOperand],
    workspace: tuple[int, int],
    *,
    is_over: bool,
) -> Iterator[None]:
    """Make a call whose result may not lie over an operand (`is_over`). Raises CudaError.

    `workspace` is an address, 0 for none, and its bytes, which are full of 0xFF afterwards.
    """
    place, size_bytes = workspace
    scratch = LibraryOperand("the workspace", place, size_bytes, _WORKSPACE_ALIGNMENT)
    for operand in (*operands, *([scratch] if place else [])):
        if operand.address % operand.alignment:
            message = f"{operand} lies at {operand.address:#x}"
            raise CudaError(message, code=MISALIGNED_ADDRESS, call=call)
        memory.expect(operand.address, operand.size_bytes)
    if is_over:
        message = "a result of a library's call lies over an operand"
        raise CudaError(message, code=INVALID_VALUE, call=call)
    yield
    if place:
        ctypes.memset(place, 0xFF, size_bytes)
    memory.check_guards(call)


Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]

_WITH_BIAS = (LtEpilogue.BIAS, LtEpilogue.GELU_BIAS, LtEpilogue.GELU_AUX_BIAS)
_WITH_AUX = (LtEpilogue.GELU_AUX, LtEpilogue.GELU_AUX_BIAS)
_WITH_GELU = (LtEpilogue.GELU, LtEpilogue.GELU_BIAS, *_WITH_AUX)
_WITH_SLOPE = (LtEpilogue.DGELU, LtEpilogue.DGELU_BGRAD)
_INVALID = 7
"""cuBLAS's status of an invalid value."""

_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


def described_product(product: LtProduct, workspace_bytes: int) -> LtProduct:
    """Return a product as the library's descriptors say it; as it is where there is no library.

    Raises CudaError for an aux that lies as the library does not take it.
    """
    if product.aux % AUX_BYTES or product.aux_stride % AUX_ELEMENTS:
        where = f"aux at {product.aux:#x}, columns {product.aux_stride} elements apart"
        raise CudaError(where, code=_INVALID, call="cublasLtMatmulAlgoGetHeuristic")
    library = _cublaslt()
    if library is None:
        return product
    return library.read_back(library.describe(product, workspace_bytes))


@functools.cache
def _cublaslt() -> CublasLt | None:
    try:
        return CublasLt(find_library(LIBRARY))
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class ChosenProduct:
    """A product that was checked, with the workspace that it may use."""

    product: LtProduct
    workspace_bytes: int

    def operands(self, a: int, b: int, c: int, d: int) -> tuple[LibraryOperand, ...]:
        """Return what a call with these addresses reads and writes."""
        product, parts = self.product, []
        sides = [("a", a, product.a), ("b", b, product.b), ("d", d, product.d)]
        sides += [("c", c, product.d)] if product.beta else []
        for name, address, layout in sides:
            size = layout.span_bytes(product.batch)
            parts.append(LibraryOperand(name, address, size, layout.alignment))
        if product.bias:
            size = _bias(product).nbytes
            parts.append(LibraryOperand("bias", product.bias, size, product.bias_type.itemsize))
        if product.aux:
            aux = replace(product.d, column_stride=product.aux_stride, batch_stride=0)
            size = aux.span_bytes(1)
            parts.append(LibraryOperand("aux", product.aux, size, AUX_BYTES))
        return tuple([operand for operand in parts if operand.size_bytes])

    def lies_over_itself(self, a: int, b: int, c: int, d: int) -> bool:
        """Whether the result lies over an operand other than c at the same place."""
        operands = {operand.name: operand for operand in self.operands(a, b, c, d)}
        out = operands.pop("d", None)
        if out is not None and c == d:
            operands.pop("c", None)
        return out is not None and any([other.lies_over(out) for other in operands.values()])


def run_product(product: LtProduct, a: int, b: int, c: int, d: int) -> None:
    """Compute a product on operands at these addresses."""
    work = np.float64 if product.compute is DType.FLOAT64 else np.float32
    left = _operand(product.a, product.batch, a, is_transposed=product.transpose_a, work=work)
    right = _operand(product.b, product.batch, b, is_transposed=product.transpose_b, work=work)
    out = np.matmul(left, right)
    if product.beta:
        out = out + product.beta * widened(_matrix(product.d, product.batch, c), product.d.dtype)
    epilogue = product.epilogue
    if epilogue in _WITH_BIAS:
        out = out + widened(_bias(product), product.bias_type)[:, None]
    if epilogue in _WITH_AUX:
        store(_aux(product), out, product.d.dtype)
    if epilogue in _WITH_GELU:
        out = 0.5 * out * (1 + np.tanh(_ROOT * (out + _CUBE * out**3)))
    if epilogue in _WITH_SLOPE:
        out = out * _gelu_slope(widened(_aux(product), product.d.dtype))
    if epilogue is LtEpilogue.DGELU_BGRAD:
        store(_bias(product), out.sum((0, 2)), product.bias_type)
    if epilogue is LtEpilogue.BGRAD_A:
        store(_bias(product), left.sum((0, 2)), product.bias_type)
    if epilogue is LtEpilogue.BGRAD_B:
        store(_bias(product), right.sum((0, 1)), product.bias_type)
    store(_matrix(product.d, product.batch, d), out, product.d.dtype)


def array_at(address: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return an array on memory at an address; strides are in elements, none of them negative."""
    type_ = numpy_dtype(dtype)
    if 0 in shape:
        return np.empty(shape, type_)
    size = sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)]) + 1
    memory = (ctypes.c_char * (size * type_.itemsize)).from_address(address)
    in_bytes = tuple([s * type_.itemsize for s in strides])
    return np.ndarray(shape, type_, memoryview(memory), 0, in_bytes)


def _matrix(layout: LtLayout, batch: int, address: int) -> Array:
    """Return [batch, rows, columns]."""
    shape = (batch, layout.rows, layout.columns)
    strides = (layout.batch_stride, 1, layout.column_stride)
    return array_at(address, layout.dtype, shape, strides)


def _operand(
    layout: LtLayout, batch: int, address: int, *, is_transposed: bool, work: type[np.floating[Any]]
) -> Floats:
    matrix = _matrix(layout, batch, address)
    matrix = matrix.swapaxes(1, 2) if is_transposed else matrix
    return widened(matrix, layout.dtype).astype(work, copy=False)


def _bias(product: LtProduct) -> Array:
    is_of_columns = product.epilogue is LtEpilogue.BGRAD_B
    size = product.d.columns if is_of_columns else product.d.rows
    return array_at(product.bias, product.bias_type, (size,), (1,))


def _aux(product: LtProduct) -> Array:
    """Return [1, rows, columns]: a batch has no aux of its own for each place."""
    d = product.d
    return array_at(product.aux, d.dtype, (1, d.rows, d.columns), (0, 1, product.aux_stride))


def widened(array: Array, dtype: DType) -> Floats:
    """Return the values as floats; those of 16 bits as float32."""
    if dtype is DType.BFLOAT16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32 if dtype is DType.FLOAT16 else array.dtype, copy=False)


def store(target: Array, values: Array, dtype: DType) -> None:
    """Fill an array of a type with values, rounded to the nearest."""
    with np.errstate(over="ignore"):
        target[...] = (
            _to_bfloat16(values) if dtype is DType.BFLOAT16 else values.astype(target.dtype)
        )


def _to_bfloat16(values: Array) -> Array:
    """Return the bits, rounded to the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _gelu_slope(x: Floats) -> Floats:
    t = np.tanh(_ROOT * (x + _CUBE * x**3))
    slope: Floats = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * x * x)
    return slope


# Fused attention is computed in float32. What the library does with NaN in a key that no query sees
# is not known here; in a product of numpy's, 0 * NaN is NaN.


def computed_attention(sdpa: SdpaCall, given: dict[str, Floats]) -> tuple[Floats, ...]:
    """Return the results of attention, or of its gradient."""
    return _gradient(sdpa, given) if sdpa.is_backward else _attention(sdpa, given)


def _attention(sdpa: SdpaCall, given: dict[str, Floats]) -> tuple[Floats, Floats]:
    scores = _scores(sdpa, given)
    most = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - most)
    sums = exponentials.sum(-1, keepdims=True)
    return exponentials / sums @ given["v"], most + np.log(sums)


def _gradient(sdpa: SdpaCall, given: dict[str, Floats]) -> tuple[Floats, Floats, Floats]:
    p = np.exp(_scores(sdpa, given) - given["lse"])
    dy, y = given["dy"], given["y"]
    slopes = dy @ given["v"].swapaxes(-1, -2) - (dy * y).sum(-1, keepdims=True)
    ds = sdpa.scale * p * slopes
    return ds @ given["k"], ds.swapaxes(-1, -2) @ given["q"], p.swapaxes(-1, -2) @ dy


def _scores(sdpa: SdpaCall, given: dict[str, Floats]) -> Floats:
    """Return scaled scores; those that are not seen are minus infinity."""
    scores: Floats = np.float32(sdpa.scale) * (given["q"] @ given["k"].swapaxes(-1, -2))
    if sdpa.causal:
        rows, columns = scores.shape[-2:]
        scores[..., ~np.tri(rows, columns, columns - rows, dtype=bool)] = -np.inf
    return scores


# Convolutions are computed in float32: one product for each element of the kernel.


def computed_convolution(call: ConvCall, given: dict[str, Floats]) -> tuple[Floats, ...]:
    """Return the result of a call."""
    image, weight, y = call.roles
    padded = np.zeros((*_grouped(image, call)[:3], *_spans(call)), np.float32)
    interior: Any = (..., *[slice(p, p + n) for p, n in _places(call)])
    by_group = np.zeros((call.groups, y.shape[1] // call.groups, *weight.shape[1:]), np.float32)
    rows = np.zeros(_grouped(y, call), np.float32)
    for target, tensor in ((padded[interior], image), (by_group, weight), (rows, y)):
        if tensor.name in given:
            target[...] = given[tensor.name].reshape(target.shape)
    for tap, window in _taps(call):
        if call.names == CONV:
            rows += np.einsum("ngc...,goc->ngo...", padded[window], by_group[tap])
        elif call.names == CONV_INPUT_GRAD:
            padded[window] += np.einsum("ngo...,goc->ngc...", rows, by_group[tap])
        else:
            part = padded[window]
            flat = [a.reshape(*a.shape[:3], -1) for a in (part, rows)]
            by_group[tap] = np.einsum("ngct,ngot->goc", *flat)
    arrays = {image.name: padded[interior], weight.name: by_group, y.name: rows}
    output = call.tensors[-1]
    return (arrays[output.name].reshape(output.shape),)


def _grouped(tensor: CudnnTensor, call: ConvCall) -> tuple[int, ...]:
    count, channels, *extents = tensor.shape
    return (count, call.groups, channels // call.groups, *extents)


def _spans(call: ConvCall) -> list[int]:
    """Return the extents of the image with its zeros, and what no window sees."""
    return [n + 2 * p for n, p in zip(call.roles[0].shape[2:], call.padding, strict=True)]


def _places(call: ConvCall) -> Iterator[tuple[int, int]]:
    """Yield where the image begins in that, and its extent."""
    return zip(call.padding, call.roles[0].shape[2:], strict=True)


def _taps(call: ConvCall) -> Iterator[tuple[Any, Any]]:
    """Yield the index of each element of the kernel, and of what all windows see there."""
    _, weight, y = call.roles
    for tap in np.ndindex(*weight.shape[2:]):
        window = [
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(tap, call.dilation, y.shape[2:], call.strides, strict=True)
        ]
        yield (..., *tap), (..., *window)


_ALIGNMENT = 16


def described_cudnn_call(call: CudnnCall) -> CudnnCall:
    """Return a call as the library's graph says it; as it is where there is no library."""
    library = _cudnn()
    if library is None:
        return call
    said = read_back(str(library.describe(call)))
    # Which way a gradient adds up is no part of a graph.
    is_kept = isinstance(call, SdpaCall) and call.keeps_scores
    return replace(said, keeps_scores=is_kept) if isinstance(said, SdpaCall) else said


def least_workspace_bytes(call: CudnnCall) -> int:
    """Return the workspace without which the library has no plan, as its frontend counts it.

    Of a gradient: 4 bytes a query, and that of all scores in tiles of 64 by 64 or dq in float32.
    """
    if not isinstance(call, SdpaCall) or not call.is_backward:
        return 0
    (batch, heads, rows, width), keys = call.tensors[0].shape, call.tensors[1].shape[2]
    tiled = 2 * math.ceil(rows / 64) * 64 * math.ceil(keys / 64) * 64
    return batch * heads * ((tiled if call.keeps_scores else 4 * rows * width) + 4 * rows)


@functools.cache
def _cudnn() -> cudnn.Cudnn | None:
    return cudnn.Cudnn() if cudnn.is_installed() else None


@dataclass(frozen=True, slots=True)
class ChosenCall:
    """A call that was checked, with the workspace that it may use."""

    call: CudnnCall
    workspace_bytes: int

    def operands(self, addresses: tuple[int, ...]) -> tuple[LibraryOperand, ...]:
        """Return what a call with these addresses reads and writes."""
        return tuple(
            [
                LibraryOperand(tensor.name, address, tensor.span_bytes, _ALIGNMENT)
                for tensor, address in zip(self.call.tensors, addresses, strict=True)
            ]
        )

    def lies_over_itself(self, addresses: tuple[int, ...]) -> bool:
        """Whether a result lies over an operand."""
        operands = self.operands(addresses)
        count = len(operands) - self.call.num_results
        pairs = itertools.product(operands[:count], operands[count:])
        return any([one.lies_over(other) for one, other in pairs])


def run_cudnn_call(call: CudnnCall, addresses: tuple[int, ...]) -> None:
    """Compute a call on tensors at these addresses."""
    views = {
        tensor.name: (tensor.dtype, array_at(address, tensor.dtype, tensor.shape, tensor.strides))
        for tensor, address in zip(call.tensors, addresses, strict=True)
    }
    count = len(call.tensors) - call.num_results
    inputs = {name: widened(views[name][1], views[name][0]) for name in call.names[:count]}
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(call, SdpaCall):
            results = computed_attention(call, inputs)
        else:
            results = computed_convolution(call, inputs)
    for name, values in zip(call.names[count:], results, strict=True):
        store(views[name][1], values, views[name][0])
