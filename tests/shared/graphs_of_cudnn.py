"""Records of cuDNN's calls, and what its frontend says of the graphs of them."""

from __future__ import annotations

from actors.kernels.cuda.calls import (
    BACKWARD,
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    FORWARD,
    ConvCall,
    CudnnTensor,
    SdpaCall,
)
from compiler.contract.types import DType

B, H, S, D = 2, 3, 64, 16
PACKED = (3 * H * S * D, D, 3 * H * D, 1)


def tensor(name, dtype=DType.BFLOAT16):
    if name == "lse":
        return CudnnTensor(name, DType.FLOAT32, (B, H, S, 1), (H * S, S, 1, 1))
    return CudnnTensor(name, dtype, (B, H, S, D), PACKED)


def record(names, dtype=DType.BFLOAT16, *, causal=True):
    return SdpaCall(tuple([tensor(name, dtype) for name in names]), 0.125, causal)


LIES = {
    "image": ((2, 6, 9, 8), (432, 1, 48, 6)), "weight": ((4, 3, 3, 2), (18, 6, 2, 1)),
    "result": ((2, 4, 4, 8), (128, 1, 32, 4)),
}  # fmt: skip
IS = {"x": "image", "dx": "image", "dweight": "weight", "y": "result", "dy": "result"}


def conv(names, dtype=DType.BFLOAT16):
    tensors = [CudnnTensor(name, dtype, *LIES[IS.get(name, name)]) for name in names]
    return ConvCall(tuple(tensors), (0, 1), (2, 1), (1, 2))


RECORDS = {
    f"{'gradient' if names is BACKWARD else 'attention'} {dtype.value} {causal}": record(
        names, dtype, causal=causal
    )
    for names in (FORWARD, BACKWARD)
    for dtype in (DType.BFLOAT16, DType.FLOAT16)
    for causal in (False, True)
}
RECORDS |= {
    f"{names[-1]} {dtype.value}": conv(names, dtype)
    for names in (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD)
    for dtype in (DType.BFLOAT16, DType.FLOAT32)
}
CAUSAL = {
    "diagonal_alignment": "diagonal_alignment.BOTTOM_RIGHT",
    "diagonal_band_right_bound": 0,
}
PORTS = {
    "y": ("O", "o"), "lse": ("Stats", "stats"), "dy": ("", "dO"), "dq": ("", "dQ"),
    "dk": ("", "dK"), "dv": ("", "dV"),
}  # fmt: skip
TYPES = {DType.BFLOAT16: "BFLOAT16", DType.FLOAT16: "HALF", DType.FLOAT32: "FLOAT"}


CONVS = {
    CONV: ("CONV_FPROP", ("image", "weight", "Y")),
    CONV_INPUT_GRAD: ("CONV_DGRAD", ("loss", "filter", "DX")),
    CONV_WEIGHT_GRAD: ("CONV_WGRAD", ("image", "loss", "DW")),
}


def node_of(sdpa):
    """Return the type, the names of tensors and the parameters of a node."""
    if isinstance(sdpa, ConvCall):
        kind, ports = CONVS[sdpa.names]
        ways = {"stride": [2, 1], "dilation": [1, 2], "pre_padding": [0, 1], "post_padding": [0, 1]}
        return kind, dict(zip(sdpa.names, ports, strict=True)), ways
    ports = {t.name: PORTS.get(t.name, (t.name, t.name))[sdpa.is_backward] for t in sdpa.tensors}
    always = "use_deterministic_algorithm" if sdpa.is_backward else "generate_stats"
    params = {always: True, "attn_scale": sdpa.scale} | (CAUSAL if sdpa.causal else {})
    return "SDPA_BWD" if sdpa.is_backward else "SDPA", ports, params


def graph_of(sdpa):
    """Return what the frontend says of a call, as its version 1.32 says it."""
    kind, ports, params = node_of(sdpa)
    sides = sdpa.names[: -sdpa.num_results], sdpa.names[-sdpa.num_results :]
    node = {
        "name": "one",
        "type": kind,
        "inputs": {ports[name]: f"the {name}" for name in sides[0]},
        "outputs": {ports[name]: f"the {name}" for name in sides[1]},
        "params": params,
    }
    tensors = {
        f"the {t.name}": {
            "dim": list(t.shape),
            "stride": list(t.strides),
            "dtype": f"data_type.{TYPES[t.dtype]}",
            "is_virtual": False,
            "uid": uid,
        }
        for uid, t in enumerate(sdpa.tensors, 1)
    }
    return {
        "context": {"compute_data_type": "data_type.FLOAT"},
        "nodes": [node],
        "tensors": tensors,
    }
