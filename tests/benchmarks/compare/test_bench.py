import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorflow.cli import main as cli
from actorflow.cli.main import main
from actors.device.cuda.nvml import NvmlDevice, NvmlDevices
from benchmarks.compare import command as cli_bench
from benchmarks.compare.disturbance import HostTimes
from benchmarks.compare.engines import Child, EngineError
from compiler.contract.errors import DeviceError

FAKE = str(Path(__file__).with_name("fake_engine.py"))
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def same_modules(monkeypatch):
    """Let the command line run the modules that the tests import, and not a second copy."""
    for module in ("command", "engines", "measure", "report"):
        name = f"benchmarks.compare.{module}"
        monkeypatch.setitem(sys.modules, f"{cli._BENCH}.{module}", sys.modules[name])
    monkeypatch.setitem(sys.modules, cli._BENCH, None)  # is replaced; taken away after the test


class Fakes(dict):
    """Fake engines in the place of all; the answer of one can be set. `bench` runs them."""

    def bench(self, *words, **tools):
        return cli_bench.main(words, cli_bench.BenchTools(**{"start": self.start, **tools}))


@pytest.fixture
def fakes(tmp_path):
    answers = Fakes()

    def start(environments, engine, task, variant, is_cold):
        found = answers.get(engine.name, ("2.5", "4.0", "never"))
        if isinstance(found, BaseException):
            raise found
        command = (sys.executable, "-S", FAKE, *found[:2], str(tmp_path / "log"), found[2])
        return Child(engine.name, (*command, engine.name), {})

    answers.start = start
    return answers


def test_rows_of_both_precisions_end_in_one_json(fakes, tmp_path, capsys):
    fakes["torch"] = ("2.5", "6.0", "never")
    file = tmp_path / "found.json"
    code = fakes.bench("mlp", "--against", "torch", "--rounds", "1", "--json", str(file))
    assert code == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["row"], r["precision"], r["ratio_to_best_rival"]) for r in rows] == [
        ("mlp", "fp32", 1.5),
        ("mlp", "bf16", 1.5),
    ]
    assert "the best rival is torch; ours is 1.50 x as fast" in capsys.readouterr().out


