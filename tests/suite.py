"""The tiers of the suite: `make test` and `make nightly` call this.

    python tests/suite.py merge
    python tests/suite.py nightly [--part K/N]
    python tests/suite.py keep

A configuration is an environment, options of pytest, and the tests that run with them. `merge` runs
each distinct case once, on the path that users run, one seed of a family. `nightly` runs all that
there is: files of all configurations in order, each as long as `tests/durations.json` says, are cut
into N parts of equal time, and part K runs on every N-th landing. What fails does not stop the
rest; the last lines say which command repeats it. `keep` puts what the runs of this checkout
measured into `tests/durations.json`. `--list` prints configurations and files, `--collect` prints
configurations and tests; both run nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

import guard  # noqa: E402
import tiers  # noqa: E402

MEASURED = ROOT / "build" / "durations"
NOTHING_COLLECTED = 5
"""Exit status of pytest where `-k` or `-m` leaves no test of the files."""

SIDE_BY_SIDE = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0")
"""Options of pytest-xdist. Where it starts a process again that crashed, it hangs at the end."""

OF_JOBS = ("tests/system", "tests/actorflow", "tests/benchmarks/compare", "tests/benchmarks/rows")
"""Whatever compiles or runs a job comes out otherwise with native kernels than with numpy's."""


def _of_system(*names: str) -> tuple[str, ...]:
    return tuple([f"tests/system/test_{name}.py" for name in names])


ABOUT_GRAPHS = (
    *("tests/actorflow/cli", "tests/actorflow/nn", "tests/actorflow/optim/test_groups.py"),
    *("tests/actorflow/jobs", "tests/actorflow/functional/test_random.py", "tests/system/stale"),
    "tests/system/state/test_hand_over.py",
    *_of_system(
        *("ranks", "rank_training", "rank_budgets", "rank_prices", "rank_writes", "rank_stepping"),
        *("rank_checkpoints", "rank_evaluation", "staged_runs", "mixed_devices", "ema_on_devices"),
        *("parts", "destinations", "pass_order", "offload", "large_logits", "fuzz_calls"),
        *("written_from_primitives", "batch_norm", "loss_scale"),
    ),
)
"""Tests of jobs whose subject is no kernel: what is traced, split over ranks, moved or printed.

Natively they would compile the same C for graphs that ranks cut into other pieces, for a third of
their time. `merge` runs them with numpy's kernels, and nightly with both.
"""


ON_CUDA = _of_system(
    *("smoke", "accumulate", "evaluation", "resume", "runner", "skipped_steps", "offload")
)
"""Jobs on a GPU that the host emulates, which is slow: without streams of long jobs."""
KILLS = "tests/system/test_resume.py::test_kills_at_any_moment_change_nothing"
"""It waits for thousands of steps, which an emulated GPU does not do in time. On simulated devices
it would be half of what `merge` runs; natively `merge` has it."""

ON_DEVICES = (
    *ON_CUDA,
    *_of_system("streams", "recompute", "user_ops"),
    "tests/system/state",
)
"""What whole jobs do, on a device that is late."""

OF_NUMPY = (
    *("tests/actors/kernels", "tests/compiler/ops", "tests/actorflow/data"),
    "tests/compiler/contract/test_bfloat16.py",
    *_of_system("smoke", "oracle", "precision", "runner"),
)
"""What can tell the oldest numpy that pyproject.toml allows from a new one."""

ABOUT_CUDA = (
    "tests/actors",
    "tests/benchmarks/gpu/test_usage_gpt2.py",
    "tests/system/test_texts_of_a_gpu.py",
)

