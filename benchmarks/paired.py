"""Two checkouts, the same work, in turns in one call: what a change costs and what it gains.

    python benchmarks/paired.py --before DIR [ROW ...] [--rounds 5] [--repeats 3]
        [--parts rows,plain,start,compile,import] [--one-choice] [--markdown FILE]

- `rows`: ms of a step of the rows of `actorflow bench` (gpt, or gpt:bf16), bytes of the arena,
  launches, and how far the losses of the first ten steps lie apart.
- `plain`: the same of the demo's row without a compiler (ACTORFLOW_NATIVE=0).
- `start`: the demo, from the start of its process to the end of its first step; with nothing in the
  cache, and with all.
- `compile`: a training graph of about 10,000 nodes, from the model to the plan.
- `import`: s of `import actorflow` in a process whose modules are compiled already, and how many
  modules of ours it loads.

Which library multiplies is measured on each side alone. With `--one-choice` the second side takes
what the first has measured, so that a row compares code, and not two draws of noisy measurements.

Every side has processes of its own; PYTHONPATH says which checkout they import, so that layouts may
differ: both run the rows of this one by public names alone. Sides take turns, first this then that
and the other way about, and each round gives one ratio; printed are medians, and the least and the
greatest ratio. A ratio is before / after: above 1 is faster, or smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from rows.all_rows import ALL_ROWS  # noqa: E402

from benchmarks.compare.engines import Child  # noqa: E402

ENGINE = ROOT / "benchmarks" / "engines" / "paired_engine.py"
NUM_LOSSES = 10
TURN_MS = 400.0
DEMO = "char-gpt"
NUM_NODES, KIND = 10_000, "transformer"

STARTED = """
import sys, time
sys.path.insert(0, sys.argv[1])
import char_gpt as demo
import actorflow as af
data = af.data.Tokens(demo.read_text(), seq=demo.SEQ, batch=demo.BATCH, seed=0)
seen = []
demo.train.fit(demo.CharLM(), data, steps=1, progress=False,
               on_step=lambda step, metrics: seen.append(time.clock_gettime(time.CLOCK_BOOTTIME)))
print(seen[0])
"""
IMPORTED = """
import sys, time
began = time.perf_counter()
import actorflow
seconds = time.perf_counter() - began
ours = ("actorflow", "actors", "compiler", "memory")
print(seconds, len([name for name in sys.modules if name.partition(".")[0] in ours]))
"""
UNITS = (
    "import sys; import bench_compile as b; print(b.units_for(sys.argv[1], int(sys.argv[2]))[0])"
)


@dataclass(slots=True)
class Side:
    """A checkout, with a cache and compiled Python files of its own."""

    name: str
    root: Path
    place: Path
    extra: dict[str, str] = field(default_factory=dict)

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """Return the variables of its processes; the machine's own words to BLAS are taken out."""
        dropped = (
            "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
            "PYTHONDONTWRITEBYTECODE",
        )  # fmt: skip
        variables = {n: v for n, v in os.environ.items() if n not in dropped}
        return (
            variables
            | self.extra
            | {
                "PYTHONPATH": os.pathsep.join([str(self.root), str(self.root / "benchmarks")]),
                "PYTHONPYCACHEPREFIX": str(self.place / "pycache"),
                "ACTORFLOW_CACHE": str(cache or self.place / "cache"),
            }
        )

    def start(self, row: str, precision: str) -> Child:
        command = (sys.executable, str(ENGINE), row, precision)
        return Child(self.name, command, self.environment())

    def output(self, *command: str, cache: Path | None = None) -> str:
        """Return what a Python process of this side prints. Exits where it fails."""
        process = subprocess.run(
            [sys.executable, *command],
            capture_output=True, text=True, check=False, env=self.environment(cache),
            cwd=self.root,  # which `python -c` imports from, before all of PYTHONPATH
        )  # fmt: skip
        if process.returncode:
            sys.exit(f"{self.name}: {' '.join(command[:3])} failed:\n{process.stderr}")
        return process.stdout


