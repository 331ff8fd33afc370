import sys
from pathlib import Path

from error_texts import raises

from benchmarks.compare.engines import (
    OURS,
    RIVALS,
    ROOT,
    Child,
    EngineError,
    chosen_rivals,
    command_of,
    engines_on,
    environment_of,
)

TORCH, COMPILED, JAX, TENSORFLOW, ONNXRUNTIME, OPENVINO = RIVALS
SCRIPTS = ROOT / "benchmarks" / "engines"


def test_every_engine_has_its_script():
    assert [(SCRIPTS / engine.script).is_file() for engine in (OURS, *RIVALS)] == [True] * 7


def test_what_reads_onnx_is_compared_where_rows_infer_in_float32():
    cases = [("fp32", False), ("fp32", True), ("bf16", False)]
    for engine in (ONNXRUNTIME, OPENVINO):
        assert [engine.takes(*case) for case in cases] == [True, False, False]
    assert [TORCH.takes(*case) for case in cases] == [True] * 3


def test_rivals_are_chosen_by_name_once_each():
    assert chosen_rivals("jax, torch,jax", RIVALS) == (JAX, TORCH)
    assert chosen_rivals("", RIVALS) == ()
    assert chosen_rivals(None, RIVALS) == RIVALS


def test_an_unknown_rival_is_refused_with_the_known_ones():
    with raises(EngineError):
        chosen_rivals("torch,mxnet", RIVALS)


def test_a_missing_environment_says_what_makes_it(tmp_path):
    with raises(EngineError):
        command_of(JAX, SCRIPTS, tmp_path)


def test_on_a_gpu_the_rivals_are_torch_three_times_and_jax():
    ours, rivals = engines_on("cuda")
    assert [(e.name, e.variants) for e in (ours, *rivals)] == [
        ("actorflow", ("",)),
        ("torch", ("eager",)),
        ("torch.compile", ("default",)),
        ("torch.reduce-overhead", ("reduce-overhead",)),
        ("jax", ("jit",)),
    ]
    assert {engine.device for engine in (ours, *rivals)} == {"cuda"}


def test_on_a_gpu_a_rival_without_an_environment_is_that_of_this_python(tmp_path):
    _, rivals = engines_on("cuda")
    command = command_of(rivals[0], SCRIPTS, tmp_path)
    assert command == (sys.executable, str(SCRIPTS / "torch_engine.py"))


def test_a_missing_script_says_where_the_comparison_runs(tmp_path):
    with raises(EngineError):
        command_of(OURS, tmp_path, tmp_path)


def test_ours_runs_in_this_python():
    assert command_of(OURS, SCRIPTS, Path("/nowhere"))[0] == sys.executable


def test_what_the_shell_says_of_threads_and_kernels_does_not_reach_an_engine():
    shell = {"OPENBLAS_CORETYPE": "Prescott", "OMP_NUM_THREADS": "1", "HOME": "/h"}
    environment = environment_of(JAX, shell, Path("/cache"), 2)
    assert "OPENBLAS_CORETYPE" not in environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["HOME"] == "/h"
    assert environment["JAX_COMPILATION_CACHE_DIR"] == "/cache"


def test_what_does_not_start_is_named():
    with raises(EngineError):
        Child("ghost", ("/nowhere/python",), {})


def test_an_answer_that_is_no_json_is_shown():
    with (
        Child("chatty", (sys.executable, "-S", "-c", "print('hello')"), {}) as child,
        raises(EngineError),
    ):
        child.ask("first")


def test_a_child_can_be_ended_twice():
    child = Child("idle", (sys.executable, "-S", "-c", "input()"), {})
    child.end()
    child.end()
