"""Texts for NVRTC: what cubins cost, how they are kept, and what a bad text says."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
from error_texts import raises
from fused_programs import Builder, known
from program_texts import texts_of

from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.calls import KernelText
from actors.kernels.cuda.loops import MAX_THREADS
from compiler.contract.errors import CompileError, DeviceError
from compiler.contract.program import Kind
from compiler.contract.types import DType

ARCHES = ("sm_80", "sm_90a", "sm_100")


def storing(number):
    """A kernel that stores a number."""
    text = f"""typedef struct {{ af_word w[1]; }} NAME_arguments;
    AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {{ *(float *)arguments.w[0].p = {number}; }}
    """
    return KernelText.of("small", text, ("NAME",), "one number", has_exchanges=False)


SMALL = storing("1.0f")


@pytest.fixture
def compiler():
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed: it comes with actorflow[cuda]")


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ARCHES)
def test_all_known_programs_compile_without_spills(compiler, arch):
    programs = known(8, 37)
    texts = {
        (name, is_cut, number): text
        for name, program in programs.items()
        for is_cut in (False, True)
        for number, text in enumerate(texts_of(program, is_cut=is_cut))
    }
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(functools.partial(nvrtc.usage, arch=arch), texts.values()))
    for name, text, used in zip(texts, texts.values(), found, strict=True):
        assert sorted(used) == sorted(text.kernels)
        for own, kernel in used.items():
            threads = MAX_THREADS if own.endswith("_rows") else 256
            assert (kernel.spilled_bytes, kernel.stack_bytes) == (0, 0), name
            assert kernel.registers * threads <= 64 * 1024, name
            assert kernel.shared_bytes <= 48 * 1024, name


@pytest.mark.cuda
def test_a_cubin_is_kept_by_all_that_decides_it(compiler, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    first = nvrtc.cubin(SMALL, "sm_90a", folder)
    assert first[:4] == b"\x7fELF"
    (kept,) = folder.iterdir()
    built = []
    original = nvrtc._build
    monkeypatch.setattr(nvrtc, "_build", lambda *call: built.append(call) or original(*call))
    assert nvrtc.cubin(SMALL, "sm_90a", folder) == first
    assert not built
    nvrtc.cubin(SMALL, "sm_80", folder)
    assert len(built) == 1
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-DOTHER"))
    nvrtc.cubin(SMALL, "sm_90a", folder)
    assert len(built) == 2
    assert len(list(folder.iterdir())) == 3
    monkeypatch.undo()
    kept.write_bytes(kept.read_bytes()[:-9])
    assert nvrtc.cubin(SMALL, "sm_90a", folder) == first


@pytest.mark.cuda
def test_several_texts_are_compiled_by_threads_in_their_order(compiler, tmp_path):
    other = storing("2.0f")
    found = nvrtc.cubins([SMALL, other], "sm_90a", tmp_path / "kept", 2)
    assert [SMALL.kernels[0].encode() in cubin for cubin in found] == [True, False]


@pytest.mark.cuda
def test_a_text_that_is_refused_says_what_the_compiler_says(compiler, tmp_path):
    broken = KernelText.of("broken", "AF_KERNEL NAME( { int x = ; }\n", ("NAME",), "a broken one")
    with pytest.raises(CompileError) as caught:
        nvrtc.cubin(broken, "sm_90a", tmp_path / "kept")
    text = str(caught.value)
    assert text.startswith("NVRTC 13.")
    assert "refuses kernels for sm_90a (a broken one): kernels.cu(1): error:" in text
    assert not (tmp_path / "kept").exists()


@pytest.mark.cuda
def test_an_architecture_that_there_is_not_is_refused(compiler):
    with pytest.raises(CompileError, match="invalid value for --gpu-architecture"):
        nvrtc.cubin(SMALL, "sm_1", None)


def test_without_the_library_the_package_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "_LIBRARY", "libnvrtc-that-nobody-has.so.13")
    nvrtc.loaded_library.cache_clear()
    try:
        assert not nvrtc.is_here()
        with raises(DeviceError):
            nvrtc.cubin(SMALL, "sm_90a", None)
    finally:
        nvrtc.loaded_library.cache_clear()


def test_the_builtins_are_there_before_a_compiler_that_asks_for_them_by_name(tmp_path, monkeypatch):
    """NVRTC 13.0 of the package looks only where the loader does."""
    folder = tmp_path / "lib64"
    folder.mkdir()
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13"):
        (folder / name).touch()
    loaded = []

    def load(path):
        loaded.append(path)
        return MagicMock()

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvrtc.loaded_library.__wrapped__()
    assert loaded == [
        str(folder / "libnvrtc-builtins.so.13.0"),
        str(folder / "libnvrtc.so.13"),
    ]
    loaded.clear()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if nvrtc.places_of("libnvrtc.so.13"):
        pytest.skip("the usual toolkit is here")
    monkeypatch.chdir(folder)  # what lies where somebody works is nobody's library
    nvrtc.loaded_library.__wrapped__()
    assert loaded == ["libnvrtc.so.13"]


@pytest.mark.cuda
@pytest.mark.parametrize("num_columns", [4, 11])
def test_numbers_of_many_columns_do_not_spill(compiler, num_columns):
    """Two batch norms that share a gradient read eleven of them, and three tensors of bfloat16."""
    b = Builder()
    low = [b.input(Kind.FULL, DType.BFLOAT16) for _ in range(3)]
    columns = [b.input(Kind.COLUMN) for _ in range(num_columns)]
    dy, *images = [b.op("cast", x, dtype=DType.FLOAT32) for x in low]
    outputs = []
    for number, x in enumerate(images):
        for place, column in enumerate(columns[number::2]):
            x = b.op(("sub", "mul", "add")[place % 3], x, column)
        outputs.append(b.op("cast", b.op("sub", dy, x), dtype=DType.BFLOAT16))
    for text in texts_of(b.program(*outputs), is_cut=False):
        for name, use in nvrtc.usage(text, "sm_90a").items():
            assert use.spilled_bytes == 0, name
