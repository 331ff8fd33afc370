"""What a launch asks of a CUDA device: a closed set of calls, as data.

A kernel's `bind` returns the calls of its launch, in order; the device puts them on a stream, and
records them into a graph. A call allocates nothing and waits for nothing.

**Kernel texts.** A text is C that NVRTC takes as CUDA C++ and a C compiler takes behind a header
that emulates threads; `device.cuh` defines the words of both. Its kernels are declared

    typedef struct { af_word w[16]; } NAME_arguments;
    AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) { const af_word *a = arguments.w; ... }

with one argument, a struct of 64-bit words that is passed by value, so that a text serves every
shape. No text uses atomics on floats: what a kernel computes does not depend on the order in which
its blocks run.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from actors.kernels.cuda.cudnn_records import CudnnCall
from actors.kernels.cuda.product import LtProduct

Word = int | float
"""An entry of an argument block: an integer or an address, or a double by its bits."""


@dataclass(frozen=True, slots=True)
class KernelText:
    """The text of some kernels, and their names in it. `about` says to a person what they do.

    Where the text says NAME, its own name is put: it follows from the content. `has_exchanges`:
    threads of a block meet in it, at a barrier or in a shuffle.
    """

    text: str
    kernels: tuple[str, ...]
    about: str = ""
    has_exchanges: bool = True

    @staticmethod
    def of(
        prefix: str, text: str, kernels: tuple[str, ...], about: str, *, has_exchanges: bool = True
    ) -> KernelText:
        """Return a text whose names begin with its own, which replaces NAME in all of them."""
        digest = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
        own = f"{prefix}_{digest}"
        names = tuple([name.replace("NAME", own) for name in kernels])
        return KernelText(text.replace("NAME", own), names, about, has_exchanges)


Explain = Callable[[int, int], Exception]
"""From the place and the value of a bad index to the error that the host would raise."""


@dataclass(frozen=True, slots=True)
class StatusWord:
    """Where in an argument block a kernel finds the cell in which it reports a bad index.

    The device puts the cell's address into `word` of the block. `af_report(cell, place, value)`
    keeps the lowest place of the earliest firing, where all bools of `guards` have their values:
    pairs of an address on the device, and 0 or 1.
    """

    word: int
    explain: Explain
    guards: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RunKernel:
    """One kernel on a grid of blocks. `words` are its argument block."""

    text: KernelText
    name: str
    num_blocks: int
    num_threads: int
    words: tuple[Word, ...]
    shared_bytes: int = 0
    status: StatusWord | None = None


@dataclass(frozen=True, slots=True)
class CopyBytes:
    """Bytes from one address to another, of the device or of pinned memory."""

    target: int
    source: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FillBytes:
    """Every byte of a range set to one value."""

    target: int
    value: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RunProduct:
    """A matrix product of the library, on operands at these addresses; `workspace` may be 0."""

    product: LtProduct
    a: int
    b: int
    c: int
    d: int
    workspace: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class RunCudnn:
    """A call of cuDNN; `addresses` are its tensors', in the order of the record."""

    record: CudnnCall
    addresses: tuple[int, ...]
    workspace: int
    workspace_bytes: int


DeviceCall = RunKernel | CopyBytes | FillBytes | RunProduct | RunCudnn
DeviceCalls = tuple[DeviceCall, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Several ways to do the same, of which the device takes one: the fastest, measured at load.

    The first is the one to take where nothing is measured. A way of which a library does not
    compute a call is left out; all write the same memory, and none of them reports bad indices.
    """

    ways: tuple[DeviceCalls, ...]


LaunchCalls = tuple[DeviceCall | OneOf, ...]
"""What `bind` returns: the calls of a launch, in order."""


def every_call(calls: LaunchCalls) -> Iterator[DeviceCall]:
    """Yield the calls, those of all ways among them."""
    for call in calls:
        if isinstance(call, OneOf):
            yield from itertools.chain(*call.ways)
        else:
            yield call
