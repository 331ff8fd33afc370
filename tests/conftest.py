"""Fixtures of all floors: native kernels are off unless a test asks for them."""

import gc
import os
import signal
import threading
import warnings
from pathlib import Path
from random import Random
from types import SimpleNamespace

import error_texts
import extras
import guard
import hypothesis
import pytest
import recorder
import tiers

from actors.kernels.common.files import distrust_of_folder
from actors.kernels.library import runtime, tuning
from actors.kernels.library.toolchain import find_toolchain
from compiler.passes import place

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption(
        "--native",
        action="store_true",
        help="let every job use native kernels, as a user's does; for tests/system",
    )
    parser.addoption(
        "--device",
        help="let every job that names no device run there, such as sim or cuda, which the host"
        " emulates; for tests/system. On several, as sim:0,sim:1, nodes are scattered over them",
    )
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default="nightly",
        help="merge leaves out tests marked slow, and all seeds of a test but the first",
    )
    parser.addoption(
        "--configuration",
        help="name of these options in tests/durations.json: files run longest first",
    )
    parser.addoption(
        "--measured", type=Path, help="=FILE: write there what each file of tests took, as JSON"
    )
    parser.addoption(
        "--torch", action="store_true", help="compare with torch itself; for tests/oracle"
    )
    parser.addoption(
        "--update-texts",
        action="store_true",
        help="write what errors say in the tests that pass into tests/data/errors",
    )
    parser.addoption("--sim-seed", default="0", help="how late simulated and emulated devices are")
    parser.addoption(
        "--record",
        type=Path,
        help="=FOLDER: write what jobs compute there, by hash (see tests/recorder/same_bits.py);"
        " where a whole run is there, without the tests that ran no job on a device",
    )


_GUARD = pytest.StashKey[int | None]()