OF_EXTRAS = (
    "tests/actors/collectives",
    "tests/actorflow/distributed",
    *_of_system("hosts", "restart_schedules", "elastic", "docs_site"),
)
"""Where tests are that need MPI, Ray or mkdocs."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A name, options of pytest, files or folders, and those of them that are left out.

    `environment` is a folder that `make` makes, with a stamp in it that says that it is whole.
    With `is_waiting` many tests wait for processes, signals and time limits: one process more than
    cores runs them, so that no core waits.
    """

    name: str
    options: tuple[str, ...]
    paths: tuple[str, ...]
    without: tuple[str, ...] = ()
    environment: str = ".venv"
    is_waiting: bool = False

    @property
    def stamp(self) -> str:
        return ".installed-dev" if self.environment == ".venv" else ".installed"

    def files(self) -> list[str]:
        """Return the test files, by name."""
        return sorted(_files(self.paths) - _files(self.without))

    def processes(self, jobs: str) -> str:
        """Return how many processes run the tests where `jobs` are asked for."""
        is_many = jobs.isdigit() and int(jobs) > 1
        return str(int(jobs) + 1) if self.is_waiting and is_many else jobs


def _files(paths: Sequence[str]) -> set[str]:
    found = set()
    for path in [ROOT / path for path in paths]:
        found.update([path] if path.suffix == ".py" else path.rglob("test_*.py"))
    return {str(file.relative_to(ROOT)) for file in found}


ON_NATIVE_KERNELS = tuple(sorted(_files(OF_JOBS) - _files(ABOUT_GRAPHS)))

MERGE = (
    Configuration("merge", ("--tier", "merge"), ("tests",), ON_NATIVE_KERNELS),
    Configuration(
        "merge-native", ("--tier", "merge", "--native"), ON_NATIVE_KERNELS, is_waiting=True
    ),
    Configuration(
        "merge-sim",
        ("--tier", "merge", "--device", "sim", "--deselect", KILLS),
        _of_system("smoke", "streams", "resume"),
    ),
    Configuration(
        "merge-cuda", ("--tier", "merge", "--device", "cuda"), _of_system("smoke", "accumulate")
    ),
)

NIGHTLY = (
    Configuration("numpy", (), ("tests",)),
    Configuration("native", ("--native",), OF_JOBS, _of_system("swept_functions")),
    Configuration("sim", ("--device", "sim"), ON_DEVICES),
    Configuration(
        "cuda",
        ("--device", "cuda", "--deselect", KILLS),
        (*ON_CUDA, *_of_system("rank_training", "staged_runs")),
    ),
    Configuration("two-devices", ("--device", "sim:0,sim:1"), ON_DEVICES),
    Configuration("oldest-numpy", (), OF_NUMPY, environment=".venv-oldest"),
    Configuration("torch", ("--torch",), ("tests/oracle",), environment=".venv-oracle"),
    Configuration(
        "torch-native",
        ("--native", "-k", "float32"),
        ("tests/oracle",),
        environment=".venv-oracle",
    ),
    Configuration(
        "torch-cuda",
        ("--device", "cuda", "-k", "float32"),
        ("tests/oracle",),
        environment=".venv-oracle",
    ),
    Configuration("extras", ("-m", "extra"), OF_EXTRAS, environment=".venv-extras"),
    Configuration("cuda-packages", ("-m", "cuda"), ABOUT_CUDA, environment=".venv-cuda"),
)

TIERS = {"merge": MERGE, "nightly": NIGHTLY}

Work = list[tuple[Configuration, list[str]]]


def shares(tier: Sequence[Configuration], part: int, parts: int) -> Work:
    """Return the configurations of a part with their files, in order; parts count from 1.

    The files of all configurations lie end to end, as long as they take; a file belongs to the part
    in which its middle lies. So an environment is needed in as few parts as can be.
    """
    chosen: dict[str, list[str]] = {configuration.name: [] for configuration in tier}
    work = []
    for configuration in tier:
        seconds = tiers.known_seconds(configuration.name)
        work += [
            (configuration.name, file, seconds.get(file, tiers.UNKNOWN_SECONDS))
            for file in configuration.files()
        ]
    total, begin = sum([length for _, _, length in work]), 0.0
    for name, file, length in work:
        if min(int((begin + length / 2) / total * parts), parts - 1) == part - 1:
            chosen[name].append(file)
        begin += length
    return [(c, chosen[c.name]) for c in tier if chosen[c.name]]


