"""A kernel of a CUDA device: planned from shapes, described at load as calls on addresses.

Planning needs no GPU: all that is known of one (`Gpu`) is the file of numbers beside this file.
Addresses come as `DeviceView`s. A bad index is reported in a cell, and the host raises its error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from actors.kernels.common.kernel import (
    Kernel,
    KernelPlan,
    Operand,
    Piece,
    is_dense,
    size_bytes,
)
from actors.kernels.common.strides import MAX_OUTER, collapse_axes, columns_of
from actors.kernels.cuda.calls import LaunchCalls, StatusWord
from actors.machine.protocol import Array
from compiler.contract.codec import from_json
from compiler.contract.errors import InternalError, bad_index
from compiler.contract.types import DType, TensorType, numpy_dtype

# Rates are of the device as it is sold, or measured where the file says so; the planner compares
# what they give, and a simulated step is made of them.

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. `name` is what the user calls it, `says` what its driver calls it.

    `arch` is the one that kernels are compiled for ("sm_90a"), `capability` its number. A team of
    threads that meet without a barrier has `warp` of them. `bytes_per_ns` is of its own memory,
    read and written by a copy; `narrow_rates` are the shares of it that our kernels reach, by the
    bytes that a thread moves at a time; `product_flops_per_ns` is of products, by element type;
    `flops_per_ns` of what is no product, in float32. `call_ns` is what a kernel inside of a graph
    costs beside its work, `latency_ns` what a thread waits for memory, `event_ns` a wait of one
    stream for another, and `link` what goes to the host and back.
    """

    name: str
    says: str
    arch: str
    capability: tuple[int, int]
    num_sms: int
    warp: int
    threads_per_sm: int
    shared_bytes: int
    memory_bytes: int
    l2_bytes: int
    bytes_per_ns: float
    l2_bytes_per_ns: float
    narrow_rates: Mapping[int, float]
    flops_per_ns: float
    product_flops_per_ns: Mapping[str, float]
    call_ns: float
    latency_ns: float
    event_ns: float
    link_bytes_per_ns: float
    link_latency_ns: float

    def bytes_ns(self, size_bytes: float) -> float:
        """Return the time to move bytes, from the cache where they would fit into it."""
        rate = self.l2_bytes_per_ns if size_bytes <= self.l2_bytes / 2 else self.bytes_per_ns
        return size_bytes / rate

    def narrowness(self, access_bytes: int) -> float:
        """Return how many times as long as by a copy bytes take that are moved so many at once."""
        return 1 / self.narrow_rates[min(access_bytes, max(self.narrow_rates))]

    def product_ns(self, dtype: DType, flops: float) -> float:
        """Return the time of products at the best rate of the library."""
        rates = self.product_flops_per_ns
        return flops / rates.get(dtype.value, rates["float32"])

    @property
    def fingerprint(self) -> str:
        """Everything that plans depend on."""
        return f"{self.name}-{self.arch}-{self.num_sms}"


def known_gpus() -> tuple[str, ...]:
    """Return the names of all GPUs that there is a description of, sorted."""
    return tuple(sorted([path.stem for path in _HERE.glob("*.json")]))


@functools.lru_cache(maxsize=16)
def gpu_named(name: str) -> Gpu:
    """Return the description of a GPU. Raises LookupError, which names those that there are."""
    gpus = known_gpus()
    if name not in gpus:
        raise LookupError(f"no GPU is called {name!r}; there are descriptions of {', '.join(gpus)}")
    return described_gpu((_HERE / f"{name}.json").read_bytes())


