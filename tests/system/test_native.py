"""Native kernels on machines that lack something: jobs run as well, and the log says what is not.

Each case is a process of its own, for what a process has loaded it keeps.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.cli.main import main
from actors.kernels.common.files import read_object
from actors.kernels.library import runtime, tuning

ROOT = Path(__file__).resolve().parents[2]

MODEL = """
import json, os, sys
import numpy as np
import actorflow as af
from actorflow import nn


class MLP(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(48, 64), nn.Linear(64, 32)

    def __call__(self, x):
        return self.down(af.gelu(self.up(x), approximate="tanh"))


@af.job(optimizer=af.optim.AdamW(1e-2), deterministic="MEASURED" not in os.environ)
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


x = np.random.default_rng(0).normal(size=(128, 48)).astype(np.float32)
data = af.data.ArraySource({"x": x, "y": x[:, :32].argmax(1).astype(np.int32)}, batch=32)
"""

PRINT = "print(json.dumps([losses, kernels, plan.fingerprint]))"

JOB = f"""{MODEL}
model = MLP()
plan = train.compile(model, data)
losses = [float(metrics["loss"]) for metrics in train.stream(model, data, steps=3)]
kernels = sorted({{launch.kernel for actor in plan.actors for launch in actor.launches}})
{PRINT}
"""

FIT = f"{MODEL}\ntrain.fit(MLP(), data, steps=3, progress=False)\n"

NAMED_COMPILER = """#!/bin/sh
for word; do
    case "$word" in *.c)
        if grep -q {word} "$word"; then
            echo "$word:7:7: error: {word} is too much for me" >&2
            exit 1
        fi
    esac
