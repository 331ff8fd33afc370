import json
import subprocess
import sys
from pathlib import Path

import pytest

import actorflow as af
from actorflow.cli.main import EXAMPLES, EXIT_CODES, main, parse
from actorflow.environment.settings import __version__

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys
import numpy as np
import actorflow as af
from actorflow import nn

x = np.ones((8, 2), np.float32)

@af.job(optimizer=af.optim.SGD(0.1))
def train(model, batch):
    return model(batch.x).mean()

print("arguments", sys.argv[1:])
train.fit(nn.Linear(2, 1), af.data.ArraySource({"x": x}, batch=4), steps=2, progress=False)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["actorflow"])
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def defined_ops():
    """Names of ops by the text of their files: `X = define("name")`."""
    import re

    found = set()
    for file in (ROOT / "compiler" / "ops").rglob("*.py"):
        found.update(re.findall(r'\bdefine\(\s*"(\w+)"', file.read_text()))
    return found


def table_of_ops(*arguments):
    """Return the rows of `actorflow ops` by op and column, of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "actorflow", "ops", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "--json" in arguments:
        return {row["op"]: row for row in json.loads(done.stdout)}
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    head, _, *rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_table_of_ops_is_whole_and_says_what_is_derived():
    by_name = table_of_ops("--full")
    assert by_name == table_of_ops("--json")
    assert defined_ops() <= set(by_name)
    for name in ("add", "mul", "matmul", "sum"):
        assert by_name[name]["gradient"] in ("yes", "derived")
    assert by_name["matmul"]["reference"] == "yes"
    assert "numpy" in by_name["matmul"]["kernels"].split()
    assert by_name["add"]["reference"] == "derived"
    assert by_name["add"]["kernels"] == "fused"
    assert by_name["add"]["file"] == "compiler/ops/families/arithmetic.py"


def test_ops_of_a_user_stand_in_the_table_with_their_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import actorflow as af\n\n\n"
        '@af.op("x -> y", gradient=lambda dy: 2 * dy)\ndef doubled(x):\n    return x + x\n\n\n'
        '@af.numpy_op("x -> y")\ndef copied(x, y):\n    y[...] = x\n'
    )
    by_name = table_of_ops("--full", str(file))
    assert by_name["doubled"]["file"] == by_name["copied"]["file"] == str(file)
    assert (by_name["doubled"]["infer_type"], by_name["doubled"]["gradient"]) == ("derived", "yes")
    assert (by_name["copied"]["kernels"], by_name["copied"]["gradient"]) == ("python", "-")


def test_the_table_of_ops_names_what_is_not_known_of_each(capsys):
    assert main(["ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| op | gradient | kernels | not known | file |"
    (argsort,) = [line for line in lines if line.startswith("| argsort |")]
    assert "gradient" in argsort.split(" | ")[3]


def test_a_plan_is_told_as_json_with_the_sizes_of_its_text(script, capsys):
    assert main(["plan", script, "--json", "--epochs", "3"]) == 0
    told, printed = capsys.readouterr()
    assert printed == "arguments ['--epochs', '3']\n"
    facts = json.loads(told)
    assert (facts["job"], facts["num_parameters"], facts["num_ranks"]) == ("train", 3, 1)
    (arena,) = facts["arenas"]
    assert sum(arena["parts"].values()) == arena["size_bytes"] >= arena["lower_bound_bytes"]
    assert {"data", "metrics"} < {actor["name"] for actor in facts["actors"]}


@pytest.mark.parametrize("command", sorted(EXAMPLES))
def test_the_help_of_a_command_has_an_example_that_its_parser_takes(command, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Example: {EXAMPLES[command]}" in shown
    assert EXIT_CODES in shown
    words = EXAMPLES[command].split(" >> ")[0].split()
    assert words[: 1 + len(command.split())] == ["actorflow", *command.split()]
    parse(words[1:])


def test_json_belongs_to_plan_and_simulate_and_to_the_script_that_is_run(script, capsys):
    for command in (["plan"], ["simulate", "--no-calibrate"]):
        assert main([*command, script, "--json", "a"]) == 0
        told, printed = capsys.readouterr()
        assert isinstance(json.loads(told), dict)
        assert printed == "arguments ['a']\n"
        assert main([*command, script, "--", "--json"]) == 0
        assert capsys.readouterr().out.startswith("arguments ['--json']\n")
    assert main(["run", script, "--json"]) == 0
    assert capsys.readouterr().out == "arguments ['--json']\n"
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["run", "--json", script])
    assert "unrecognized arguments: --json" in capsys.readouterr().err


def test_the_help_says_what_exit_codes_mean(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    assert EXIT_CODES in " ".join(capsys.readouterr().out.split())


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"actorflow {__version__}\n"


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (["--epochs", "3"], ["--epochs", "3"]),
        (["--epochs=3", "-v"], ["--epochs=3", "-v"]),
        (["--", "--full", "--steps", "x"], ["--full", "--steps", "x"]),
        (["-v", "--", "--", "y"], ["-v", "--", "y"]),
    ],
)
@pytest.mark.parametrize(
    ("command", "own"), [("plan", ["--full"]), ("simulate", ["--no-calibrate", "--steps", "2"])]
)
def test_what_a_command_does_not_know_is_its_scripts(
    script, capsys, command, own, given, handed_on
):
    assert main([command, script, *own, *given]) == 0
    assert f"arguments {handed_on}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [(["--steps", "3"], ["--steps", "3"]), (["--", "a", "--", "b"], ["a", "--", "b"])],
)
def test_a_script_that_is_run_gets_all_that_follows_it(script, capsys, given, handed_on):
    assert main(["run", script, *given]) == 0
    assert f"arguments {handed_on}" in capsys.readouterr().out


def test_what_no_script_can_take_is_an_error(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["plan", "some.plan", "--steps", "3"])
    assert "unrecognized arguments: --steps 3" in capsys.readouterr().err


@pytest.mark.parametrize("how", [["{}"], ["-m", "actorflow", "run", "{}"]])
def test_a_script_may_be_called_like_a_module_of_pythons_library(tmp_path, how):
    for name in ("bisect", "random"):
        file = tmp_path / name / f"{name}.py"
        file.parent.mkdir()
        file.write_text(SCRIPT)
        command = [sys.executable, *[word.format(file) for word in how]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("arguments") == 1


def test_the_names_of_the_package_are_those_that_it_promises():
    assert sorted(dir(af)) == sorted([*af.__all__, "__version__"])
    for name in dir(af):
        assert getattr(af, name) is not None


@pytest.mark.parametrize(
    "arguments",
    [["plan", "--device", "sim:1"], ["run", "--device", "sim:1"], ["run", "--device=sim:1"]],
)
def test_a_device_is_for_the_jobs_of_a_script_that_name_none(
    script, arguments, monkeypatch, capsys
):
    monkeypatch.setenv("ACTORFLOW_DEVICE", "host")  # given back after the test
    Path(script).write_text(SCRIPT.replace("progress=False", "progress=True"))
    assert main([*arguments, script]) == 0
    printed = capsys.readouterr()
    assert "sim:1" in printed.out + printed.err
    assert "arguments []" in printed.out


def test_a_device_that_is_none_and_one_for_a_plan_are_refused(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ACTORFLOW_DEVICE", "host")
    assert main(["plan", script, "--device", "gpu"]) == 1
    assert "actorflow: --device: no device is called 'gpu'; expected one of host, sim" in (
        capsys.readouterr().err
    )
    assert main(["plan", str(tmp_path / "some.plan"), "--device", "sim"]) == 1
    assert "--device sim is for scripts, and" in capsys.readouterr().err


def test_a_gpu_is_named_beside_its_device(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACTORFLOW_DEVICE", "host")  # given back after the test
    monkeypatch.setenv("ACTORFLOW_GPU", "")
    refused = [
        (["--gpu", "h20"], "--gpu: no GPU is called 'h20'; did you mean 'h200'?"),
        (
            ["--device", "sim", "--gpu", "h200"],
            "--gpu h200 is given, and the job runs on sim:0, which is no GPU",
        ),
    ]
    for given, text in refused:
        assert main(["plan", script, *given]) == 1
        assert text in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "some.plan"), "--gpu", "h200"]) == 1
    assert "--gpu h200 is for scripts, and" in capsys.readouterr().err


def test_a_gpu_before_a_script_is_no_argument_of_the_script(script, monkeypatch, capsys):
    monkeypatch.setenv("ACTORFLOW_GPU", "")
    for given in (["--gpu", "h200"], ["--gpu=h200"]):
        assert main(["run", *given, script]) == 0
        assert "arguments []" in capsys.readouterr().out
