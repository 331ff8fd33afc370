"""Small models of ONNX for tests, and what onnxruntime computes of a file, in a process apart."""

import json
import subprocess
import sys

import numpy as np
from onnx import TensorProto, helper

ONNX_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


def port(name, shape, dtype="float32"):
    """Return the proto of an input or output."""
    return helper.make_tensor_value_info(name, ONNX_TYPES[dtype], shape)


def model(nodes, inputs, outputs, *, opset=17, **more):
    """Return a model of some nodes; `more` goes to the graph."""
    functions = more.pop("functions", ())
    graph = helper.make_graph(nodes, "graph", inputs, outputs, **more)
    domains = {n.domain for n in nodes if n.domain} | {f.domain for f in functions}
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid(d, 1) for d in domains]]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def one_node(op_type, arrays, *, results=(), opset=17, **attributes):
    """Return a model of one node that reads arrays by name and gives what `results` are like."""
    names = [f"y{i}" for i in range(len(results))]
    node = helper.make_node(op_type, list(arrays), names, **attributes)
    inputs, outputs = [
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in named.items()
        ]
        for named in (arrays, dict(zip(names, results, strict=True)))
    ]
    return model([node], inputs, outputs, opset=opset)


_RUN = """
import sys, json, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
for given in json.loads(sys.argv[2]):
    with np.load(given) as batch:
        made = session.run(None, dict(batch))
    names = [output.name for output in session.get_outputs()]
    np.savez(given + ".out.npz", **dict(zip(names, made)))
"""


def run_by_onnxruntime(path, batches, folder):
    """Return what onnxruntime gives for each batch, apart: a bad model may abort the process."""
    given = []
    for number, batch in enumerate(batches):
        given.append(str(folder / f"batch{number}.npz"))
        np.savez(given[-1], **batch)
    command = [sys.executable, "-c", _RUN, str(path), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results = []
    for name in given:
        with np.load(name + ".out.npz") as made:
            results.append(dict(made))
    return results


# Which of ONNX's own cases are of its core.

CORE_TYPES = {
    "float32",
    "uint8",
    "int8",
    "int32",
    "int64",
    "bool",
    "float16",
    "float64",
    "bfloat16",
}

OUTSIDE = {
    *("AffineGrid", "ArrayFeatureExtractor", "Binarizer", "LabelEncoder", "TreeEnsemble"),
    *("Acosh", "Asinh", "Atanh", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot"),
    *("BitwiseOr", "BitwiseXor", "BlackmanWindow", "CausalConvWithState", "CenterCropPad"),
    *("Col2Im", "Compress", "ConvInteger", "CumProd", "DeformConv", "DepthToSpace", "Det", "DFT"),
    *("DequantizeLinear", "DynamicQuantizeLinear", "FlexAttention", "GridSample", "GRU", "If"),
    *("HammingWindow", "HannWindow", "Hardmax", "ImageDecoder", "LinearAttention", "Loop"),
    *("LpNormalization", "LpPool", "LRN", "LSTM", "MatMulInteger", "MaxUnpool", "MelWeightMatrix"),
    *("MeanVarianceNormalization", "NonMaxSuppression", "NonZero", "OptionalGetElement"),
    *("OptionalHasElement", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "RegexFullMatch"),
    *("Resize", "ReverseSequence", "RNN", "RoiAlign", "Scan", "Scatter", "SequenceMap"),
    *("SequenceInsert", "Shrink", "SpaceToDepth", "SplitToSequence", "STFT", "StringConcat"),
    *("StringSplit", "StringNormalizer", "TensorScatter", "TfIdfVectorizer", "Unique", "Upsample"),
}
"""Operators outside of the core: what of them is known is run too, and none may be wrong."""


def is_core_case(case):
    """Whether a case of one node is of the core: a known operator on dense, common tensors."""
    graph = case.model.graph
    types = [v.type for v in (*graph.input, *graph.output)]
    named = helper.tensor_dtype_to_np_dtype
    return graph.node[0].op_type not in OUTSIDE and all(
        [
            t.HasField("tensor_type")
            and t.tensor_type.elem_type != TensorProto.STRING
            and named(t.tensor_type.elem_type).name in CORE_TYPES
            for t in types
        ]
    )
