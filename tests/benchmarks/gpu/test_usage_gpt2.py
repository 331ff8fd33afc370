"""What GPT-2's kernels use of a multiprocessor, by NVRTC, against the file that keeps it."""

import json

import pytest
from gpu import usage_gpt2
from gpu.usage_gpt2 import ARCHES, KEPT, gpt2_texts, kept_for, used_on, version_name

from actors.kernels.cuda import nvrtc
from actors.kernels.cuda.calls import KernelText

VERSIONS = ("13.0", "13.5")


@pytest.fixture(scope="module")
def texts():
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed: it comes with actorflow[cuda]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CUDNN", "0")  # given back after the tests
        return gpt2_texts()


@pytest.mark.cuda
@pytest.mark.parametrize("arch", ARCHES)
def test_gpt2s_kernels_use_the_registers_that_are_kept_and_spill_nothing(texts, arch):
    used, version = used_on(arch, texts), version_name()
    assert used.keys() == {name for text in texts for name in text.kernels}
    for name, row in used.items():
        registers, spilled, stack, shared = map(int, row.split())
        assert (spilled, stack) == (0, 0), name
        # Blocks of attention have 128 threads, others up to 512 of 65,536 registers.
        assert registers <= (255 if "flash" in name else 128), name
        assert shared <= 48 * 1024, name
    kept = kept_for(version)
    if kept is None:
        pytest.skip(f"{KEPT.name} has no NVRTC {version}: bounds hold, registers are not compared")
    assert used == kept[arch], "other kernels, or other registers: if they are meant, `make golden`"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_file_has_all_kernels_for_each_architecture_and_none_that_spills(version):
    about = json.loads(KEPT.read_text())["about"]
    kept = kept_for(version)
    assert [*kept] == sorted(ARCHES)
    for rows in kept.values():
        assert rows.keys() == about.keys()
        assert {tuple(row.split()[1:3]) for row in rows.values()} == {("0", "0")}


def test_a_version_that_was_asked_for_other_texts_leaves_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(usage_gpt2, "KEPT", tmp_path / "data" / "kept.json")
    one, two = [KernelText(f"{name}()", (name,), f"makes {name}") for name in ("one", "two")]
    row = "24 0 0 1024"
    usage_gpt2.keep("13.0", [one], {arch: {"one": row} for arch in ARCHES})
    usage_gpt2.keep("13.5", [one], {arch: {"one": row} for arch in ARCHES})
    assert usage_gpt2.kept_for("13.0") == usage_gpt2.kept_for("13.5")
    assert usage_gpt2.kept_for("12.9") is None
    capsys.readouterr()
    usage_gpt2.keep("13.5", [two], {arch: {"two": row} for arch in ARCHES})
    assert usage_gpt2.kept_for("13.0") is None
    assert usage_gpt2.kept_for("13.5")["sm_80"] == {"two": row}
    said = capsys.readouterr().out
    assert "NVRTC 13.0 is taken out" in said
    assert "NVRTC 13.5: 1 kernels, 24 registers at most" in said
