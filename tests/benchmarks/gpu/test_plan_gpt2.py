"""GPT-2 is planned for a GPU that is not here, within the bytes that were set."""

import pytest
from gpu.plan_gpt2 import BUDGET, MOST_BYTES, launch_lines, main, planned

from compiler.contract.placement import Device, DeviceKind, StreamRole


@pytest.fixture(scope="module")
def free():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_CACHE", "off")
        return planned(64)


def test_a_step_of_64_texts_fits_the_bytes_that_were_set(free):
    assert 0 < free.arena_bytes - free.workspace_bytes <= MOST_BYTES
    assert sum(a.size_bytes for a in free.plan.arenas) > free.arena_bytes  # pinned memory beside it


def test_all_that_computes_is_on_the_gpu_and_copies_have_streams_of_their_own(free):
    streams = [stream for stream in free.plan.streams if stream.role is not StreamRole.PORT]
    assert {stream.device for stream in streams} == {Device(DeviceKind.CUDA)}
    assert {s.role for s in streams} == {StreamRole.COMPUTE, StreamRole.H2D, StreamRole.D2H}


def test_a_step_is_predicted_from_the_description_of_the_gpu(free):
    flops = 6 * 124e6 * 64 * 1024  # of products with weights alone
    assert flops / 770e12 < free.step_ms / 1e3 < 10 * flops / 770e12
    took_ms = sum([float(line.split()[0]) for line in launch_lines(free.plan)])
    assert free.step_ms == pytest.approx(took_ms, rel=0.05)


@pytest.mark.slow
def test_a_budget_of_12_gib_is_met_for_a_tenth_of_the_step(free, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    tight = planned(64, budget=BUDGET)
    assert tight.arena_bytes <= BUDGET < free.arena_bytes
    assert free.step_ms < tight.step_ms < 1.2 * free.step_ms


def test_the_command_prints_a_row_for_each_number(monkeypatch, capsys):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")  # given back after the test
    monkeypatch.setattr("sys.argv", ["plan_gpt2.py", "--batch", "1", "--launches"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert "GPT-2 124M, batch 1 x 1024" in printed
    assert "| tokens/s (predicted) |" in printed
    assert "cuda.matmul" in printed
