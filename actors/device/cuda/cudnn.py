"""Attention and convolutions by the graphs of cuDNN's frontend.

A graph is made of a record (`CudnnCall`) and read back from what it says, which is JSON, without a
GPU; plans and runs need one. The frontend takes keywords that it does not know without a word, so a
graph is believed only where what it holds is, by a list of ours, the record that it was made of.

The package is imported when the first graph is made, and nowhere else.

The library itself is that of the loader's path, of the package nvidia-cudnn-cu13, or of
nvidia-cudnn-jit-cu13, which comes last, as with the frontend: only one can be in a process.

Names: nvidia-cudnn-frontend 1.32, cuDNN 9.19 and later.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.device.cuda.cudnn_plans import CudnnPlans
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.calls import (
    BACKWARD,
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    FORWARD,
    ConvCall,
    CudnnCall,
    CudnnTensor,
    Extents,
    SdpaCall,
)
from actors.kernels.cuda.cudnn_library import OLDEST, CudnnLibrary
from actors.kernels.cuda.nvrtc import find_library
from actors.machine.errors import forkable_lock
from compiler.contract.errors import DeviceError
from compiler.contract.types import DType

_TYPES = {
    DType.BFLOAT16: "data_type.BFLOAT16",
    DType.FLOAT16: "data_type.HALF",
    DType.FLOAT32: "data_type.FLOAT",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class _CudnnNode:
    """The method that makes a node, its type, and its names of our tensors."""

    method: str
    type: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


_NODES = {
    FORWARD: _CudnnNode("sdpa", "SDPA", {"q": "q", "k": "k", "v": "v"}, {"y": "O", "lse": "Stats"}),
    BACKWARD: _CudnnNode(
        "sdpa_backward",
        "SDPA_BWD",
        {"q": "q", "k": "k", "v": "v", "y": "o", "dy": "dO", "lse": "stats"},
        {"dq": "dQ", "dk": "dK", "dv": "dV"},
    ),
    CONV: _CudnnNode("conv_fprop", "CONV_FPROP", {"x": "image", "weight": "weight"}, {"y": "Y"}),
    CONV_INPUT_GRAD: _CudnnNode(
        "conv_dgrad", "CONV_DGRAD", {"dy": "loss", "weight": "filter"}, {"dx": "DX"}
    ),
    CONV_WEIGHT_GRAD: _CudnnNode(
        "conv_wgrad", "CONV_WGRAD", {"x": "image", "dy": "loss"}, {"dweight": "DW"}
    ),
}

_BOTTOM_RIGHT = "diagonal_alignment.BOTTOM_RIGHT"
_ALWAYS: Mapping[tuple[str, ...], Mapping[str, object]] = {
    FORWARD: {"generate_stats": True},
    BACKWARD: {"use_deterministic_algorithm": True},
}
_SCALE, _ALIGNMENT, _BOUND = "attn_scale", "diagonal_alignment", "diagonal_band_right_bound"
_PADDINGS, _WAYS = ("pre_padding", "post_padding"), ("stride", "dilation")


class UnknownGraph(Exception):
    """A graph says something that no record of ours means."""


def graph_of(cudnn: Any, handle: Any, call: CudnnCall) -> Any:
    """Return the library's graph of a call. `cudnn` is its package, `handle` may be None.

    Raises UnknownGraph where it holds something else than the call, and what the package raises.
    """
    kinds = {dtype: getattr(cudnn.data_type, name[10:]) for dtype, name in _TYPES.items()}
    node = _NODES[call.names]
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=kinds[call.tensors[0].dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    inputs, outputs = {}, {}
    for uid, tensor in enumerate(call.tensors, 1):
        layout = {"dim": list(tensor.shape), "stride": list(tensor.strides)}
        if tensor.name in node.inputs:
            inputs[node.inputs[tensor.name]] = graph.tensor(
                name=tensor.name, data_type=kinds[tensor.dtype], uid=uid, **layout
            )
        else:
            outputs[node.outputs[tensor.name]] = uid, tensor
    results = getattr(graph, node.method)(name=node.type, **inputs, **_said_of(cudnn, call))
    several = results if isinstance(results, tuple | list) else (results,)
    for output, port in zip(several, node.outputs.values(), strict=True):
        uid, tensor = outputs[port]
        output.set_output(True).set_uid(uid).set_data_type(kinds[tensor.dtype])
        output.set_dim(list(tensor.shape)).set_stride(list(tensor.strides))
    # Before it is validated: the package says it in other words once the library has the graph.
    graph_call = read_back(str(graph))
    if graph_call != without_way(call):
        raise UnknownGraph(f"a graph of {call} says that it is of {graph_call}")
    return graph


def without_way(call: CudnnCall) -> CudnnCall:
    """Return a call as its graph says it: in which way a gradient adds up is not in there."""
    return replace(call, keeps_scores=False) if isinstance(call, SdpaCall) else call


def _said_of(cudnn: Any, call: CudnnCall) -> dict[str, object]:
    """Return the keywords of a node."""
    if isinstance(call, ConvCall):
        return {
            **{name: list(call.padding) for name in _PADDINGS},
            **dict(zip(_WAYS, (list(call.strides), list(call.dilation)), strict=True)),
        }
    options: dict[str, object] = {**_ALWAYS[call.names], _SCALE: call.scale}
    if call.causal:
        options |= {_ALIGNMENT: cudnn.diagonal_alignment.BOTTOM_RIGHT, _BOUND: 0}
    return options


def read_back(said: str) -> CudnnCall:
    """Return what a graph says, which is JSON, as a record. Raises UnknownGraph."""
    graph = json.loads(said)
    if len(graph["nodes"]) != 1:
        raise UnknownGraph(f"a graph has {len(graph['nodes'])} nodes, expected one")
    (node,) = graph["nodes"]
    names = next((names for names, spec in _NODES.items() if spec.type == node["type"]), None)
    if names is None:
        raise UnknownGraph(f"a graph has a node of unknown type {node['type']!r}")
    added_up = graph["context"].get("compute_data_type")
    if added_up != _TYPES[DType.FLOAT32]:
        raise UnknownGraph(f"a graph computes in {added_up}")
    spec, tensors = _NODES[names], []
    for names_of, ports in ((spec.inputs, node["inputs"]), (spec.outputs, node["outputs"])):
        if {*ports} != {*names_of.values()}:
            raise UnknownGraph(f"a node {node['type']} has the tensors {', '.join(ports)}")
        for name, port in names_of.items():
            tensors.append(_tensor(name, graph["tensors"][ports[port]]))
    if [uid for uid, _ in sorted(tensors, key=lambda t: t[0])] != [*range(1, len(names) + 1)]:
        raise UnknownGraph("the tensors of a graph are not numbered from 1 up")
    ordered = tuple([tensor for _, tensor in sorted(tensors, key=lambda t: t[0])])
    if tuple([tensor.name for tensor in ordered]) != names:
        raise UnknownGraph("the tensors of a graph are not in their order")
    params = node["params"]
    return _conv(ordered, params) if names not in _ALWAYS else _sdpa(ordered, names, params)


def _tensor(name: str, said: Mapping[str, Any]) -> tuple[int, CudnnTensor]:
    """Return a tensor with its number."""
    if said["dtype"] not in _DTYPES or said["is_virtual"]:
        raise UnknownGraph(f"{name} of a graph is {said['dtype']}, or is nowhere")
    shape, strides = [tuple(said[key]) for key in ("dim", "stride")]
    if not 4 <= len(shape) == len(strides) <= 5:
        raise UnknownGraph(f"{name} of a graph has {len(shape)} axes")
    return int(said["uid"]), CudnnTensor(name, _DTYPES[said["dtype"]], shape, strides)


def _sdpa(
    tensors: tuple[CudnnTensor, ...], names: tuple[str, ...], params: Mapping[str, object]
) -> SdpaCall:
    """Return attention of a scale and a mask; every parameter must be one of ours."""
    always = _ALWAYS[names]
    _refuse_others(params, (*always, _SCALE, _ALIGNMENT, _BOUND))
    other = [name for name, value in always.items() if params.get(name) != value]
    if other:
        raise UnknownGraph(f"a graph has {other[0]} = {params.get(other[0])}")
    scale = params.get(_SCALE)
    if not isinstance(scale, int | float):
        raise UnknownGraph(f"a graph has no {_SCALE}")
    mask = params.get(_ALIGNMENT), params.get(_BOUND)
    if mask not in ((None, None), (_BOTTOM_RIGHT, 0)):
        raise UnknownGraph(f"a graph has the mask {mask[0]}, right of it {mask[1]}")
    return SdpaCall(tensors, float(scale), mask[0] is not None)


def _conv(tensors: tuple[CudnnTensor, ...], params: Mapping[str, Any]) -> ConvCall:
    """Return a convolution; every parameter must be one of ours, a number for each axis."""
    _refuse_others(params, (*_PADDINGS, *_WAYS))
    extents: dict[str, Extents] = {}
    for name in (*_PADDINGS, *_WAYS):
        extents[name] = tuple(params.get(name) or ())
        if len(extents[name]) != len(tensors[0].shape) - 2:
            raise UnknownGraph(f"a graph has {name} = {params.get(name)}")
    before, after = [extents[name] for name in _PADDINGS]
    # A record of ours has one padding per axis.
    if before != after:
        raise UnknownGraph(f"a graph has padding {before} before and {after} behind")
    return ConvCall(tensors, before, *[extents[name] for name in _WAYS])


def _refuse_others(params: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted({*params} - {*known})
    if unknown:
        raise UnknownGraph(f"a graph has unknown parameters: {', '.join(unknown)}")


PACKAGE = "cudnn"
_BINDINGS = "cuda.bindings"
_LIBRARY = "libcudnn.so.9"
_BESIDE = ("libcudart.so.13", "libcublasLt.so.13")
"""What the frontend and cuDNN load by name, and find in the folder of their own environment alone.
Without cuBLASLt cuDNN 9.19 ends the process when a gradient of attention is planned."""

_PRECOMPILED = "libcudnn_engines_precompiled.so.9"
"""What lies beside the whole library, and not beside the small one."""

_LOADER_PATH = "LD_LIBRARY_PATH"

INSTALL = (
    "python -m pip install 'actorflow[cudnn]', or compile the job again with ACTORFLOW_CUDNN=0,"
    " which uses actorflow's kernels"
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
"""Bytes of scores that a deterministic gradient may keep in scratch on Hopper. With a limit that
they exceed the frontend lets blocks add to dq in order, if the library is 9.25 or later; an older
one keeps them whatever the limit is. -1 is no limit."""


@dataclass(frozen=True, slots=True)
class CudnnChoice:
    """A graph whose plan is built, and what it wants."""

    graph: Any
    workspace_bytes: int


class Cudnn:
    """The library. Graphs may be made by any thread; a handle is for one GPU and one thread.

    Args:
        gpu: What plans are built for: the GPU's name and its capability.
        folder: Keeps plans that were built; None for none.
    """

    def __init__(self, gpu: str = "", folder: Path | None = None) -> None:
        """Import it. Raises DeviceError where there is none."""
        self._gpu, self._plans = gpu, CudnnPlans(folder)
        nvrtc.is_here()  # cuDNN compiles kernels, and looks for it by name, too
        for path in (*map(find_library, _BESIDE), _library_path()):
            with suppress(OSError):  # then the frontend says what it misses
                ctypes.CDLL(path)
        try:
            with _first_in_loader_path(Path(_library_path()).parent):
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
        One that was built before is the same, and need not be built.
        """
        key = self._key(call, workspace_bytes)
        choice = self._kept(key, workspace_bytes)
        if choice is None:
            choice = self._built(call, workspace_bytes)
            self._keep(key, choice)
        return choice

    def _key(self, call: CudnnCall, workspace_bytes: int) -> str:
        """Return all that decides which plan is built, and what it is compiled to."""
        found, compiler = installed(), nvrtc.version() if nvrtc.is_here() else ()
        parts = (
            *(self._gpu, self._cudnn.backend_version(), getattr(self._cudnn, "__version__", "")),
            *(found is not None and found.library.is_jit, compiler, _BARRED),
            *(call, workspace_bytes),
        )
        return "; ".join(map(repr, parts))

    def _kept(self, key: str, workspace_bytes: int) -> CudnnChoice | None:
        """Return a plan from the folder; None where there is none of use."""
        plan = self._plans.read(key)
        if plan is None:
            return None
        try:
            # The frontend tries the plan by a capture: on a stream of its own, if the handle has
            # none. That of the handle's last call may be gone.
            self._cudnn.set_stream(handle=self._handle, stream=0)
            graph = self._cudnn.pygraph(handle=self._handle)
            graph.deserialize(self._handle, plan)
            size = int(graph.get_workspace_size())
            if size > workspace_bytes:
                raise RuntimeError(f"it needs {size:,} bytes of workspace")
        # The package raises its own errors, RuntimeError, and those of its bindings.
        except Exception as error:
            self._plans.refuse(key, error)
            return None
        return CudnnChoice(graph, size)

    def _keep(self, key: str, choice: CudnnChoice) -> None:
        if self._plans.folder is not None:
            # For plans of some engines the library has no words.
            with suppress(Exception):
                self._plans.keep(key, bytes(choice.graph.serialize(as_bytes=True)))

    def _built(self, call: CudnnCall, workspace_bytes: int) -> CudnnChoice:
        cudnn, graph = self._cudnn, self.describe(call)
        what = (
            f"cuDNN has no algorithm for {call.about} within {workspace_bytes:,} bytes of"
            " workspace; compile the job with ACTORFLOW_CUDNN=0, which uses actorflow's kernels"
        )
        with _told("cudnnGraphBuild", _NOT_SUPPORTED, what), _scores_limited(call):
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_engines(self._compiled_here(graph))
            if isinstance(call, ConvCall):
                graph.deselect_numeric_notes(self._barred(call))
            graph.deselect_workspace_greater_than(workspace_bytes)
            graph.check_support()
            graph.build_plans()
            size = int(graph.get_workspace_size())
            if size > workspace_bytes:
                raise RuntimeError(f"it needs {size:,}")
        return CudnnChoice(graph, size)

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


