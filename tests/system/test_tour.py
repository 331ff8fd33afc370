import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks_of(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.host("the tour compiles for the host")
def test_the_code_of_the_tour_runs_top_to_bottom(run_python):
    blocks = blocks_of(ROOT / "docs" / "tour.md")
    assert len(blocks) >= 8
    run_python("\n".join(blocks))


@pytest.mark.one_device("sets a budget in bytes of one arena")
@pytest.mark.no_gpu("products have workspaces there, larger than the budgets of the page")
def test_the_code_about_memory_runs_top_to_bottom(run_python):
    blocks = blocks_of(ROOT / "docs" / "memory.md")
    assert len(blocks) >= 4
    done = run_python("\n".join(blocks))
    assert "the smallest budget found feasible is" in done.stdout


@pytest.mark.no_gpu("an op of a numpy function, and a kernel of one's own, are for the host")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("native", ["1", "0"])
def test_the_code_about_extending_runs_top_to_bottom_with_a_compiler_and_without(
    run_python, native
):
    blocks = blocks_of(ROOT / "docs" / "extend.md")
    assert len(blocks) >= 6
    run_python("\n".join(blocks), ACTORFLOW_NATIVE=native)


@pytest.mark.no_gpu("the page is about the host's kernels")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("native", ["1", "0"])
def test_the_code_about_kernels_runs_top_to_bottom_with_native_ones_and_without(run_python, native):
    blocks = blocks_of(ROOT / "docs" / "kernels.md")
    assert len(blocks) >= 5
    run_python("\n".join(blocks), ACTORFLOW_NATIVE=native)


def test_the_code_about_training_runs_top_to_bottom(run_python):
    blocks = blocks_of(ROOT / "docs" / "training.md")
    assert len(blocks) >= 6
    run_python("\n".join(blocks))


def test_the_code_about_callbacks_runs_top_to_bottom(run_python):
    run_python("\n".join(blocks_of(ROOT / "docs" / "callbacks.md")))


@pytest.mark.parametrize(("page", "steps"), [("index", 200), ("long_runs", 400)])
def test_a_run_of_the_page_that_is_done_does_nothing_when_it_is_started_again(
    run_python, page, steps
):
    code = "\n".join(blocks_of(ROOT / "docs" / f"{page}.md"))
    assert f"step {steps}/{steps}" in run_python(code).stdout
    assert f"nothing to do: {steps} steps are done" in run_python(code).stdout


def test_the_code_about_lengths_runs_top_to_bottom(run_python):
    run_python("\n".join(blocks_of(ROOT / "docs" / "lengths.md")))


def test_the_code_about_onnx_runs_top_to_bottom(run_python):
    pytest.importorskip("onnx", reason="needs onnx, of the extra [onnx]")
    run_python("\n".join(blocks_of(ROOT / "docs" / "onnx.md")))


def test_the_code_about_weights_runs_top_to_bottom(run_python):
    blocks = blocks_of(ROOT / "docs" / "weights.md")
    assert len(blocks) >= 6
    done = run_python("\n".join(blocks))
    assert done.stdout.startswith("5 loaded, missing nothing, unused nothing\n")


@pytest.mark.host("the plan that the page looks at is one for the host")
def test_the_code_about_generating_text_runs_top_to_bottom(run_python):
    blocks = blocks_of(ROOT / "docs" / "generate.md")
    assert len(blocks) >= 4
    run_python("\n".join(blocks), PYTHONPATH=str(ROOT / "examples"))


@pytest.mark.host("eager mode computes on the host")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("native", ["1", "0"])
def test_the_code_about_eager_mode_runs(run_python, native):
    blocks = blocks_of(ROOT / "docs" / "eager.md")
    assert len(blocks) >= 4
    run_python("\n".join(blocks), ACTORFLOW_NATIVE=native)


def test_the_code_about_debugging_runs_top_to_bottom(run_python):
    blocks = blocks_of(ROOT / "docs" / "debugging.md")
    assert len(blocks) >= 5
    done = run_python("\n".join(blocks))
    assert "log (" in done.stdout
    assert done.stdout.count("h: mean") >= 8


@pytest.mark.parametrize("page", ["from_torch.md", "optimizers.md"])
def test_the_code_of_a_page_runs(page, run_python):
    run_python("\n".join(blocks_of(ROOT / "docs" / page)))


def test_the_readme_example_is_the_shipped_example_in_short(run_python):
    blocks = blocks_of(ROOT / "README.md")
    code = blocks[0]
    assert "@af.job" in code
    short = code.replace("steps=1300", "steps=2")
    assert short != code
    done = run_python(short, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


def test_the_model_of_the_page_to_start_with_learns(run_python):
    done = run_python(blocks_of(ROOT / "docs" / "start.md")[0])
    accuracies = [float(line) for line in done.stdout.splitlines()[-3:]]
    assert min(accuracies) > 0.8


def test_the_evaluation_of_the_page_to_start_with_runs_between_the_steps(run_python):
    done = run_python("\n".join(blocks_of(ROOT / "docs" / "start.md")[:3]))
    rows = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [step for step, _ in rows] == ["25", "50", "75", "100"]
    assert float(rows[-1][1]) > 0.8


def test_the_example_trains_samples_and_resumes(tmp_path):
    def demo(steps):
        return subprocess.run(
            [
                sys.executable, str(ROOT / "examples" / "char_gpt.py"), "--steps", str(steps),
                "--checkpoint", str(tmp_path / "run"), "--text", str(ROOT / "docs" / "tour.md"),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=100, check=True,
        ).stdout  # fmt: skip

    first = demo(2)
    assert "437,888 parameters on host:0" in first
    assert "step 2/2" in first
    second = demo(3)
    assert "resumed from the checkpoint of step 2" in second
    assert "step 3/3" in second
    text = second.split("-" * 72)[1]
    assert text.strip().startswith("def ")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") >= 2