def test_one_precision_can_be_asked_for(fakes, tmp_path):
    file = tmp_path / "found.json"
    fakes.bench("gpt:bf16", "--against", "", "--rounds", "1", "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["row"], row["precision"], row["rivals"]) == ("gpt", "bf16", {})


def test_a_difference_of_losses_is_an_error_and_the_next_row_goes_on(fakes, tmp_path, capsys):
    fakes["torch"] = ("2.52", "6.0", "never")
    file = tmp_path / "found.json"
    code = fakes.bench("mlp", "--against", "torch", "--rounds", "1", "--json", str(file))
    assert code == 1
    fp32, bf16 = json.loads(file.read_text())["rows"]
    assert (fp32["ms"], fp32["rivals"]) == (None, {})
    assert "which is more than 0.0001 apart" in fp32["failures"][0]
    assert bf16["ratio_to_best_rival"] == 1.5
    assert "ERROR: mlp fp32" in capsys.readouterr().err


def test_an_interrupt_prints_what_was_measured(fakes, capsys):
    measured = cli_bench.measure_row
    done = []

    def until_bf16(task, engines, method):
        if done:
            raise KeyboardInterrupt
        done.append(task)
        return measured(task, engines, method)

    words = ("mlp", "--against", "", "--rounds", "1")
    assert fakes.bench(*words, measure_row=until_bf16) == 130
    out = capsys.readouterr().out
    assert "| mlp fp32 | actorflow | 4 |" in out
    assert "| mlp bf16" not in out
    assert "- not measured (stopped by SIGINT): mlp bf16" in out


def test_a_row_is_in_the_files_before_the_next_one_begins(fakes, tmp_path):
    measured, files = cli_bench.measure_row, [tmp_path / name for name in ("a.json", "a.md")]
    seen = []

    def noting(task, engines, method):
        seen.extend([file.read_text() for file in files if file.exists()])
        return measured(task, engines, method)

    words = ("mlp", "--against", "", "--rounds", "1", "--json", files[0], "--markdown", files[1])
    assert fakes.bench(*map(str, words), measure_row=noting) == 0
    found, text = json.loads(seen[0]), seen[1]
    assert [row["precision"] for row in found["rows"]] == ["fp32"]
    assert (found["not_measured"], found["why_not_measured"]) == (["mlp bf16"], "not reached yet")
    assert "- not measured (not reached yet): mlp bf16" in text
    assert json.loads(files[0].read_text())["not_measured"] == []
    assert sorted(tmp_path.glob("a.*")) == files


def test_a_host_that_tells_no_stolen_time_is_named_once(fakes, capsys):
    words = ("mlp", "--against", "torch", "--rounds", "1")
    assert fakes.bench(*words, read_host=lambda: HostTimes(None, 0, 0, None, 0)) == 0
    out, err = capsys.readouterr()
    assert [text.count("stolen time is not known") for text in (out, err)] == [1, 1]


def test_our_own_failure_is_the_exit_code(fakes, capsys):
    fakes["actorflow"] = EngineError("actorflow: no kernel")
    assert fakes.bench("tiny", "--against", "jax", "--rounds", "1") == 1
    assert "- tiny fp32: actorflow: no kernel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["giant"], "expected rows among tiny:fp32, mlp:fp32, mlp:bf16"),
        (["tiny:bf16"], "got 'tiny:bf16'"),
        (["--rounds", "0"], "--rounds: expected 1 or more, got 0"),
        (["--seconds", "0"], "--seconds: expected more than 0, got 0"),
        (["--html", os.devnull], "is no file, and a file is to be put in its place"),
        (["--against", "mxnet"], "got 'mxnet'"),
        (["--launches", "--device", "cuda"], "--launches times the host's launches"),
        (["--gpu", "h200"], "--gpu h200 is given, and the job runs on host:0, which is no GPU"),
        (["--gpu", "h20", "--device", "cuda"], "--gpu: no GPU is called 'h20'"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at: no such directory"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_runs(capsys, arguments, expected):
    assert main(["bench", *arguments]) == 1
    assert expected in capsys.readouterr().err


def test_a_gpu_that_is_not_here_is_missed_before_anything_runs(fakes):
    nothing = NvmlDevices(problem="no driver here")
    with pytest.raises(DeviceError, match="--device cuda measures a GPU, and no driver here"):
        fakes.bench("tiny", "--device", "cuda", listed_gpus=lambda environ: nothing)


def test_the_emulation_is_no_gpu_to_measure(fakes, monkeypatch, capsys):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    assert main(["bench", "tiny", "--device", "cuda"]) == 1
    assert "ACTORFLOW_CUDA=emulated runs on the host" in capsys.readouterr().err


def test_on_a_gpu_larger_rows_are_measured_and_it_is_named(fakes, tmp_path, capsys):
    here = NvmlDevices((NvmlDevice("NVIDIA H200", "GPU-1", (9, 0), 1 << 37),), "580.1", (13, 0))
    file = tmp_path / "found.json"
    words = ["gpt2-b8", "--device", "cuda", "--rounds", "1", "--json", str(file)]
    assert fakes.bench(*words, listed_gpus=lambda environ: here) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert [*row["rivals"]] == ["torch", "torch.compile", "torch.reduce-overhead"]
    assert "NVIDIA H200, driver 580.1" in capsys.readouterr().out
    assert main(["bench", "gpt2-b8"]) == 1


def test_our_rows_are_planned_for_the_gpu_that_is_named(fakes):
    here = NvmlDevices((NvmlDevice("NVIDIA H200 NVL", "GPU-1", (9, 0), 1 << 37),), "580.1", (13, 0))
    named = {}

    def start(environments, engine, *rest):
        named[engine.name] = dict(engine.environment).get("ACTORFLOW_GPU")
        return fakes.start(environments, engine, *rest)

    words = ["gpt2-b8", "--device", "cuda", "--gpu", "h200", "--against", "torch", "--rounds", "1"]
    assert fakes.bench(*words, listed_gpus=lambda environ: here, start=start) == 0
    assert named == {"actorflow": "h200", "torch": None}


def test_a_picture_without_matplotlib_is_refused_politely(monkeypatch, capsys):

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--png", "a.png"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_tune_forgets_what_was_measured_in_the_cache_of_the_comparison(fakes, tmp_path):
    folders = []
    words = ["mlp:fp32", "--against", "", "--rounds", "1", "--env", str(tmp_path)]
    tools = {"retune": lambda settings: folders.append(settings.cache)}
    assert fakes.bench(*words, "--tune", **tools) == 0
    assert folders == [tmp_path / "cache" / "actorflow"]
    assert fakes.bench(*words, **tools) == 0
    assert len(folders) == 1


def process(words, folder):
    """Run Python with some words in a folder with a foreign package `benchmarks`."""
    foreign = folder / "benchmarks" / "compare"
    foreign.mkdir(parents=True)
    for file in (
        folder / "benchmarks" / "__init__.py",
        foreign / "__init__.py",
        foreign / "command.py",
    ):
        file.write_text("print('FOREIGN')\n\ndef main(words):\n    return 7\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_that_of_the_bench_of_the_clone_and_of_no_package_called_benchmarks(
    tmp_path, option
):
    done = process(["-m", "actorflow", "bench", option], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: actorflow bench [-h] [--against ENGINES]")
    assert "FOREIGN" not in done.stdout


def test_the_command_line_loads_nothing_of_the_bench_and_lists_it(tmp_path):
    code = """
import sys
from actorflow.cli.main import main
path = list(sys.path)
try:
    main(["--help"])
except SystemExit:
    pass
print([name for name in sys.modules if "bench" in name])
assert main(["bench", "no-row"]) == 1
print(path == sys.path, "benchmarks" in sys.modules)
"""
    done = process(["-c", code], tmp_path)
    assert "    bench     compare with other engines, row by row\n" in done.stdout
    assert done.stdout.endswith("[]\nTrue False\n")
    assert "expected rows among tiny:fp32" in done.stderr


def test_all_words_are_handed_on_untouched(monkeypatch):
    handed_on = []
    monkeypatch.setattr(cli_bench, "main", lambda words: handed_on.append(words) or 5)
    words = ["--device", "cuda", "-h", "--version", "gpt", "--", "--save", "x.py", "bench"]
    assert main(["bench", *words]) == 5
    assert handed_on == [words]


def test_a_word_that_means_nothing_is_an_error_of_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "tiny", "--fast"])
    assert ended.value.code == 2
    assert "actorflow bench: error: unrecognized arguments: --fast" in capsys.readouterr().err


@pytest.mark.parametrize("project", [None, 'name = "other"\n', 'name = "actorflow"\n'])
@pytest.mark.parametrize("words", [[], ["--help"], ["gpt", "--device", "cuda"]])
def test_without_a_clone_it_says_that_it_needs_one(tmp_path, monkeypatch, capsys, project, words):
    if project is None or "other" in project:
        (tmp_path / "benchmarks" / "compare").mkdir(parents=True)
        (tmp_path / "benchmarks" / "compare" / "command.py").write_text("raise RuntimeError")
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(f"[project]\n{project}")
    monkeypatch.setattr(cli, "_ROOT", tmp_path)
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("actorflow: bench needs a clone of the repository")
    assert "`pip install -e .`" in err
    assert err.count("\n") == 2
