"""Graphs of cuDNN: believed where what they say is the record that they were made of."""

import json
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from actors.device.cuda import cudnn
from actors.device.cuda.cudnn import Cudnn
from actors.device.cuda.cudnn_graphs import UnknownGraph, read_back
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.cudnn_records import (
    BACKWARD,
    CONV,
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    FORWARD,
    ConvCall,
    CudnnTensor,
    SdpaCall,
)
from compiler.errors import DeviceError
from compiler.types import DType

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


@pytest.mark.parametrize("name", RECORDS)
def test_a_graph_reads_back_as_the_record_it_was_made_of(name):
    assert read_back(json.dumps(graph_of(RECORDS[name]))) == RECORDS[name]


def with_params(**params):
    graph = graph_of(record(FORWARD))
    graph["nodes"][0]["params"] |= params
    return graph


def with_ways(**params):
    graph = graph_of(conv(CONV))
    graph["nodes"][0]["params"] |= params
    return graph


def without(name):
    graph = graph_of(record(FORWARD))
    del graph["nodes"][0]["params"][name]
    return graph


def with_tensor(**said):
    graph = graph_of(record(BACKWARD))
    graph["tensors"]["the dk"] |= said
    return graph


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (with_params(right_bound=0), "parameters that are not ours: right_bound"),
        (with_params(use_causal_mask=True), "not ours: use_causal_mask"),
        (with_params(diagonal_alignment="diagonal_alignment.TOP_LEFT"), "TOP_LEFT, right of it 0"),
        (with_params(diagonal_band_right_bound=1), "BOTTOM_RIGHT, right of it 1"),
        (without("diagonal_band_right_bound"), "BOTTOM_RIGHT, right of it None"),
        (without("diagonal_alignment"), "the mask None, right of it 0"),
        (with_params(generate_stats=False), "generate_stats = False"),
        (without("attn_scale"), "no attn_scale"),
        (with_tensor(dtype="data_type.INT32"), "dk of a graph is data_type.INT32"),
        (with_tensor(is_virtual=True), "or is nowhere"),
        (with_tensor(dim=[1, 2, 3]), "dk of a graph has 3 axes"),
        (with_tensor(uid=20), "not numbered"),
        (with_ways(convolution_mode="convolution_mode.CONVOLUTION"), "not ours: convolution_mode"),
        (with_ways(post_padding=[1, 1]), r"\(0, 1\) before and \(1, 1\) behind"),
        (with_ways(stride=[2]), r"stride = \[2\]"),
        (with_ways() | {"context": {}}, "computes in None"),
    ],
    ids=str,
)
def test_what_no_record_means_is_refused(graph, words):
    with pytest.raises(UnknownGraph, match=words):
        read_back(json.dumps(graph))


def test_other_nodes_and_other_tensors_are_refused():
    graph = graph_of(record(FORWARD))
    node = graph["nodes"][0]
    for wrong, words in (
        ([node, node], "2 nodes"),
        ([node | {"type": "MATMUL"}], "'MATMUL', which is none of ours"),
        ([node | {"inputs": node["inputs"] | {"bias": "the q"}}], "has the tensors q, k, v, bias"),
    ):
        with pytest.raises(UnknownGraph, match=words):
            read_back(json.dumps(graph | {"nodes": wrong}))
    swapped = graph_of(record(FORWARD))
    tensors = swapped["tensors"]
    tensors["the q"]["uid"], tensors["the k"]["uid"] = 2, 1
    with pytest.raises(UnknownGraph, match="in their order"):
        read_back(json.dumps(swapped))


# -- the frontend as far as we use it ------------------------------------------------------------


class Port:
    def __init__(self, graph, key):
        self.graph, self.key, self.said = graph, key, {"is_virtual": True}
        graph.said["tensors"][key] = self.said

    def set(self, **said):
        self.said.update(said)
        return self

    def set_output(self, is_output):
        return self.set(is_virtual=not is_output)

    def set_uid(self, uid):
        return self.set(uid=uid)

    def set_data_type(self, dtype):
        return self.set(dtype=f"data_type.{dtype}")

    def set_dim(self, dim):
        return self.set(dim=dim)

    def set_stride(self, stride):
        return self.set(stride=stride)


