"""Fused attention by the graphs of cuDNN's frontend: a graph is made of a record, and read back.

A graph is made and checked without a GPU; plans and runs need one. The frontend takes keywords that
it does not know without a word, so a graph is believed only where what it holds is, by a list of
ours, the record that it was made of.

The package is imported when the first graph is made, and nowhere else.

Names: nvidia-cudnn-frontend 1.32, cuDNN 9.25 and later.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from actors.device.cuda.driver import CudaError
from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.libraries import find_library
from actors.kernels.cuda.sdpa import BACKWARD, FORWARD, Extents, SdpaCall, SdpaTensor
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
    " which composes attention of products"
)

_NOT_SUPPORTED = 3000
"""CUDNN_STATUS_NOT_SUPPORTED."""

_EXECUTION_FAILED = 5000
_TYPES = {
    DType.BFLOAT16: "data_type.BFLOAT16",
    DType.FLOAT16: "data_type.HALF",
    DType.FLOAT32: "data_type.FLOAT",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}

_PORTS = {
    FORWARD: ("SDPA", {"q": "q", "k": "k", "v": "v"}, {"y": "O", "lse": "Stats"}),
    BACKWARD: (
        "SDPA_BWD",
        {"q": "q", "k": "k", "v": "v", "y": "o", "dy": "dO", "lse": "stats"},
        {"dq": "dQ", "dk": "dK", "dv": "dV"},
    ),
}
"""Of each form: the type of the node, and the names of its inputs and outputs there."""

_BOTTOM_RIGHT = "diagonal_alignment.BOTTOM_RIGHT"
_ALWAYS: Mapping[tuple[str, ...], Mapping[str, object]] = {
    FORWARD: {"generate_stats": True},
    BACKWARD: {"use_deterministic_algorithm": True},
}
_SCALE, _ALIGNMENT, _BOUND = "attn_scale", "diagonal_alignment", "diagonal_band_right_bound"

_SCORES_LIMIT = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"
"""Bytes of scores that a gradient may keep in scratch. At 0 the frontend adds up dq in order on
Hopper; else it would keep all scores, which no workspace of ours has room for."""


class UnknownGraph(Exception):
    """A graph says something that no record of ours means."""


@dataclass(frozen=True, slots=True)
class SdpaChoice:
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

    def describe(self, sdpa: SdpaCall) -> Any:
        """Return the library's graph of a call, validated. Needs no GPU.

        Raises CudaError where the library refuses it, UnknownGraph where it holds something else.
        """
        cudnn = self._cudnn
        kinds = {dtype: getattr(cudnn.data_type, name[10:]) for dtype, name in _TYPES.items()}
        kind, inputs, outputs = _PORTS[sdpa.names]
        options: dict[str, object] = {**_ALWAYS[sdpa.names], _SCALE: sdpa.scale}
        if sdpa.causal:
            options |= {_ALIGNMENT: cudnn.diagonal_alignment.BOTTOM_RIGHT, _BOUND: 0}
        with _told("cudnnGraphValidate", _NOT_SUPPORTED, f"cuDNN refuses {sdpa.about}"):
            graph = cudnn.pygraph(
                handle=self._handle,
                io_data_type=kinds[sdpa.tensors[0].dtype],
                intermediate_data_type=cudnn.data_type.FLOAT,
                compute_data_type=cudnn.data_type.FLOAT,
            )
            given, made = {}, {}
            for uid, tensor in enumerate(sdpa.tensors, 1):
                lies = {"dim": list(tensor.shape), "stride": list(tensor.strides)}
                if tensor.name in inputs:
                    given[inputs[tensor.name]] = graph.tensor(
                        name=tensor.name, data_type=kinds[tensor.dtype], uid=uid, **lies
                    )
                else:
                    made[outputs[tensor.name]] = uid, tensor
            call = graph.sdpa_backward if sdpa.is_backward else graph.sdpa
            results = call(name=kind, **given, **options)
            for result, port in zip(results, outputs.values(), strict=True):
                uid, tensor = made[port]
                result.set_output(True).set_uid(uid).set_data_type(kinds[tensor.dtype])
                result.set_dim(list(tensor.shape)).set_stride(list(tensor.strides))
            graph.validate()
        said = read_back(str(graph))
        if said != sdpa:
            raise UnknownGraph(f"a graph of {sdpa} says that it is of {said}")
        return graph

    def choose(self, sdpa: SdpaCall, workspace_bytes: int) -> SdpaChoice:
        """Return how to compute a call in so much workspace. Raises CudaError where nothing fits.

        It is the first plan of the library's own that fits: nothing is timed.
        """
        cudnn, graph = self._cudnn, self.describe(sdpa)
        what = (
            f"cuDNN has no way to compute {sdpa.about} within {workspace_bytes:,} bytes of"
            " workspace; compile the job with ACTORFLOW_CUDNN=0, which composes attention of"
            " products"
        )
        with _told("cudnnGraphBuild", _NOT_SUPPORTED, what), _no_scores_kept():
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_engines(self._compiled_here(graph))
            graph.deselect_workspace_greater_than(workspace_bytes)
            graph.check_support()
            graph.build_plans()
            needed = int(graph.get_workspace_size())
            if needed > workspace_bytes:
                raise RuntimeError(f"it needs {needed:,}")
        return SdpaChoice(graph, needed)

    def run(
        self, choice: SdpaChoice, addresses: tuple[int, ...], workspace: int, stream: int
    ) -> None:
        """Put a call on a stream. Raises CudaError."""
        with _told("cudnnBackendExecute", _EXECUTION_FAILED, "cuDNN's attention failed"):
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            places = dict(enumerate(addresses, 1))
            choice.graph.execute(places, workspace, handle=self._handle)

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


def read_back(said: str) -> SdpaCall:
    """Return what a graph says, which is JSON, as a record. Raises UnknownGraph."""
    graph = json.loads(said)
    if len(graph["nodes"]) != 1:
        raise UnknownGraph(f"a graph has {len(graph['nodes'])} nodes, and one is attention")
    (node,) = graph["nodes"]
    names = next((names for names, ports in _PORTS.items() if ports[0] == node["type"]), None)
    if names is None:
        raise UnknownGraph(f"a graph has a node {node['type']!r}, which is no attention")
    _, inputs, outputs = _PORTS[names]
    tensors = []
    for names_of, ports in ((inputs, node["inputs"]), (outputs, node["outputs"])):
        if {*ports} != {*names_of.values()}:
            raise UnknownGraph(f"a node {node['type']} has the tensors {', '.join(ports)}")
        for name, port in names_of.items():
            tensors.append(_tensor(name, graph["tensors"][ports[port]]))
    if [uid for uid, _ in sorted(tensors, key=lambda t: t[0])] != [*range(1, len(names) + 1)]:
        raise UnknownGraph("the tensors of a graph are not numbered from 1 up")
    ordered = tuple([tensor for _, tensor in sorted(tensors, key=lambda t: t[0])])
    if tuple([tensor.name for tensor in ordered]) != names:
        raise UnknownGraph("the tensors of a graph are not in their order")
    scale, causal = _options(names, node["params"])
    return SdpaCall(ordered, scale, causal)


def _tensor(name: str, said: Mapping[str, Any]) -> tuple[int, SdpaTensor]:
    """Return a tensor with its number."""
    if said["dtype"] not in _DTYPES or said["is_virtual"]:
        raise UnknownGraph(f"{name} of a graph is {said['dtype']}, or is nowhere")
    shape, strides = [_extents(name, said[key]) for key in ("dim", "stride")]
    return int(said["uid"]), SdpaTensor(name, _DTYPES[said["dtype"]], shape, strides)


def _extents(name: str, said: list[int]) -> Extents:
    if len(said) != 4:
        raise UnknownGraph(f"{name} of a graph has {len(said)} axes")
    first, second, third, fourth = said
    return first, second, third, fourth


def _options(names: tuple[str, ...], params: Mapping[str, object]) -> tuple[float, bool]:
    """Return scale and whether it is causal; every parameter must be one of ours."""
    always = _ALWAYS[names]
    unknown = sorted({*params} - {*always, _SCALE, _ALIGNMENT, _BOUND})
    if unknown:
        raise UnknownGraph(f"a graph has parameters that are not ours: {', '.join(unknown)}")
    other = [name for name, value in always.items() if params.get(name) != value]
    if other:
        raise UnknownGraph(f"a graph has {other[0]} = {params.get(other[0])}")
    scale = params.get(_SCALE)
    if not isinstance(scale, int | float):
        raise UnknownGraph(f"a graph has no {_SCALE}")
    mask = params.get(_ALIGNMENT), params.get(_BOUND)
    if mask not in ((None, None), (_BOTTOM_RIGHT, 0)):
        raise UnknownGraph(f"a graph has the mask {mask[0]}, right of it {mask[1]}")
    return float(scale), mask[0] is not None


@contextmanager
def _told(call: str, code: int, what: str) -> Iterator[None]:
    """Turn what the frontend raises, which is of many types, into CudaError."""
    try:
        yield
    except CudaError:
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