@dataclass(frozen=True, slots=True)
class Pair:
    """Figures of two sides, taken in turns: pair i of them in round i."""

    before: tuple[float, ...]
    after: tuple[float, ...]

    def cells(self, digits: int) -> str:
        ratios = sorted([b / a for b, a in zip(self.before, self.after, strict=True)])
        middles = [f"{statistics.median(x):.{digits}f}" for x in (self.before, self.after)]
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        return f"{middles[0]} | {middles[1]} | {statistics.median(ratios):.3f} | {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW", help="gpt, or gpt:bf16 for one precision (default: all)")
    add("--before", type=Path, required=True, metavar="DIR")
    add("--after", type=Path, default=ROOT, metavar="DIR")
    add("--rounds", type=int, default=5)
    add("--repeats", type=int, default=3, help="processes of each side for start and compile")
    add("--parts", default="rows,plain,start,compile")
    add("--nodes", type=int, default=NUM_NODES)
    add("--one-choice", action="store_true", help="the second takes what the first has measured")
    add("--markdown", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            Side(name, getattr(args, name).resolve(), Path(folder) / name)
            for name in ("before", "after")
        ]
        for side in sides:
            (side.place / "cache").mkdir(parents=True, mode=0o700)
        lines = []
        for line in report(sides, args):
            print(line, flush=True)
            lines.append(line)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(sides: list[Side], args: argparse.Namespace) -> Iterator[str]:
    """Yield the report line by line, as it is measured."""
    parts = args.parts.split(",")
    yield f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    if "rows" in parts:
        yield from rows_table(
            "The rows", sides, chosen(args.rows), args.rounds, is_one_choice=args.one_choice
        )
    if "plain" in parts:
        plain = [Side(s.name, s.root, s.place, {"ACTORFLOW_NATIVE": "0"}) for s in sides]
        yield from rows_table("Without a compiler", plain, [(DEMO, "fp32")], args.rounds)
    if "start" in parts:
        yield from start_table(sides, args.repeats)
    if "compile" in parts:
        yield from compile_table(sides, args.repeats, args.nodes)
    if "import" in parts:
        yield from import_table(sides, args.repeats)


