"""Attention and convolutions by the graphs of cuDNN's frontend, which `cudnn_graphs` makes.

A graph is made and checked without a GPU; plans and runs need one.

The package is imported when the first graph is made, and nowhere else.

Names: nvidia-cudnn-frontend 1.32, cuDNN 9.25 and later.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from actors.device.cuda.cudnn_graphs import UnknownGraph, graph_of
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.cudnn_records import ConvCall, CudnnCall, SdpaCall
from actors.kernels.cuda.libraries import find_library
from compiler.errors import DeviceError
from compiler.types import DType

PACKAGE = "cudnn"
_BINDINGS = "cuda.bindings"
_LIBRARY = "libcudnn.so.9"
_BESIDE = ("libcudart.so.13", _LIBRARY)
"""What the frontend loads by name, and finds in the folder of its own environment alone."""

OLDEST_CUDNN = (9, 25)
"""What adds up the gradient of the queries in order, on Hopper, without keeping all scores."""

INSTALL = (
    "python -m pip install 'actorflow[cudnn]', or compile the job again with ACTORFLOW_CUDNN=0,"
    " which takes kernels of ours"
)

_BARRED = (
    "NONDETERMINISTIC",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
"""A run can be repeated bit by bit, and sums are those of a product in float32: a transform loses
digits of them."""

_NOT_SUPPORTED = 3000
"""CUDNN_STATUS_NOT_SUPPORTED."""

_EXECUTION_FAILED = 5000
_SCORES_LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"
"""Bytes of scores that a gradient may keep in scratch. At 0 the frontend adds up dq in order on
Hopper; else it would keep all scores, which no workspace of ours has room for."""


@dataclass(frozen=True, slots=True)
class CudnnChoice:
    """A graph whose plan is built, and what it wants."""

    graph: Any
    workspace_bytes: int


class Cudnn:
    """The library. Graphs may be made by any thread; a handle is for one GPU and one thread."""

    def __init__(self) -> None:
        """Import it. Raises DeviceError where there is none."""
        nvrtc.is_here()  # cuDNN compiles kernels, and looks for it by name, too
        for name in _BESIDE:
            with suppress(OSError):  # then the frontend says what it misses
                ctypes.CDLL(find_library(name))
        try:
            self._cudnn = importlib.import_module(PACKAGE)
        except ImportError as error:
            raise DeviceError(f"the package of cuDNN is missing: {INSTALL} ({error})") from error
        self._handle: Any = None

    def open(self) -> None:
        """Make the handle for the GPU that is current in this thread. Raises CudaError."""
        with _told("cudnnCreate", _EXECUTION_FAILED, "cuDNN cannot be opened"):
            self._handle = self._cudnn.create_handle()

    def close(self) -> None:
        """Give the handle back."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._cudnn.destroy_handle(handle)

    def describe(self, call: CudnnCall) -> Any:
        """Return the library's graph of a call, validated as far as that needs no GPU.

        Raises CudaError where the library refuses it, UnknownGraph where it holds something else.
        """
        with _told("cudnnGraphValidate", _NOT_SUPPORTED, f"cuDNN refuses {call.about}"):
            graph = graph_of(self._cudnn, self._handle, call)
            # Of convolutions the library itself decides, for the GPU of a handle.
            if self._handle is not None or isinstance(call, SdpaCall):
                graph.validate()
        return graph

    def choose(self, call: CudnnCall, workspace_bytes: int) -> CudnnChoice:
        """Return how to compute a call in so much workspace. Raises CudaError where nothing fits.

        It is the first plan of the library's own that fits and adds up in order: nothing is timed.
        """
        cudnn, graph = self._cudnn, self.describe(call)
        what = (
            f"cuDNN has no way to compute {call.about} within {workspace_bytes:,} bytes of"
            " workspace; compile the job with ACTORFLOW_CUDNN=0, which takes kernels of ours"
        )
        with _told("cudnnGraphBuild", _NOT_SUPPORTED, what), _no_scores_kept():
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_engines(self._compiled_here(graph))
            if isinstance(call, ConvCall):
                graph.deselect_numeric_notes(self._barred(call))
            graph.deselect_workspace_greater_than(workspace_bytes)
            graph.check_support()
            graph.build_plans()
            needed = int(graph.get_workspace_size())
            if needed > workspace_bytes:
                raise RuntimeError(f"it needs {needed:,}")
        return CudnnChoice(graph, needed)

    def run(
        self, choice: CudnnChoice, addresses: tuple[int, ...], workspace: int, stream: int
    ) -> None:
        """Put a call on a stream. Raises CudaError."""
        with _told("cudnnBackendExecute", _EXECUTION_FAILED, "a call of cuDNN failed"):
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            places = dict(enumerate(addresses, 1))
            choice.graph.execute(places, workspace, handle=self._handle)

    def _barred(self, call: ConvCall) -> list[Any]:
        """Return notes of plans that round or order sums otherwise than products of ours do."""
        notes = self._cudnn.numerical_note
        # On float32 tensor cores compute in TF32.
        of_type = ("TENSOR_CORE",) if call.tensors[0].dtype is DType.FLOAT32 else ()
        return [getattr(notes, name) for name in (*_BARRED, *of_type)]

    def _compiled_here(self, graph: Any) -> list[str]:
        """Return the names of plans that a compiler in Python would make, which none of ours is."""
        ids = importlib.import_module(f"{PACKAGE}.engines.engine_ids")
        return [
            graph.get_plan_name_at_index(index).partition("[")[0]
            for index, plan in enumerate(graph.plans)
            if ids.is_python_engine(plan.engine_id)
        ]


def is_installed() -> bool:
    """Whether graphs can be made: the package can be found. It is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def can_run() -> bool:
    """Whether plans can be made here."""
    return not why_not()


def why_not() -> str:
    """Return what of cuDNN is missing to make plans here, or too old; no package is imported."""
    try:
        has_bindings = importlib.util.find_spec(_BINDINGS) is not None
    except ModuleNotFoundError:  # not even its parent
        has_bindings = False
    if not (is_installed() and has_bindings):
        return "its packages are missing"
    found = _version()
    if found is None:
        return f"the library itself ({_LIBRARY}) is missing"
    if found < OLDEST_CUDNN:
        return f"the one here is {_dotted(found)}, older than {_dotted(OLDEST_CUDNN)}"
    return ""


@functools.cache
def _version() -> tuple[int, int] | None:
    """Return the version of the library itself; None where there is none."""
    try:
        ask = ctypes.CDLL(find_library(_LIBRARY)).cudnnGetVersion
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_size_t
    return divmod(int(ask()) // 100, 100)  # 92801 is 9.28.1


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@contextmanager
def _told(call: str, code: int, what: str) -> Iterator[None]:
    """Turn what the frontend raises, which is of many types, into CudaError."""
    try:
        yield
    except (CudaError, UnknownGraph):
        raise
    except Exception as error:
        raise CudaError(f"{what}: {type(error).__name__}: {error}", code=code, call=call) from error


@contextmanager
def _no_scores_kept() -> Iterator[None]:
    """Let the frontend keep no scores in scratch while it builds a plan."""
    kept = os.environ.get(_SCORES_LIMIT)
    os.environ[_SCORES_LIMIT] = "0"
    try:
        yield
    finally:
        if kept is None:
            del os.environ[_SCORES_LIMIT]
        else:
            os.environ[_SCORES_LIMIT] = kept