def run(configuration: Configuration, files: Sequence[str], jobs: str, more: Sequence[str]) -> int:
    """Run some files in a configuration and return the exit status of pytest, 0 for no tests."""
    stamp = f"{configuration.environment}/{configuration.stamp}"
    subprocess.run(["make", "--silent", stamp], cwd=ROOT, check=True)
    command = [
        *(f"{configuration.environment}/bin/python", "-m", "pytest", "-q"),
        *("-n", configuration.processes(jobs), *SIDE_BY_SIDE),
        *("--configuration", configuration.name),
        *("--measured", str(MEASURED / f"{configuration.name}.json")),
        *(*configuration.options, *more, *files),
    ]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == NOTHING_COLLECTED else status


def collect(configuration: Configuration, files: Sequence[str]) -> list[str]:
    """Return the ids of the tests of some files in a configuration, by this environment. Exits."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *configuration.options]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, NOTHING_COLLECTED):
        sys.exit(f"{configuration.name} cannot be collected:\n{done.stdout[-2000:]}{done.stderr}")
    return [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]


def run_all(tier: str, work: Work, where: str, jobs: str, more: Sequence[str]) -> int:
    """Run the configurations one after the other; return 1 where one failed."""
    held = guard.start()  # open as long as this process: pytest ends with it, however it ends
    failed, lasted = [], []
    for configuration, files in work:
        print(f"{tier}{where}: {configuration.name}, {len(files)} files", flush=True)
        began = time.monotonic()
        if run(configuration, files, jobs, more):
            failed.append(configuration.name)
        lasted.append(f"{configuration.name} {time.monotonic() - began:.0f} s")
    if held is not None:
        os.close(held)
    print(f"{tier}{where}: {', '.join(lasted)}", flush=True)
    for name in failed:
        repeat = f"python tests/suite.py {tier}{where and ' --part' + where} --only {name}"
        print(f"{tier}{where}: {name} failed; .venv/bin/{repeat} repeats it", file=sys.stderr)
    return 1 if failed else 0


def keep_durations() -> None:
    """Put what was measured into the list."""
    files = sorted(MEASURED.glob("*.json"))
    measured = {file.stem: json.loads(file.read_text()) for file in files}
    tiers.keep(measured, lambda name: (ROOT / name).exists())
    print(f"{', '.join([file.stem for file in files])}: in {tiers.DURATIONS.relative_to(ROOT)}")


def main() -> int:
    """Run what the command line says, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tier", choices=[*TIERS, "keep"])
    parser.add_argument("--part", metavar="K/N", default="1/1", help="of N parts of equal time")
    parser.add_argument("--only", metavar="NAME,...", help="configurations, by name")
    parser.add_argument("--jobs", default=str(os.cpu_count() or 2), help="tests side by side")
    parser.add_argument("--list", action="store_true", help="print files, and run nothing")
    parser.add_argument("--collect", action="store_true", help="print tests, and run nothing")
    parser.epilog = "Words after -- are for pytest."
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, more = parser.parse_args(words[:end]), words[end + 1 :]
    if args.tier == "keep":
        keep_durations()
        return 0
    tier = TIERS[args.tier]
    names = [configuration.name for configuration in tier]
    wanted = args.only.split(",") if args.only else names
    if unknown := set(wanted) - {*names}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(names)}")
    part, parts = _part(parser, args.part)
    work = [(c, files) for c, files in shares(tier, part, parts) if c.name in wanted]
    if args.list:
        print("\n".join([f"{c.name}\t{file}" for c, files in work for file in files]))
        return 0
    if args.collect:
        for configuration, files in work:
            print("\n".join([f"{configuration.name}\t{i}" for i in collect(configuration, files)]))
        return 0
    return run_all(args.tier, work, f" {part}/{parts}" if parts > 1 else "", args.jobs, more)


def _part(parser: argparse.ArgumentParser, text: str) -> tuple[int, int]:
    """Return K and N of "K/N". Exits where they are no part."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part: expected K/N with 1 <= K <= N, got {text!r}")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