def described_gpu(text: bytes) -> Gpu:
    """Return the GPU that a description in JSON is of."""
    description = from_json(text)
    description["capability"] = tuple(description["capability"])
    rates = description["narrow_rates"].items()
    description["narrow_rates"] = {int(size): rate for size, rate in rates}
    return Gpu(**{field.name: description[field.name] for field in fields(Gpu)})


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A tensor in the memory of a device, at an address, with strides in bytes."""

    address: int
    type: TensorType
    strides_bytes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.type.dtype

    @property
    def is_dense(self) -> bool:
        """Whether the bytes are those of a row-major copy."""
        return is_dense(self.shape, self.strides_bytes, self.dtype.itemsize)

    @property
    def as_operand(self) -> Operand:
        """The view as a plan sees it; its offset is 0."""
        return Operand(self.type, 0, self.strides_bytes)


PlacedView = DeviceView | Array
"""What a kernel of a device binds: memory of the device, or pinned memory of the host."""

PlacedViews = tuple[PlacedView, ...]
DeviceViews = tuple[DeviceView, ...]


def address_of(view: PlacedView) -> int:
    """Return where the first element lies, as the device sees it."""
    return view.address if isinstance(view, DeviceView) else int(view.ctypes.data)


def on_device(views: tuple[PlacedView, ...]) -> DeviceViews:
    """Return views of what lies on the device. Raises InternalError for an array of the host."""
    device_views = tuple([view for view in views if isinstance(view, DeviceView)])
    if len(device_views) != len(views):
        raise InternalError(
            "a kernel that works on a device's memory is given an array of the host"
        )
    return device_views


def carve(workspace: DeviceView | None, pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Return the address of each piece in a workspace; 0 for one without bytes.

    Raises InternalError where the workspace is too small.
    """
    needed = size_bytes(pieces)
    size = 0 if workspace is None else workspace.type.size_bytes
    if size < needed:
        raise InternalError(f"a kernel needs {needed} bytes of workspace and got {size}")
    addresses, place = [], 0 if workspace is None else workspace.address
    for piece in pieces:
        addresses.append(place if math.prod(piece.shape) else 0)
        place += piece.size_bytes
    return tuple(addresses)


Scratch = DeviceView | None
"""Planned scratch of a launch: a dense vector of uint8; None where a call needs none."""

BindToViews = Callable[[PlacedViews, PlacedViews, Scratch], LaunchCalls]
"""Gives the calls of a launch in order. Only a copy between places meets arrays of the host."""

CudaPlan = KernelPlan[BindToViews]

CudaKernel = Kernel[BindToViews]
"""One way to compute an op on a GPU; made for one description of it (`Gpu`).

Grid and scratch follow from shapes and the description alone: so a launch gives the same bits on
every card of an architecture, and a plan is the same wherever it is made.
"""


def operand_of(view: PlacedView, type_: TensorType) -> Operand:
    """Return a tensor of a type as a plan sees it, without its address."""
    strides = view.strides_bytes if isinstance(view, DeviceView) else view.strides
    return Operand(type_, 0, strides)


# No kernel addresses memory by an index that it has not compared with its extent: on a device that
# would end the process.


def status_of(
    word: int, what: str, indices: TensorType, extent: int, axes: tuple[int, ...] = ()
) -> StatusWord:
    """Return how a launch tells of an index outside 0..extent - 1.

    `word` of the argument block is where the cell's address goes. The kernel reports the number of
    the index in row-major order, and its value as the int64 of the same bits. `axes`: see
    `bad_index`.
    """
    return StatusWord(word, partial(_explain, what, indices, extent, axes))


def _explain(
    what: str,
    indices: TensorType,
    extent: int,
    axes: tuple[int, ...],
    place: int,
    value: int,
) -> IndexError:
    position = tuple([int(axis) for axis in np.unravel_index(place, indices.shape)])
    # The cell holds a signed word.
    wraps = numpy_dtype(indices.dtype) == np.uint64 and value < 0
    return bad_index(what, value + (1 << 64 if wraps else 0), position, extent, axes)


def are_ids(ids: Operand) -> bool:
    """Whether indices are integers whose places a kernel can walk, and count in 31 bits."""
    axes = collapse_axes(ids.shape, (ids.strides_bytes,), in_order=True)
    is_walked = len(axes) <= MAX_OUTER and ids.type.num_elements < 1 << 31
    return ids.type.dtype.is_integer and is_walked


def ids_words(ids: DeviceView) -> list[int]:
    """Return indices as kernels have them: address, type, number, and their places."""
    is_unsigned = ids.dtype.value.startswith("u")
    # 0 to 7: the logarithm of the size, and the sign; the order in which kernels switch.
    type_ = 2 * (ids.dtype.itemsize.bit_length() - 1) + is_unsigned
    return [ids.address, type_, ids.type.num_elements, *places_words(ids.shape, ids.strides_bytes)]


def places_words(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return how the elements of axes lie in row-major order: how many axes, extents and steps."""
    return columns_of(collapse_axes(shape, (strides,), in_order=True), 1)