class Graph:
    """Says what it was told, and wants as much workspace as its module says."""

    def __init__(self, module, **options):
        self.module, self.options, self.done = module, options, []
        kind = f"data_type.{options.get('compute_data_type')}"
        self.said = {"context": {"compute_data_type": kind}, "nodes": [], "tensors": {}}
        self.plans = [SimpleNamespace(engine_id=n) for n in (900, 1)]

    def tensor(self, name, data_type, uid, dim, stride):
        port = Port(self, f"given {name}")
        return (
            port.set_output(True).set_uid(uid).set_data_type(data_type).set(dim=dim, stride=stride)
        )

    def _node(self, kind, ports, name, given, params):
        made = [Port(self, f"made {port}") for port in ports]
        params = {
            key: value if not isinstance(value, str) else f"diagonal_alignment.{value}"
            for key, value in params.items()
        }
        node = {"name": name, "type": kind, "params": params | self.module.more}
        node["inputs"] = {port: one.key for port, one in given.items()}
        node["outputs"] = {port: one.key for port, one in zip(ports, made, strict=True)}
        self.said["nodes"].append(node)
        return made

    def sdpa(self, name, q, k, v, **params):
        given = {"q": q, "k": k, "v": v}
        return self._node("SDPA", ("O", "Stats"), name, given, params)

    def sdpa_backward(self, name, q, k, v, o, dO, stats, **params):
        given = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        return self._node("SDPA_BWD", ("dQ", "dK", "dV"), name, given, params)

    def conv_fprop(self, name, image, weight, **params):
        return self._node("CONV_FPROP", "Y", name, {"image": image, "weight": weight}, params)[0]

    def conv_dgrad(self, name, loss, filter, **params):  # noqa: A002  # the frontend's name
        return self._node("CONV_DGRAD", ("DX",), name, {"loss": loss, "filter": filter}, params)[0]

    def conv_wgrad(self, name, image, loss, **params):
        return self._node("CONV_WGRAD", ("DW",), name, {"image": image, "loss": loss}, params)[0]

    def deselect_numeric_notes(self, notes):
        self.done.append(("notes", {*notes}))

    def validate(self):
        if self.module.refuses:
            raise ValueError(self.module.refuses)

    def __str__(self):
        return json.dumps(self.said)

    def build_operation_graph(self):
        self.done.append(("limit", os.environ.get("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT")))

    def create_execution_plans(self, modes):
        self.done.append(("plans", modes))

    def get_plan_name_at_index(self, index):
        return f"plan{index}[TILE=1]"

    def deselect_engines(self, names):
        self.done.append(("without", names))

    def deselect_workspace_greater_than(self, size):
        self.done.append(("within", size))

    def check_support(self):
        pass

    def build_plans(self):
        self.done.append(("built",))

    def get_workspace_size(self):
        return self.module.workspace_bytes

    def execute(self, places, workspace, handle):
        if self.module.refuses:
            raise RuntimeError(self.module.refuses)
        self.done.append(("ran", places, workspace, handle))


class Notes:
    """Every note is its name."""

    def __getattr__(self, name):
        return name


@pytest.fixture
def frontend(monkeypatch):
    """The module that the package would be; `more` is what its nodes hold besides."""
    module = ModuleType("cudnn")
    module.more, module.refuses, module.workspace_bytes, module.streams = {}, "", 64, []
    module.data_type = SimpleNamespace(BFLOAT16="BFLOAT16", HALF="HALF", FLOAT="FLOAT")
    module.diagonal_alignment = SimpleNamespace(BOTTOM_RIGHT="BOTTOM_RIGHT")
    module.numerical_note = Notes()
    module.heur_mode = SimpleNamespace(A="a", FALLBACK="fallback")
    module.pygraph = lambda **options: Graph(module, **options)
    module.create_handle = lambda: "handle"
    module.destroy_handle = lambda handle: module.streams.append(("gone", handle))
    module.set_stream = lambda handle, stream: module.streams.append((handle, stream))
    ids = ModuleType("cudnn.engines.engine_ids")
    ids.is_python_engine = lambda number: number >= 900
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setitem(sys.modules, "cudnn.engines", ModuleType("cudnn.engines"))
    monkeypatch.setitem(sys.modules, "cudnn.engines.engine_ids", ids)
    return module


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_asked_of_the_frontend_is_the_record(frontend, name):
    graph = Cudnn().describe(RECORDS[name])
    assert read_back(str(graph)) == RECORDS[name]


