"""Libraries of NVIDIA are found in every environment's packages, then in a toolkit."""

import importlib.util
from types import SimpleNamespace

import pytest

from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.nvrtc import find_library, places_of


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Return a function that puts empty files somewhere; two environments have packages."""
    roots = [str(tmp_path / "own" / "nvidia"), str(tmp_path / "other" / "nvidia")]
    found = SimpleNamespace(submodule_search_locations=roots)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(nvrtc, "_USUAL_TOOLKIT", str(tmp_path / "usual"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)

    def put(*files):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path

    return put


def test_packages_of_any_environment_come_before_a_toolkit(here, monkeypatch):
    one, other, mine = (
        "other/nvidia/cu13/lib/liba.so.1", "usual/lib64/liba.so.1", "mine/lib64/liba.so.1",
    )  # fmt: skip
    root = here(one, other, mine)
    monkeypatch.setenv("CUDA_HOME", str(root / "mine"))
    assert places_of("liba.so.1") == [root / one, root / mine, root / other]
    assert find_library("liba.so.1") == str(root / one)


def test_the_own_environment_comes_first(here):
    own, other = "own/nvidia/cudnn/lib/libb.so.9", "other/nvidia/cudnn/lib/libb.so.9"
    root = here(own, other)
    assert find_library("libb.so.9") == str(root / own)


def test_the_whole_cudnn_comes_before_the_small_one(here):
    small, whole = "own/nvidia/cudnn_jit/lib/libb.so.9", "own/nvidia/cudnn/lib/libb.so.9"
    root = here(small)
    assert find_library("libb.so.9") == str(root / small)
    here(whole)
    assert places_of("libb.so.9") == [root / whole, root / small]


def test_what_is_nowhere_is_left_to_the_loader(here, monkeypatch):
    here()
    assert find_library("libc.so.9") == "libc.so.9"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert places_of("libc.so.9") == []