def chosen(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return rows and precisions by name, all without names. Exits for an unknown one."""
    pairs = [(row.name, precision) for row in ALL_ROWS for precision in row.precisions]
    specs = [tuple(name.partition(":")[::2]) for name in names]
    matches = [
        k for k in pairs if not specs or any(k[0] == w[0] and w[1] in ("", k[1]) for w in specs)
    ]
    if not matches:
        sys.exit(f"paired: expected rows among {', '.join(':'.join(k) for k in pairs)}")
    return matches


def rows_table(
    title: str,
    sides: list[Side],
    rows: list[tuple[str, str]],
    rounds: int,
    *,
    is_one_choice: bool = False,
) -> Iterator[str]:
    yield from (f"\n### {title}\n",)
    yield (
        "| row | ms before | after | ratio | of rounds | arena MB before | after | ratio |"
        " launches before | after | losses apart |"
    )
    yield "|---" + "|---:" * 10 + "|"
    for row, precision in rows:
        if is_one_choice:
            hand_over_choices(sides, row, precision)
        yield race(sides, row, precision, rounds)


def hand_over_choices(sides: list[Side], row: str, precision: str) -> None:
    """Let the first side measure what a row needs, and give the second side what it found."""
    with sides[0].start(row, precision) as child:
        child.ask("first")
    folders = [side.place / "cache" for side in sides]
    for file in [f for f in folders[0].rglob("*") if f.name.startswith("tuning-")]:
        copy = folders[1] / file.relative_to(folders[0])
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(file, copy)


def race(sides: list[Side], row: str, precision: str, rounds: int) -> str:
    """Let both run a row in turns and return its line."""
    with ExitStack() as stack:
        children = [stack.enter_context(side.start(row, precision)) for side in sides]
        firsts = [child.ask("first") for child in children]
        losses = [
            [first["loss"], *child.ask("losses", count=NUM_LOSSES - 1)["losses"]]
            for first, child in zip(firsts, children, strict=True)
        ]
        trial = max([min(child.ask("run", steps=1, chunks=2)["ms"]) for child in children])
        steps = max(1, int(TURN_MS / max(trial, 1e-3)))
        times = in_turns(
            rounds, [lambda c=c: c.ask("run", steps=steps, chunks=1)["ms"][0] for c in children]
        )
    apart = max([abs(a - b) / max(abs(a), 1e-30) for a, b in zip(*losses, strict=True)])
    arenas = [first["arena_bytes"] for first in firsts]
    launches = [first["launches"] for first in firsts]
    return (
        f"| {row} {precision} | {times.cells(2)} | {arenas[0] / 1e6:.2f} | {arenas[1] / 1e6:.2f} |"
        f" {arenas[0] / arenas[1]:.3f} | {launches[0]} | {launches[1]} | {apart:.1e} |"
    )


def in_turns(rounds: int, calls: Sequence[Callable[[], float]]) -> Pair:
    """Call both in every round, each first in every second one."""
    times: tuple[list[float], ...] = ([], [])
    for number in range(rounds):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            times[index].append(calls[index]())
    return Pair(tuple(times[0]), tuple(times[1]))


def start_table(sides: list[Side], repeats: int) -> Iterator[str]:
    yield from ("\n### The demo's first step\n", "| cache | s before | after | ratio | of rounds |")
    yield "|---" + "|---:" * 4 + "|"
    for side in sides:
        first_step_s(side, side.place / "warm")  # compiles Python's files too
    cold = in_turns(repeats, [lambda s=s: first_step_s(s, None) for s in sides])
    yield f"| empty | {cold.cells(2)} |"
    warm = in_turns(repeats, [lambda s=s: first_step_s(s, s.place / "warm") for s in sides])
    yield f"| full | {warm.cells(2)} |"


def first_step_s(side: Side, cache: Path | None) -> float:
    """Return seconds from the start of a process to the end of the demo's first step."""
    import time

    with tempfile.TemporaryDirectory() as empty:
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        examples = str(side.root / "examples")
        return float(side.output("-c", STARTED, examples, cache=cache or Path(empty))) - began


def compile_table(sides: list[Side], repeats: int, num_nodes: int) -> Iterator[str]:
    units = int(sides[1].output("-c", UNITS, KIND, str(num_nodes)))  # one number for both
    scripts = [str(side.root / "benchmarks" / "bench_compile.py") for side in sides]

    def compiled_s(side: Side, script: str) -> float:
        words = ("--one", "whole", "--kinds", KIND, "--units", str(units))
        row = json.loads(side.output(script, *words, cache=Path("off")))
        return row["trace"] + row["compile"]

    pair = in_turns(
        repeats,
        [lambda s=s, f=f: compiled_s(s, f) for s, f in zip(sides, scripts, strict=True)],
    )
    yield f"\n### Compile time of {units} transformer blocks ({num_nodes:,} nodes before)\n"
    yield "| s before | after | ratio | of rounds |"
    yield "|---:|---:|---:|---:|"
    yield f"| {pair.cells(2)} |"


def import_table(sides: list[Side], repeats: int) -> Iterator[str]:
    def imported(side: Side) -> tuple[float, int]:
        seconds, modules = side.output("-c", IMPORTED).split()
        return float(seconds), int(modules)

    modules = [imported(side)[1] for side in sides]  # compiles Python's files too
    pair = in_turns(repeats, [lambda s=s: imported(s)[0] for s in sides])
    yield "\n### `import actorflow`\n"
    yield "| s before | after | ratio | of rounds | modules of ours before | after |"
    yield "|" + "---:|" * 6
    yield f"| {pair.cells(3)} | {modules[0]} | {modules[1]} |"


if __name__ == "__main__":
    main()