def why_not(oldest: tuple[int, int] = OLDEST) -> str:
    """Return what of cuDNN is missing to make plans here, or too old; no package is imported."""
    try:
        has_bindings = importlib.util.find_spec(_BINDINGS) is not None
    except ModuleNotFoundError:  # not even its parent
        has_bindings = False
    if not (is_installed() and has_bindings):
        return "its packages are missing"
    found = installed()
    if found is None:
        return f"the library itself ({_LIBRARY}) is missing"
    if found.library.version < oldest:
        return f"the one here is {_dotted(found.library.version)}, older than {_dotted(oldest)}"
    return ""


@dataclass(frozen=True, slots=True)
class InstalledCudnn:
    """The library that is used here, and where it lies."""

    path: str
    library: CudnnLibrary

    @property
    def about(self) -> str:
        """What is said of it to a person."""
        kind = "small one, which compiles its kernels" if self.library.is_jit else "whole one"
        return f"{_dotted(self.library.version)}, the {kind} ({self.path})"


def library_here() -> CudnnLibrary | None:
    """Return what plans made here may use; None where none can be run."""
    found = installed() if can_run() else None
    return None if found is None else found.library


@functools.cache
def installed() -> InstalledCudnn | None:
    """Return the library that is here, of whatever version; None where there is none."""
    path = _library_path()
    try:
        ask = ctypes.CDLL(path).cudnnGetVersion
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_size_t
    version = divmod(int(ask()) // 100, 100)  # 92801 is 9.28.1
    # By its name alone the loader finds that of a system, which has all parts.
    has_all = not os.path.isabs(path) or (Path(path).parent / _PRECOMPILED).exists()
    return InstalledCudnn(path, CudnnLibrary(version, is_jit=not has_all))


def _library_path() -> str:
    """Return where the library lies, or its name for the loader. Nothing is loaded.

    A second library would take parts of the first, which the loader finds by their names.
    """
    for folder in os.environ.get(_LOADER_PATH, "").split(os.pathsep):
        if folder and (Path(folder) / _LIBRARY).exists():
            return str(Path(folder).absolute() / _LIBRARY)
    return find_library(_LIBRARY)


@contextmanager
def _first_in_loader_path(folder: Path) -> Iterator[None]:
    """Let the frontend, which reads the variable while it is imported, take our library."""
    old_value = os.environ.get(_LOADER_PATH)
    if folder.is_absolute():
        others = [old_value] if old_value else []
        os.environ[_LOADER_PATH] = os.pathsep.join([str(folder), *others])
    try:
        yield
    finally:
        _restore(_LOADER_PATH, old_value)


def _restore(variable: str, old_value: str | None) -> None:
    if old_value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = old_value


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


@contextmanager
def _told(call: str, code: int, what: str) -> Iterator[None]:
    """Turn what the frontend raises, which is of many types, into CudaError."""
    try:
        yield
    except (CudaError, UnknownGraph):
        raise
    # The package raises its own errors, RuntimeError, and those of its bindings.
    except Exception as error:
        raise CudaError(f"{what}: {type(error).__name__}: {error}", code=code, call=call) from error


_environment_lock = forkable_lock()


@contextmanager
def _scores_limited(call: CudnnCall) -> Iterator[None]:
    """Let the frontend build the plan of a gradient in the way that the call says."""
    keeps_scores = isinstance(call, SdpaCall) and call.keeps_scores
    # The frontend reads the variable, which all threads share, while it builds a plan.
    with _environment_lock:
        old_value = os.environ.get(_SCORES_LIMIT)
        os.environ[_SCORES_LIMIT] = "-1" if keeps_scores else "0"
        try:
            yield
        finally:
            _restore(_SCORES_LIMIT, old_value)