def test_a_keyword_that_the_frontend_takes_without_a_word_is_an_error(frontend):
    frontend.more = {"right_bound": 0}
    with pytest.raises(UnknownGraph, match="right_bound"):
        Cudnn().describe(record(FORWARD))


def test_a_mask_that_gets_lost_is_an_error(frontend):
    graph = graph_of(record(FORWARD, causal=False))
    frontend.pygraph = lambda **options: Lost(frontend, graph)
    with pytest.raises(UnknownGraph, match="says that it is of"):
        Cudnn().describe(record(FORWARD))


class Lost(Graph):
    """Says another graph than the one it was told."""

    def __init__(self, module, other):
        super().__init__(module)
        self.other = other

    def __str__(self):
        return json.dumps(self.other)


def test_a_plan_is_the_librarys_own_within_the_workspace_and_keeps_no_scores(frontend, monkeypatch):
    monkeypatch.setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "77")
    choice = Cudnn().choose(record(BACKWARD), 4096)
    assert choice.graph.done == [
        ("limit", "0"),
        ("plans", ["a", "fallback"]),
        ("without", ["plan0"]),
        ("within", 4096),
        ("built",),
    ]
    assert choice.workspace_bytes == 64
    assert os.environ["CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT"] == "77"


def test_sums_of_a_convolution_are_in_order_and_in_float32(frontend):
    barred = {}
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        barred[dtype] = dict(Cudnn().choose(conv(CONV, dtype), 4096).graph.done[1:4])["notes"]
    assert {"NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION"} < barred[DType.BFLOAT16]
    assert barred[DType.FLOAT32] - barred[DType.BFLOAT16] == {"TENSOR_CORE"}


def test_a_plan_over_the_workspace_is_an_error_that_says_what_and_how_to_mend_it(frontend):
    frontend.workspace_bytes = 4097
    with pytest.raises(CudaError) as caught:
        Cudnn().choose(record(BACKWARD), 4096)
    assert str(caught.value) == (
        "cuDNN has no way to compute the gradient of attention of bfloat16 [2, 3, 64, 16] by 64"
        " keys, 16, causal within 4,096 bytes of workspace; compile the job with ACTORFLOW_CUDNN=0,"
        " which takes kernels of ours: RuntimeError: it needs 4,097"
    )
    assert caught.value.call.startswith("cudnn")
    assert "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT" not in os.environ


def test_a_call_runs_on_its_stream_with_addresses_by_number(frontend):
    library = Cudnn()
    library.open()
    choice = library.choose(record(FORWARD), 4096)
    library.run(choice, (10, 20, 30, 40, 50), 60, 7)
    assert frontend.streams == [("handle", 7)]
    assert choice.graph.options["handle"] == "handle"
    places = {1: 10, 2: 20, 3: 30, 4: 40, 5: 50}
    assert choice.graph.done[-1] == ("ran", places, 60, "handle")
    frontend.refuses = "no"
    with pytest.raises(CudaError, match="a call of cuDNN failed: RuntimeError: no"):
        library.run(choice, (10, 20, 30, 40, 50), 60, 7)
    library.close()
    library.close()
    assert frontend.streams[1:] == [("handle", 7), ("gone", "handle")]


def test_what_the_frontend_refuses_is_told(frontend):
    frontend.refuses = "hidden_dim should be multiple of 8"
    with pytest.raises(CudaError, match=r"cuDNN refuses attention of .*: ValueError: hidden_dim"):
        Cudnn().describe(record(FORWARD))


def test_a_missing_package_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(DeviceError, match=r"pip install 'actorflow\[cudnn\]'.*ACTORFLOW_CUDNN=0"):
        Cudnn()


