"""Graphs of cuDNN: believed where what they say is the record that they were made of."""

import ctypes
import importlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from error_texts import raises
from graphs_of_cudnn import RECORDS, B, H, S, conv, graph_of, record, tensor

from actors.device.cuda import cudnn
from actors.device.cuda.cudnn import Cudnn, InstalledCudnn, UnknownGraph, read_back
from actors.device.cuda.driver import CudaError
from actors.kernels.cuda.calls import BACKWARD, CONV, FORWARD, SdpaCall
from actors.kernels.cuda.cudnn_library import CudnnLibrary
from compiler.contract.errors import DeviceError
from compiler.contract.types import DType

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
        return getattr(self, "size", self.module.workspace_bytes)

    def serialize(self, *, as_bytes):
        assert as_bytes
        if self.module.has_no_words:
            raise RuntimeError("no words for it")
        return json.dumps(self.module.workspace_bytes).encode()

    def deserialize(self, handle, plan):
        self.module.streams.append(("read", handle))
        self.size = json.loads(plan)

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
    module.has_no_words, module.__version__, module.backend_version = False, "1.32", lambda: 92700
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
    with raises(UnknownGraph):
        Cudnn().describe(record(FORWARD))


def test_a_mask_that_gets_lost_is_an_error(frontend):
    graph = graph_of(record(FORWARD, causal=False))
    frontend.pygraph = lambda **options: Lost(frontend, graph)
    with raises(UnknownGraph):
        Cudnn().describe(record(FORWARD))


class Lost(Graph):
    """Says another graph than the one it was told."""

    def __init__(self, module, other):
        super().__init__(module)
        self.other = other

    def __str__(self):
        return json.dumps(self.other)


