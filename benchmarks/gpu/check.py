"""The check on a GPU: `python benchmarks/gpu/check.py OUT_DIR [SECTION ...]`.

Sections run one after another, each in a process of its own with a time of its own, and are killed
when it is up: a fault of CUDA makes a process useless, and a call that hangs cannot be broken off.
OUT_DIR gets check.json and check.md, written anew after each section, check.log and check.png.
Exits with 1 where a proof failed, with 0 otherwise, however slow all was, also without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from actors.device.cuda.nvml import NvmlDevice, NvmlDevices, listed_gpus  # noqa: E402
from gpu.picture import write_png  # noqa: E402
from gpu.results import (  # noqa: E402
    CheckResult,
    SectionResult,
    Status,
    as_json,
    markdown,
    rows_table,
    table,
)
from gpu.section import (  # noqa: E402
    CUDNN_HOLDS,
    RATES,
    RIVALS,
    SECTIONS,
    Place,
    Section,
    find_section,
    replace_text,
)

COMPILING = ROOT / "benchmarks" / "gpu" / "compile_rivals.py"
TOTAL_S, HALF_S = 295.0, 150.0
REPORT_S = 10.0
_TAIL, _LOG_BYTES = 1500, 256 << 10
_KILLED_S = 10.0
_COUNTING = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


@dataclass(frozen=True, slots=True)
class Program:
    """What is run: sections, whose modules lie in gpu/ of a folder, and what compiles rivals."""

    sections: tuple[Section, ...] = SECTIONS
    folder: Path = ROOT / "benchmarks"
    compiling: Path = COMPILING


_ALL = Program()


@dataclass(frozen=True, slots=True)
class Run:
    """How sections are run: where they write, what is shared, and when all must have ended."""

    out: Path
    shared: Path
    ends: float
    is_emulated: bool
    here: NvmlDevices
    program: Program = _ALL

    def limit_s(self, section: Section, later: Sequence[Section]) -> float:
        """Return how long a section may take: its own time is safe from those before it.

        One that has others' spare time takes twice its own at most, and the last of all what is
        left: without a GPU, texts compile on however few cores there are.
        """
        spare_s = self.ends - REPORT_S - time.monotonic() - sum([s.seconds for s in later])
        return max(1.0, min(2 * section.seconds, spare_s) if later else spare_s)

    def why_skipped(self, section: Section) -> str:
        """Return why a section is not run; empty for one that is."""
        if self.is_emulated:
            return "" if section.is_emulated else "emulated: nothing to measure"
        if section.needs_device and not self.here.gpus:
            return f"no device: {self.here.problem or 'no GPU is listed'}"
        return ""


def main(arguments: Sequence[str] | None = None, program: Program = _ALL) -> int:
    options = _parsed(arguments, program)
    try:
        halves = [s for s in program.sections if options.half in (None, s.half)]
        named = [find_section(name, program.sections) for name in options.sections]
        sections = named or halves
    except LookupError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as shared:
        here = gpus_here()
        seconds = options.seconds or (TOTAL_S if options.half is None else HALF_S)
        ends = began + seconds - options.spent
        run = Run(options.out, Path(shared), ends, options.emulated, here, program)
        result = CheckResult(_head(run), is_emulated=options.emulated)
        (run.out / "check.log").write_bytes(b"")
        _write(run, result)
        compiling = _compile_rivals(run, sections)
        for number, section in enumerate(sections):
            if compiling is not None and not section.shares_card:
                _ended(compiling, 0.0)
                compiling = None
            later = [s for s in sections[number + 1 :] if not run.why_skipped(s)]
            ended = _run(run, section, later)
            print(f"{ended.name:10s} {ended.status.value:8s} {ended.seconds:6.1f} s  {ended.why}")
            sys.stdout.flush()
            result = replace(result, sections=(*result.sections, ended))
            _write(run, result)
    with contextlib.suppress(Exception):  # what matters is written
        write_png(result, run.out / "check.png")
    print("\n".join([table(result), *rows_table(result)]))
    return int(bool(result.failures))


def _parsed(arguments: Sequence[str] | None, program: Program) -> argparse.Namespace:
    names = ", ".join([f"{s.name} ({s.about})" for s in program.sections])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"default all: {names}")
    parser.add_argument("--half", type=int, choices=(1, 2), help="1: what proves, 2: what measures")
    parser.add_argument("--seconds", type=float, help="when all must have ended")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that are gone already")
    parser.add_argument(
        "--emulated", action="store_true", help="try the check itself, on the emulated driver"
    )
    return parser.parse_intermixed_args(arguments)


def gpus_here(
    counting: str = _COUNTING, listed: Callable[[Mapping[str, str]], NvmlDevices] = listed_gpus
) -> NvmlDevices:
    """Return the GPUs that are here.

    Where the library that lists them is missing or has nothing, CUDA itself is asked, in a process
    of its own: without a list a GPU can be used as well.
    """
    here = listed(os.environ)
    if here.gpus:
        return here
    command = [sys.executable, "-c", counting]
    try:
        count = int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return here
    unlisted = NvmlDevice(f"unlisted ({here.problem})", "", (0, 0), 0)
    return replace(here, gpus=(unlisted,) * count, problem="" if count else here.problem)


def _head(run: Run) -> dict[str, object]:
    gpus = ", ".join([gpu.name for gpu in run.here.gpus])
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": _commit(),
        "gpu": "emulated" if run.is_emulated else gpus or f"none: {run.here.problem}",
        "driver": run.here.driver,
        "host": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return process.stdout.strip() or "unknown"


def _compile_rivals(run: Run, sections: Sequence[Section]) -> subprocess.Popen[bytes] | None:
    """Let torch compile beside the sections before the first that has the card alone."""
    rivals = [s for s in sections if s.name == RIVALS and not run.why_skipped(s)]
    if not rivals or not sections[0].shares_card:
        return None
    # What it prints is dropped: a rival that fails here fails again in its section, which tells.
    return subprocess.Popen(
        [sys.executable, str(run.program.compiling)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=_environment(run), start_new_session=True,
    )  # fmt: skip


def _run(run: Run, section: Section, later: Sequence[Section]) -> SectionResult:
    """Run one section, or say why not."""
    why = run.why_skipped(section)
    if why:
        return SectionResult(section.name, Status.SKIPPED, 0.0, section.is_proof, why=why)
    file = run.shared / f"found-{section.name}.json"
    limit_s, began = run.limit_s(section, later), time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            _command(run, section, file, limit_s),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=_environment(run), start_new_session=True,
        )  # fmt: skip
        code = _ended(process, limit_s)
        seconds = time.monotonic() - began
        ending = _end_of(log)
    with (run.out / "check.log").open("ab") as whole:
        whole.write(f"== {section.name}: {code}\n".encode() + ending + b"\n")
    findings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    tail = ending.decode("utf-8", "replace").strip()
    status, why = _status(code, findings, tail, limit_s)
    return SectionResult(
        section.name,
        status,
        seconds,
        section.is_proof,
        findings.get("metrics", {}),
        findings.get("facts", {}),
        findings.get("checks", []),
        why,
        "" if status is Status.OK else tail[-_TAIL:],
    )


def _command(run: Run, section: Section, file: Path, limit_s: float) -> list[str]:
    script = str(run.program.folder / "gpu" / "child.py")
    command = [sys.executable, script, section.name, str(file), "--shared", str(run.shared)]
    command += ["--seconds", str(limit_s)]
    return [*command, "--emulated"] if run.is_emulated else command


def _environment(run: Run) -> dict[str, str]:
    """Return the variables of a section's process: those of actorflow are ours alone."""
    variables = {n: v for n, v in os.environ.items() if not n.startswith("ACTORFLOW_")}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(run.program.folder)]),
        "PYTHONUNBUFFERED": "1",
        # What the GPU is held against is numpy's, which wants no compiler and no time for it.
        "ACTORFLOW_NATIVE": "0",
        # Kernels that one section compiled serve the next; nothing is left on the machine.
        "ACTORFLOW_CACHE": str(run.shared / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(run.shared / "inductor"),
        "TRITON_CACHE_DIR": str(run.shared / "triton"),
    }
    if Place("check", run.shared, run.is_emulated).told(CUDNN_HOLDS) is False:
        # Whatever fails of it, the rest of what is measured does without.
        variables["ACTORFLOW_CUDNN"] = "0"
    return variables | ({"ACTORFLOW_CUDA": "emulated"} if run.is_emulated else {})


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return a process' exit code; None for one that had to be killed, with all it started."""
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a dead process
        process.wait(_KILLED_S)
    return code


def _end_of(log) -> bytes:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - _LOG_BYTES))
    return log.read()


def _status(code: int | None, found: dict, tail: str, limit_s: float) -> tuple[Status, str]:
    if code is None:
        return Status.TIMEOUT, f"killed after {limit_s:.0f} s"
    if code != 0:
        return Status.ERROR, f"exit code {code}: {tail.splitlines()[-1] if tail else 'no word'}"
    if found.get("skipped"):
        return Status.SKIPPED, found["skipped"]
    bad = [c for c in found.get("checks", []) if not c["ok"]]
    return (Status.FAIL, f"{len(bad)} checks do not hold") if bad else (Status.OK, "")


def _write(run: Run, result: CheckResult) -> None:
    replace_text(run.out / "check.json", json.dumps(as_json(result), indent=1) + "\n")
    replace_text(run.out / "check.md", markdown(result))
    gpu = Place("check", run.shared, run.is_emulated).told(RATES)
    if isinstance(gpu, dict):
        replace_text(run.out / f"{gpu['name']}.json", json.dumps(gpu, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