@pytest.mark.parametrize(
    ("there", "version", "words"),
    [
        ((), (9, 25), "its packages are missing"),
        (("cudnn",), (9, 25), "its packages are missing"),
        (("cudnn", "cuda.bindings"), None, "the library itself (libcudnn.so.9) is missing"),
        (("cudnn", "cuda.bindings"), (9, 19), "the one here is 9.19, older than 9.25"),
        (("cudnn", "cuda.bindings"), (9, 25), ""),
        (("cudnn", "cuda.bindings"), (10, 0), ""),
    ],
)
def test_plans_are_made_where_all_packages_are_and_new_enough(monkeypatch, there, version, words):
    """The packages of torch have an older library beside them."""

    def find_spec(name):
        if name == "cuda.bindings" and name not in there:
            raise ModuleNotFoundError(name)
        return name if name in there else None

    monkeypatch.setattr(cudnn.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(cudnn, "_version", lambda: version)
    assert cudnn.why_not() == words
    assert cudnn.can_run() is not bool(words)


@pytest.mark.parametrize(("said", "version"), [(92801, (9, 28)), (91900, (9, 19)), (90501, (9, 5))])
def test_the_version_is_what_the_library_says(monkeypatch, said, version):
    library = SimpleNamespace(cudnnGetVersion=Function(said))
    monkeypatch.setattr(cudnn.ctypes, "CDLL", lambda path: library)
    assert cudnn._version.__wrapped__() == version


class Function:
    """A function of a library."""

    def __init__(self, answer):
        self._answer = answer

    def __call__(self):
        return self._answer


def test_what_the_frontend_looks_for_by_name_is_loaded_before_it(monkeypatch):
    """Of several environments it knows its own, and cuDNN may be in another."""
    done = []
    monkeypatch.setattr(cudnn, "find_library", lambda name: f"/there/{name}")
    monkeypatch.setattr(cudnn.nvrtc, "is_here", lambda: done.append("nvrtc"))
    monkeypatch.setattr(cudnn.ctypes, "CDLL", done.append)
    monkeypatch.setattr(cudnn.importlib, "import_module", done.append)
    Cudnn()
    assert done == ["nvrtc", "/there/libcudart.so.13", "/there/libcudnn.so.9", "cudnn"]


# -- the frontend itself -------------------------------------------------------------------------


@pytest.fixture
def library():
    pytest.importorskip("cudnn", reason="needs the extra [cudnn]")
    return Cudnn()


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECORDS)
def test_the_graph_of_the_frontend_reads_back_as_the_record(library, name):
    graph = library.describe(RECORDS[name])
    assert read_back(str(graph)) == RECORDS[name]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"foo_bar": 3}, "not ours: foo_bar"),
        ({"use_causal_mask": True}, "not ours: use_causal_mask"),
        ({"diagonal_alignment": "TOP_LEFT"}, "TOP_LEFT"),
    ],
    ids=str,
)
def test_the_frontend_takes_what_we_refuse(library, monkeypatch, more, words):
    module = library._cudnn
    given = {
        key: getattr(module.diagonal_alignment, value) if isinstance(value, str) else value
        for key, value in more.items()
    }
    right = module.pygraph.sdpa

    def sdpa(self, **options):
        kept = {k: v for k, v in options.items() if "use_causal_mask" not in given or k in KEPT}
        return right(self, **kept | given)

    monkeypatch.setattr(module.pygraph, "sdpa", sdpa)
    with pytest.raises(UnknownGraph, match=words):
        library.describe(record(FORWARD))


KEPT = ("name", "q", "k", "v", "generate_stats", "attn_scale")


@pytest.mark.cuda
def test_the_frontend_refuses_heads_that_are_not_8n(library):
    odd = replace(tensor("q"), shape=(B, H, S, 12))
    tensors = tuple([replace(odd, name=n) if n != "lse" else tensor(n) for n in FORWARD])
    with pytest.raises(CudaError, match="hidden_dim"):
        library.describe(SdpaCall(tensors, 0.125, True))