@pytest.mark.parametrize(("keeps_scores", "limit"), [(False, "0"), (True, "-1")])
def test_a_plan_is_the_librarys_own_within_the_workspace_in_the_way_of_the_call(
    frontend, monkeypatch, keeps_scores, limit
):
    monkeypatch.setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "77")
    choice = Cudnn().choose(replace(record(BACKWARD), keeps_scores=keeps_scores), 4096)
    assert choice.graph.done == [
        ("limit", limit),
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
    with raises(CudaError) as caught:
        Cudnn().choose(record(BACKWARD), 4096)
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
    with raises(CudaError):
        library.run(choice, (10, 20, 30, 40, 50), 60, 7)
    library.close()
    library.close()
    assert frontend.streams[1:] == [("handle", 7), ("gone", "handle")]


CALL = record(BACKWARD)


def kept(folder, gpu="NVIDIA H100, 9.0"):
    """Return a library that has been opened, and keeps its plans."""
    library = Cudnn(gpu, folder)
    library.open()
    return library


def test_a_plan_that_was_built_is_read_and_not_built_again(frontend, tmp_path, caplog):
    built = kept(tmp_path).choose(CALL, 4096)
    assert ("built",) in built.graph.done
    frontend.streams.clear()
    read = kept(tmp_path).choose(CALL, 4096)
    assert read.graph.done == []
    assert read.workspace_bytes == built.workspace_bytes == 64
    # The frontend captures on the handle's stream, which may be gone.
    assert frontend.streams == [("handle", 0), ("read", "handle")]
    assert caplog.records == []
    kept(tmp_path).run(read, (1,) * 9, 0, 5)
    assert read.graph.done[-1][0] == "ran"


@pytest.mark.parametrize("other", ["gpu", "cuDNN", "frontend", "call", "way", "workspace"])
def test_a_plan_is_for_one_call_gpu_and_version(frontend, tmp_path, other):
    kept(tmp_path).choose(CALL, 4096)
    call, size, gpu = CALL, 4096, "NVIDIA H100, 9.0"
    match other:
        case "gpu":
            gpu = "NVIDIA H200, 9.0"
        case "cuDNN":
            frontend.backend_version = lambda: 92701
        case "frontend":
            frontend.__version__ = "1.33"
        case "call":
            call = replace(call, scale=0.5)
        case "way":
            call = replace(call, keeps_scores=True)
        case "workspace":
            size = 8192
    assert ("built",) in kept(tmp_path, gpu).choose(call, size).graph.done


def spoiled(path):
    path.write_bytes(b"{" + path.read_bytes()[1:])


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def of_anyone(path):
    path.chmod(0o666)


def linked(path):
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


@pytest.mark.parametrize("harm", [spoiled, cut, of_anyone, linked])
def test_a_plan_that_is_damaged_or_anothers_is_built_anew_with_a_line_of_log(
    frontend, tmp_path, caplog, harm
):
    kept(tmp_path).choose(CALL, 4096)
    (path,) = tmp_path.glob("*.cudnn")
    harm(path)
    assert ("built",) in kept(tmp_path).choose(CALL, 4096).graph.done
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert str(path) in line
    assert line.endswith("not used: cuDNN builds its plan again")
    caplog.clear()
    assert kept(tmp_path).choose(CALL, 4096).graph.done == []
    assert caplog.records == []


def test_a_plan_that_the_library_does_not_take_is_built_anew(frontend, tmp_path, caplog):
    kept(tmp_path).choose(CALL, 4096)

    def deserialize(self, handle, plan):
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    Odd = type("Odd", (Graph,), {"deserialize": deserialize})
    frontend.pygraph = lambda **options: Odd(frontend, **options)
    assert ("built",) in kept(tmp_path).choose(CALL, 4096).graph.done
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "RuntimeError: CUDNN_STATUS_EXECUTION_FAILED" in line


def test_a_plan_that_cannot_be_said_or_written_is_built_each_time(frontend, tmp_path, caplog):
    frontend.has_no_words = True
    kept(tmp_path).choose(CALL, 4096)
    assert [*tmp_path.iterdir()] == []
    frontend.has_no_words = False
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", None):
        for _ in range(2):
            assert ("built",) in kept(folder).choose(CALL, 4096).graph.done
    assert caplog.records == []


def test_what_the_frontend_refuses_is_told(frontend):
    frontend.refuses = "hidden_dim should be multiple of 8"
    with raises(CudaError):
        Cudnn().describe(record(FORWARD))


def test_a_missing_package_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with raises(DeviceError):
        Cudnn()


@pytest.mark.parametrize(
    ("there", "version", "words"),
    [
        ((), (9, 25), "its packages are missing"),
        (("cudnn",), (9, 25), "its packages are missing"),
        (("cudnn", "cuda.bindings"), None, "the library itself (libcudnn.so.9) is missing"),
        (("cudnn", "cuda.bindings"), (9, 18), "the one here is 9.18, older than 9.19"),
        (("cudnn", "cuda.bindings"), (9, 19), ""),
        (("cudnn", "cuda.bindings"), (10, 0), ""),
    ],
)
def test_plans_are_made_where_all_packages_are_and_new_enough(
    monkeypatch, put_library, there, version, words
):
    """The packages of torch have a library of their own beside them."""

    def find_spec(name):
        if name == "cuda.bindings" and name not in there:
            raise ModuleNotFoundError(name)
        return name if name in there else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    put_library(version)
    assert cudnn.why_not() == words
    assert cudnn.can_run() is not bool(words)
    assert cudnn.library_here() == (None if words else CudnnLibrary(version))


def test_a_plan_may_need_a_newer_library_than_the_one_here(monkeypatch, put_library):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    put_library((9, 19))
    assert cudnn.why_not((9, 19)) == ""
    assert cudnn.why_not((9, 25)) == "the one here is 9.19, older than 9.25"


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Files of three libraries, of which the whole one alone has compiled kernels."""
    names = {
        "whole": ("libcudnn.so.9", "libcudnn_engines_precompiled.so.9"),
        "jit": ("libcudnn.so.9",),
        "loader": ("libcudnn.so.9",),
    }
    for folder, files in names.items():
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).touch()
    cudnn.installed.cache_clear()
    yield tmp_path
    cudnn.installed.cache_clear()


@pytest.fixture
def put_library(folders, monkeypatch):
    """Return a function that puts a library of a version, or None, into the path of the loader."""

    def put(version, *names):
        def load(path):
            if version is None:
                raise OSError(path)
            major, minor = version
            return SimpleNamespace(cudnnGetVersion=Function(10_000 * major + 100 * minor + 1))

        paths = [str(folders / name) for name in names or ["whole"]]
        monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(paths))
        monkeypatch.setattr(ctypes, "CDLL", load)

    return put


@pytest.mark.parametrize("version", [(9, 28), (9, 19), (9, 5)])
@pytest.mark.parametrize(("folder", "kind"), [("whole", "whole one"), ("jit", "small one")])
def test_which_library_is_here_is_what_it_says_and_what_lies_beside_it(
    folders, put_library, folder, kind, version
):
    path = str(folders / folder / "libcudnn.so.9")
    put_library(version, folder)
    found = cudnn.installed()
    assert found == InstalledCudnn(path, CudnnLibrary(version, is_jit=folder == "jit"))
    assert found.about.startswith(f"{version[0]}.{version[1]}, the {kind}")
    assert path in found.about


def test_the_first_library_of_the_loaders_path_is_taken(folders, put_library):
    put_library((9, 28), "empty", "loader", "whole")
    assert str(folders / "loader" / "libcudnn.so.9") in cudnn.installed().about


class Function:
    """A function of a library."""

    def __init__(self, answer):
        self._answer = answer

    def __call__(self):
        return self._answer


@pytest.mark.parametrize("path", [None, "/usr/lib/mine"])
def test_the_frontend_takes_the_library_that_is_found(monkeypatch, path):
    """Of several environments it knows its own, and cuDNN may be in another."""
    done, before = [], {"LD_LIBRARY_PATH": path} if path else {}
    monkeypatch.setattr(os, "environ", dict(before))
    monkeypatch.setattr(cudnn, "find_library", lambda name: f"/there/{name}")
    monkeypatch.setattr(cudnn.nvrtc, "is_here", lambda: done.append("nvrtc"))
    monkeypatch.setattr(ctypes, "CDLL", done.append)

    def import_module(name):
        done.append((name, cudnn.os.environ["LD_LIBRARY_PATH"]))

    monkeypatch.setattr(importlib, "import_module", import_module)
    Cudnn()
    path_there = f"/there:{path}" if path else "/there"
    imported = "cudnn", path_there
    assert done[:3] == ["nvrtc", "/there/libcudart.so.13", "/there/libcublasLt.so.13"]
    assert done[3:] == ["/there/libcudnn.so.9", imported]
    assert cudnn.os.environ == before


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
        ({"foo_bar": 3}, "unknown parameters: foo_bar"),
        ({"use_causal_mask": True}, "unknown parameters: use_causal_mask"),
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