done
exec {cc} "$@"
"""


@pytest.fixture(scope="module")
def compiler():
    """The compiler of this machine; skips without one."""
    path = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if path is None:
        pytest.skip("there is no C compiler on this machine")
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start a program with native kernels; settings of the shell do not count."""
    folder = tmp_path_factory.mktemp("programs")

    def started(code, **settings):
        script = folder / "program.py"  # one path: a plan's key has the user's lines
        if not script.exists() or script.read_text() != code:
            script.write_text(code)
        dropped = ("ACTORFLOW_", "CC")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        environ |= {"ACTORFLOW_VERIFY": "1", **settings}
        return subprocess.Popen(
            [sys.executable, str(script)],
            cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return started


def result_of(process):
    """Return losses, kernels, fingerprint and log of a program that is to succeed."""
    output, log = process.communicate(timeout=100)
    assert process.returncode == 0, log
    return (*json.loads(output.splitlines()[-1]), log)


@pytest.fixture(scope="module")
def run(start):
    """Run a program and return its losses, kernels, fingerprint and log."""
    return lambda code=JOB, **settings: result_of(start(code, **settings))


@pytest.fixture(scope="module")
def numpys(run):
    """What the job comes to with numpy's kernels."""
    losses, kernels, _, log = run(ACTORFLOW_NATIVE="0", ACTORFLOW_CACHE="off")
    assert all(name.startswith("numpy.") for name in kernels)
    assert log == ""
    return losses


@pytest.fixture(scope="module")
def warm(run, compiler, numpys, tmp_path_factory):
    """A cache with all that the job needs, and what the job comes to with native kernels."""
    cache = tmp_path_factory.mktemp("warm")
    losses, kernels, _, log = run(ACTORFLOW_CACHE=str(cache))
    assert "c.fused" in kernels
    assert log == ""
    np.testing.assert_allclose(losses, numpys, rtol=1e-5)
    return cache, losses, kernels


@pytest.fixture
def cache(warm, tmp_path):
    """A copy of the warm cache without its plans."""
    shutil.copytree(warm[0] / "native", tmp_path / "cache" / "native")
    return tmp_path / "cache"


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


# compilers


def test_without_a_compiler_one_line_says_so_and_numpys_kernels_run(run, numpys, tmp_path):
    losses, kernels, _, log = run(PATH=str(tmp_path), ACTORFLOW_CACHE="off")
    assert losses == numpys
    assert all(name.startswith("numpy.") for name in kernels)
    assert log.splitlines() == [
        "no C compiler (cc, gcc or clang) is on the PATH: numpy's kernels run, which is slower;"
        " 'actorflow doctor' says by how much"
    ]


def test_a_compiler_that_does_not_run_is_named_as_cc_names_it(run, numpys):
    losses, _, _, log = run(CC="/bin/false", ACTORFLOW_CACHE="off")
    assert losses == numpys
    (line,) = log.splitlines()
    assert line.startswith("the C compiler CC=/bin/false does not run: numpy's kernels run")


def test_a_compiler_that_takes_nothing_is_quoted_once_and_numpys_kernels_run(run, numpys, tmp_path):
    cc = script(tmp_path / "mine", '#!/bin/sh\n[ "$1" = --version ] && exit\necho no error >&2\n')
    losses, _, _, log = run(CC=cc, ACTORFLOW_CACHE="off")
    assert losses == numpys
    assert log.splitlines() == [
        f"the C compiler {cc} ended with status 0: no error; numpy's kernels run, which is slower"
    ]


def test_a_group_that_the_compiler_refuses_is_named_and_numpys_kernel_runs_it(
    run, numpys, compiler, tmp_path
):
    # Of all groups the one that checks labels, and notes the row of a bad one, and it alone.
    cc = script(tmp_path / "mine", NAMED_COMPILER.format(word="i,.r.+.1", cc=compiler))
    losses, kernels, _, log = run(CC=cc, ACTORFLOW_CACHE=str(tmp_path))
    np.testing.assert_allclose(losses, numpys, rtol=1e-5)
    assert "c.fused" in kernels
    assert {"numpy.fused", "numpy.region"} & set(kernels)
    (line,) = log.splitlines()
    assert line.startswith("plan 'train': cross_entropy_rows: program of ")
    assert line.endswith(
        f"the C compiler {cc} ended with status 1: kernels.c:7:7: error: i,.r.+.1 is too"
        " much for me; numpy's kernels run in its place, which is slower"
    )
    assert not list(tmp_path.glob("*.plan")), "a mended compiler would never be asked again"


def test_a_file_of_ours_that_the_compiler_refuses_leaves_its_products_to_numpy(
    run, numpys, compiler, tmp_path
):
    cc = script(tmp_path / "mine", NAMED_COMPILER.format(word="af_gemm_small", cc=compiler))
    losses, kernels, _, log = run(CC=cc, ACTORFLOW_CACHE="off", MEASURED="1")
    np.testing.assert_allclose(losses, numpys, rtol=1e-5)
    assert "c.fused" in kernels
    assert not [name for name in kernels if name.startswith(("onednn.", "openblas."))]
    (line,) = log.splitlines()
    assert line.startswith(f"plan 'train': gemm.c: the C compiler {cc} ended with status 1:")
    assert line.endswith(
        "error: af_gemm_small is too much for me; numpy's kernels run in its place, which is slower"
    )


# caches


def test_a_cache_that_cannot_be_written_costs_a_build_and_no_more(run, warm, tmp_path):
    (tmp_path / "file").write_text("no folder")
    losses, kernels, _, log = run(ACTORFLOW_CACHE=str(tmp_path / "file"))
    assert (losses, kernels) == warm[1:]
    assert "plan cache: cannot keep the plan" in log


def test_half_a_library_in_the_cache_is_built_again(run, warm, cache):
    libraries = sorted((cache / "native").glob("*.so"))
    sizes = [library.stat().st_size for library in libraries]
    assert libraries
    for library in libraries:
        library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    losses, kernels, _, log = run(ACTORFLOW_CACHE=str(cache))
    assert (losses, kernels) == warm[1:]
    told = [line for line in log.splitlines() if "is damaged" in line]
    assert len(told) == len(log.splitlines()) == len(libraries)
    assert [library.stat().st_size for library in libraries] == sizes


def test_what_was_built_for_another_processor_is_never_loaded(run, warm, cache):
    foreign = {library.name for library in (cache / "native").glob("*.so")}
    other = "from actors.kernels.library import toolchain\ntoolchain.processor = lambda: 'other'\n"
    loaded = "print(open('/proc/self/maps').read(), file=sys.stderr)\n"
    losses, kernels, _, maps = run(other + JOB + loaded, ACTORFLOW_CACHE=str(cache))
    assert (losses, kernels) == warm[1:]
    ours = {Path(line.split()[-1]).name for line in maps.splitlines() if str(cache) in line}
    assert ours
    assert not ours & foreign


def functions_in(cache):
    """Return the generated functions of each library of a cache."""
    pattern = re.compile(rb"fused_[0-9a-f]{20}(?=_rows\0)")
    found = {path: pattern.findall(path.read_bytes()) for path in (cache / "native").glob("*.so")}
    return {path.name: {*names} for path, names in found.items() if names}


def test_another_batch_builds_nothing_and_another_activation_only_what_is_new(run, cache):
    kept = functions_in(cache)
    batch = JOB.replace("batch=32", "batch=16")
    losses, kernels, _, log = run(batch, ACTORFLOW_CACHE=str(cache))
    assert "c.fused" in kernels
    assert log == ""
    np.testing.assert_allclose(
        losses, run(batch, ACTORFLOW_NATIVE="0", ACTORFLOW_CACHE="off")[0], rtol=1e-5
    )
    assert functions_in(cache) == kept
    activation = JOB.replace('af.gelu(self.up(x), approximate="tanh")', "af.tanh(self.up(x))")
    run(activation, ACTORFLOW_CACHE=str(cache))
    new = {name: functions for name, functions in functions_in(cache).items() if name not in kept}
    assert new
    assert not set.union(*new.values()) & set.union(*kept.values())


def test_two_processes_may_build_the_same_kernels_at_once(start, warm, tmp_path):
    both = [start(JOB, ACTORFLOW_CACHE=str(tmp_path)) for _ in range(2)]
    assert [result_of(process)[:2] for process in both] == [warm[1:]] * 2


# libraries of products


@pytest.fixture
def onednn_is_here(warm):
    if not [name for name in warm[2] if name.startswith("onednn.")]:
        pytest.skip("oneDNN is not installed")


WITHOUT = """
from importlib import metadata
from actors.kernels.library import onednn

def files(name):
    raise metadata.PackageNotFoundError(name)

metadata.files = files
"""

REFUSING = """
from dataclasses import replace
from actors.kernels.library import onednn

class Refusing:
    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        if name == "{call}":
            return lambda *arguments: 3
        return getattr(self.calls, name)

library = onednn._library()
onednn._state.library = replace(library, calls=Refusing(library.calls))
"""


@pytest.mark.usefixtures("onednn_is_here")
def test_without_onednn_openblas_multiplies_also_where_a_plan_with_onednn_is_kept(
    run, warm, numpys
):
    losses, kernels, _, log = run(JOB.replace(MODEL, MODEL + WITHOUT), ACTORFLOW_CACHE=str(warm[0]))
    np.testing.assert_allclose(losses, numpys, rtol=1e-5)
    assert [name for name in kernels if name.startswith("openblas.")]
    assert not [name for name in kernels if name.startswith("onednn.")]
    assert log == ""


@pytest.mark.usefixtures("onednn_is_here")
@pytest.mark.parametrize(
    "call",
    [
        "dnnl_matmul_primitive_desc_create",
        "dnnl_memory_desc_create_with_strides",
    ],
)
def test_what_onednn_refuses_openblas_multiplies(run, cache, numpys, call):
    refusing = REFUSING.format(call=call)
    losses, kernels, _, log = run(JOB.replace(MODEL, MODEL + refusing), ACTORFLOW_CACHE=str(cache))
    np.testing.assert_allclose(losses, numpys, rtol=1e-5)
    assert [name for name in kernels if name.startswith("openblas.")]
    assert not [name for name in kernels if name.startswith("onednn.")]
    assert log == ""


# threads


def test_one_thread_and_two_give_the_same_bits(run, cache):
    runs = [run(ACTORFLOW_CACHE=str(cache), ACTORFLOW_THREADS=n)[:2] for n in ("1", "2")]
    assert runs[0] == runs[1]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_on_one_core_one_thread_computes_the_same_bits(run, warm, cache):
    bound = "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    told = "from actors.kernels.library import runtime\nassert runtime.num_threads() == 1\n"
    losses, kernels, _, _ = run(
        bound + JOB.replace(PRINT, told + PRINT), ACTORFLOW_CACHE=str(cache)
    )
    assert (losses, kernels) == warm[1:]


# plan files


def test_a_plan_file_of_native_kernels_runs_with_them_and_is_refused_without(
    run, cache, warm, tmp_path, monkeypatch
):
    saved = tmp_path / "train.plan"
    run(JOB.replace(PRINT, f"plan.save({str(saved)!r})\n{PRINT}"), ACTORFLOW_CACHE=str(cache))
    loading = JOB.replace("train.compile(model, data)", f"af.Plan.load({str(saved)!r})").replace(
        "train.stream(model, data, steps=3)", "af.Runner(plan).stream(data, steps=3)"
    )
    assert run(loading, ACTORFLOW_CACHE=str(cache))[:2] == warm[1:]
    monkeypatch.setenv("ACTORFLOW_NATIVE", "0")
    with raises(af.PlanFormatError):
        af.Runner(af.Plan.load(saved))


# the choice of libraries


def test_a_deterministic_job_has_one_plan_whatever_the_cache_and_measures_nothing(run, warm, cache):
    plans = [run(ACTORFLOW_CACHE=str(folder))[2] for folder in (warm[0], cache)]
    assert plans[0] == plans[1]
    assert not list((cache / "native").glob("tuning-*.json"))


def test_other_jobs_keep_what_they_measure_and_a_plan_of_their_own(run, cache):
    run(ACTORFLOW_CACHE=str(cache))
    ruled = set(cache.glob("*.plan"))
    run(ACTORFLOW_CACHE=str(cache), MEASURED="1")
    assert set(cache.glob("*.plan")) > ruled
    assert len(list((cache / "native").glob("tuning-*.json"))) == 1


def test_deterministic_is_a_bool(classify):
    with raises(af.CompileError):
        classify(deterministic="yes")


@pytest.fixture
def trained(cache, tmp_path, monkeypatch, native_toolchain, untuned, own_refusals):
    """A script that was run once, so that its products are measured, with the cache of a test."""
    monkeypatch.setenv("ACTORFLOW_CACHE", str(cache))
    monkeypatch.setenv("ACTORFLOW_NATIVE", "1")
    monkeypatch.setenv("MEASURED", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    file = tmp_path / "train.py"
    file.write_text(FIT)
    assert main(["run", str(file)]) == 0
    yield file
    runtime.disable()


def table(cache):
    (file,) = (cache / "native").glob("tuning-*.json")
    return read_object(file, tuning.ProductTable)


@pytest.mark.no_gpu("the host's kernels are measured")
@pytest.mark.parametrize("command", ["run", "plan"])
def test_tune_measures_anew_and_compiles_again(trained, cache, command, capsys):
    before, plans = table(cache), set(cache.glob("*.plan"))
    assert before.products
    assert main([command, "--tune", str(trained)]) == 0
    after = table(cache)
    assert after.epoch == before.epoch + 1
    assert set(after.products) == set(before.products)
    assert set(cache.glob("*.plan")) > plans


def test_a_script_behind_tune_gets_its_own_arguments(trained, tmp_path, capsys):
    trained.write_text("import sys\nprint(sys.argv[1:])\n")
    assert main(["run", "--tune", str(trained), "--steps", "7"]) == 0
    assert capsys.readouterr().out == "['--steps', '7']\n"


def test_tune_is_not_for_a_plan_whose_kernels_are_chosen(tmp_path, capsys):
    assert main(["plan", "--tune", "some.plan"]) == 1
    assert "some.plan are already chosen; give it the script" in (capsys.readouterr().err)


def test_tune_says_where_there_is_nothing_to_measure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACTORFLOW_NATIVE", "0")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    assert main(["run", "--tune", str(tmp_path / "empty.py")]) == 0
    assert "--tune measures nothing: native kernels are off" in capsys.readouterr().err


# numpy's own threads

THREADS = f"""{MODEL}
from actors.kernels.library import openblas

def seen(native, count=None):
    os.environ["ACTORFLOW_NATIVE"] = native
    os.environ.pop("ACTORFLOW_THREADS", None)
    os.environ |= {{"ACTORFLOW_THREADS": count}} if count else {{}}
    loss = lambda model, batch: af.cross_entropy(model(batch.x), batch.y)
    job = af.job(loss, optimizer=af.optim.SGD(0.1), deterministic=True)
    return [openblas.num_threads() for _ in job.stream(MLP(), data, steps=1)][0]

first = openblas.num_threads() or 0
runs = [("1",), ("0",), ("1",), ("0", str(first + 1)), ("1",), ("0",)]
print(json.dumps([first, [seen(*run) for run in runs], None]))
"""


def test_numpys_threads_are_its_own_again_when_a_run_of_its_kernels_begins(run, cache):
    environ = {"ACTORFLOW_CACHE": str(cache), "OPENBLAS_NUM_THREADS": "2"}
    first, seen, *_ = run(THREADS, **environ)
    if not first:
        pytest.skip("this numpy does not use OpenBLAS")
    assert seen == [1, first, 1, first + 1, 1, first]


# No products, for which files are built to measure them.
SIMULATED = """
import numpy as np
import actorflow as af


@af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
def train(model, batch):
    return af.gelu(model(batch.x)).mean()


data = af.data.ArraySource({"x": np.ones((256, 64), np.float32)}, batch=128)
if __name__ == "__main__":
    train.fit(af.nn.LayerNorm(64), data, steps=1, progress=False)
"""


def test_a_plan_that_is_only_simulated_builds_no_kernels(compiler, tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SIMULATED)
    env = {**os.environ, "ACTORFLOW_CACHE": str(cache), "ACTORFLOW_NATIVE": "1"}

    def built_by(*command):
        subprocess.run(
            [sys.executable, "-m", "actorflow", *command, str(script)],
            env=env, cwd=tmp_path, check=True, capture_output=True, timeout=100,
        )  # fmt: skip
        return sorted(cache.rglob("*.so"))

    # The pool of threads and the file of products, which native kernels begin with, and no more.
    first = built_by("simulate", "--no-calibrate")
    assert len(first) == 2
    assert built_by("plan") == first
    assert len(built_by("launch", "-n", "2")) >= 4