def pytest_configure(config):
    """Let a run end as it would at a terminal, and leave no program behind."""
    # What a shell starts with `&` ignores ^C, and what nohup starts ignores SIGHUP. Programs that
    # tests start would inherit that, and their signals do nothing; a handler is not inherited.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    # Where bytecode may not lie beside its source, each program that a test starts would compile
    # all modules again: a third of what the suite takes. They share a folder instead.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "bytecode"))
    os.environ[tiers.TIER] = config.getoption("--tier")
    hypothesis.settings.register_profile("tier", max_examples=tiers.examples(100))
    hypothesis.settings.load_profile("tier")  # for properties that name no number
    config.pluginmanager.register(error_texts.ErrorTexts(config.getoption("--update-texts")))
    config.stash[_GUARD] = guard.start()
    if config.getoption("--measured") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(tiers.Stopwatch(config.getoption("--measured")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--tier") == "merge":
        items[:], left_out = tiers.split(items)
        config.hook.pytest_deselected(items=left_out)
    if config.getoption("--configuration"):
        items[:] = tiers.by_files(items, tiers.known_seconds(config.getoption("--configuration")))
    device = config.getoption("--device")
    skipped = {"host": "on the host alone"} if device else {}
    if device is not None and device.startswith("cuda"):
        skipped["no_gpu"] = "not on a GPU"
    if "," in (device or ""):
        skipped["one_device"] = "on one device"
    for item in items:
        for name, where in skipped.items():
            for mark in item.iter_markers(name):
                item.add_marker(pytest.mark.skip(reason=f"{where}: {mark.args[0]}"))
        for (extra,) in [mark.args for mark in item.iter_markers("extra")]:
            if packages := extras.missing(extra):
                why = f"needs the extra [{extra}]: {', '.join(packages)} not installed"
                item.add_marker(pytest.mark.skip(reason=why))
    if (folder := _recorded(config)) is not None:
        whole = sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/whole"))
        if whole and not (folder / "whole").exists():
            wanted = recorder.tests_on_devices(whole[0].parent)
            left_out = [i for i in items if not {i.nodeid, i.nodeid.partition("::")[0]} & wanted]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session):
    """Let the garbage collector pass over all tests that were collected: they stay to the end."""
    # 400,000 objects, 0.2 s a full collection: a tenth to a third of what small tests took.
    gc.collect()
    gc.freeze()


def _recorded(config):
    """Return the folder of this device and seed, for what jobs compute; None without --record."""
    folder = config.getoption("--record")
    if folder is None:
        return None
    return folder / f"{config.getoption('--device') or 'host'}-{config.getoption('--sim-seed')}"


@pytest.fixture(scope="session")
def built_kernels(tmp_path_factory, worker_id, request):
    """The folder of what the C compiler built, for all tests: each function is built once.

    Tests that run side by side, each in a process of its own, share it, and so do runs one after
    the other: what lies there is known by its text, the compiler and its flags.
    """
    folder = ROOT / "build" / "kernels"
    if (record := _recorded(request.config)) is not None:
        folder = record.parent.resolve() / "kernels"
    elif distrust_of_folder(folder) is not None:  # in a checkout that others may write
        base = tmp_path_factory.getbasetemp()
        folder = (base if worker_id == "master" else base.parent) / "built-kernels"
    folder.mkdir(mode=0o700, exist_ok=True, parents=True)
    return folder


@pytest.fixture(scope="session")
def native_toolchain(built_kernels):
    """The C compiler of this machine, with a folder for what it builds; skips without one."""
    found = find_toolchain(os.environ, built_kernels)
    if found is None:
        pytest.skip("there is no C compiler on this machine")
    return found


@pytest.fixture
def cached_toolchain(native_toolchain, monkeypatch):
    """Let emulated GPUs of jobs build each kernel once for all tests, as others do."""
    target = "actorflow.run.open_gpus.toolchain_of"
    monkeypatch.setattr(target, lambda settings: native_toolchain)


@pytest.fixture
def own_refusals(monkeypatch):
    """What the compiler refuses in a test is its own affair."""
    monkeypatch.setattr(runtime._state, "broken", {})


@pytest.fixture
def untuned(monkeypatch):
    """Return what makes this process one that has chosen no library, as it is at the beginning."""

    def forget():
        monkeypatch.setattr(tuning, "_state", tuning._TuningState())

    forget()
    return forget


@pytest.fixture
def native(native_toolchain, monkeypatch, own_refusals):
    """Turn native kernels on, with two threads, for one test; returns the module `runtime`."""
    monkeypatch.setenv("ACTORFLOW_NATIVE", "1")
    runtime.enable(native_toolchain, 2)
    yield runtime
    runtime.disable()


@pytest.fixture
def new_threads():
    """Return a function that returns the threads alive now that were not when the test began.

    A count would say less: what an earlier test left for the collector may end in between.
    """
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


@pytest.fixture(autouse=True, scope="session")
def _kernels_of_numpy(request):
    """Let jobs use numpy's kernels, so that plans are the same with and without a compiler.

    No setting of the person who runs the tests counts. Of the whole session, because plans are also
    made by fixtures that many tests share.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("ACTORFLOW_")]:
            patch.delenv(name)
        if not request.config.getoption("--native"):
            patch.setenv("ACTORFLOW_NATIVE", "0")
        if request.config.getoption("--device") is not None:
            patch.setenv("ACTORFLOW_DEVICE", request.config.getoption("--device"))
            patch.setenv("ACTORFLOW_SIM_SEED", request.config.getoption("--sim-seed"))
            patch.setenv("ACTORFLOW_CUDA", "emulated")
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(autouse=True, scope="session")
def _jobs_are_recorded(request, worker_id, _kernels_of_numpy):
    """Write down what jobs compute, also in programs that tests start."""
    folder = _recorded(request.config)
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            folder.mkdir(exist_ok=True, parents=True)
            patch.setenv(recorder.FILE, str(folder.resolve() / f"{worker_id}.jsonl"))
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{recorder.PATH}")
            from actorflow.run.training_run import Run  # all that runs jobs, for who records them

            recorder.install(Run, patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _scattered_over_devices(request):
    """Place nodes at random where jobs run on several devices: cost would leave small ones on one.

    Where follows from the seed and the graph, so that a plan is the same again.
    """
    seed, placed = request.config.getoption("--sim-seed"), place._devices

    def scattered(work, chosen):
        rng = Random(f"{seed} {len(chosen)}")
        free = [g for g in work.able if g not in work.pinned and g not in work.counters]
        return placed(work, {**chosen, **{g: rng.choice(work.able[g]) for g in free}})

    with pytest.MonkeyPatch.context() as patch:
        if "," in (request.config.getoption("--device") or ""):
            patch.setattr(place, "_devices", scattered)
        yield


@pytest.fixture(autouse=True, scope="session")
def _every_stream_that_is_asked_for():
    """Let jobs have as many streams as they ask for: the small ones of tests never pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "actorflow.compile.num_streams.asks_for_choice", lambda hardware, options: False
        )
        yield


@pytest.fixture
def probes(monkeypatch):
    """Let this machine be measured in no time: a millisecond a probe, and runs that cost nothing.

    `measured` are the probes, and `settings` those of each measurement of a run; a test may put
    another `duration_ns` of a probe, or other `costs`.
    """
    from actorflow.cli import simulate
    from actors.simulation.costs import RunCosts

    def measure(probe):
        made.measured.append(probe)
        return made.duration_ns(probe)

    made = SimpleNamespace(
        measured=[], settings=[], duration_ns=lambda probe: 1e6, costs=RunCosts()
    )
    monkeypatch.setattr(simulate, "stopwatch", lambda clock: measure)
    monkeypatch.setattr(
        simulate, "measure_costs", lambda settings: made.settings.append(settings) or made.costs
    )
    return made


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The graphs that jobs compile, and do not find in a cache."""
    from compiler.pipeline import pipeline

    graphs, compile_graph = [], pipeline.compile_graph

    def noted(graph, *arguments):
        graphs.append(graph)
        return compile_graph(graph, *arguments)

    monkeypatch.setattr(pipeline, "compile_graph", noted)
    return graphs


@pytest.fixture
def child_says():
    """Run a function in a forked child; return what it returned, or raised, as text."""

    def run(body):
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other tests' threads may linger
            pid = os.fork()
        if pid == 0:
            try:
                os.write(write_end, str(body()).encode())
            except BaseException as error:
                os.write(write_end, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end, "rb") as file:
            said = file.read().decode()
        os.waitpid(pid, 0)
        return said

    return run
