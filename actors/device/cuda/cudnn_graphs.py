"""Graphs of cuDNN's frontend: made of a record, and read back from what they say, which is JSON.

The frontend takes keywords that it does not know without a word, so a graph is believed only where
what it holds is, by a list of ours, the record that it was made of.

Names: nvidia-cudnn-frontend 1.32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.kernels.cuda.cudnn_records import (
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
from compiler.types import DType

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
    given, made = {}, {}
    for uid, tensor in enumerate(call.tensors, 1):
        lies = {"dim": list(tensor.shape), "stride": list(tensor.strides)}
        if tensor.name in node.inputs:
            given[node.inputs[tensor.name]] = graph.tensor(
                name=tensor.name, data_type=kinds[tensor.dtype], uid=uid, **lies
            )
        else:
            made[node.outputs[tensor.name]] = uid, tensor
    results = getattr(graph, node.method)(name=node.type, **given, **_said_of(cudnn, call))
    several = results if isinstance(results, tuple | list) else (results,)
    for result, port in zip(several, node.outputs.values(), strict=True):
        uid, tensor = made[port]
        result.set_output(True).set_uid(uid).set_data_type(kinds[tensor.dtype])
        result.set_dim(list(tensor.shape)).set_stride(list(tensor.strides))
    # Before it is validated: the package says it in other words once the library has the graph.
    said = read_back(str(graph))
    if said != call:
        raise UnknownGraph(f"a graph of {call} says that it is of {said}")
    return graph


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
        raise UnknownGraph(f"a graph has {len(graph['nodes'])} nodes, and ours have one")
    (node,) = graph["nodes"]
    names = next((names for names, own in _NODES.items() if own.type == node["type"]), None)
    if names is None:
        raise UnknownGraph(f"a graph has a node {node['type']!r}, which is none of ours")
    added_up = graph["context"].get("compute_data_type")
    if added_up != _TYPES[DType.FLOAT32]:
        raise UnknownGraph(f"a graph computes in {added_up}")
    own, tensors = _NODES[names], []
    for names_of, ports in ((own.inputs, node["inputs"]), (own.outputs, node["outputs"])):
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
    found: dict[str, Extents] = {}
    for name in (*_PADDINGS, *_WAYS):
        found[name] = tuple(params.get(name) or ())
        if len(found[name]) != len(tensors[0].shape) - 2:
            raise UnknownGraph(f"a graph has {name} = {params.get(name)}")
    before, behind = [found[name] for name in _PADDINGS]
    if before != behind:
        raise UnknownGraph(f"a graph has padding {before} before and {behind} behind")
    return ConvCall(tensors, before, *[found[name] for name in _WAYS])


def _refuse_others(params: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted({*params} - {*known})
    if unknown:
        raise UnknownGraph(f"a graph has parameters that are not ours: {', '.join(unknown)}")
