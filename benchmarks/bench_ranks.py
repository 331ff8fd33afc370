"""Jobs of the benchmarks on many ranks of this host, against the same job in one process.

    python benchmarks/bench_ranks.py losses [ROW ...] [--steps 50] [--ranks 1,2,3,4] [--every 1,4]
                                            [--float64] [--repeat]
    python benchmarks/bench_ranks.py apart [ROW ...] [--steps 20]
    python benchmarks/bench_ranks.py speed [ROW ...] [--steps 60] [--rounds 5]
    python benchmarks/bench_ranks.py start [ROW ...] [--ranks 2,4] [--against FOLDER] [--cold]

`losses` trains each row on meshes of 1 to 4 ranks, with and without zero, with 1 and 4 batches a
step, and prints the largest relative difference of its losses to those of one process, and whether
all ranks end with the same bits. Two controls say what rounding alone does: one process that has
the rows of every batch in another order, and one that computes in float64; with `--float64` all of
them compute in it. `--repeat` trains twice, and says whether all bits were the same. `apart` looks
where rounding parts one process from itself with its rows backwards: after each step, how far the
losses are apart, how many entries of parameters by more than 1e-5, and of the one that is furthest
apart the mean gradient that Adam keeps, in both, beside the median of all such means. `speed`
compares two ranks of one thread with one rank of two threads, in turns: the median of each, of
steps after the first ten, and their ratio. `start` takes the time from the start of the launcher to
the end of the first step on the last rank, without a plan in the cache but with all kernels built
(`--cold`: without them, too); in turns with another checkout, where one is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

ROWS = ("mlp", "char-gpt", "lenet", "lstm")
MESHES = {
    1: ("data=1, model=1",),
    2: ("data=2", "model=2"),
    3: ("data=3", "data=3, model=1"),
    4: ("data=2, model=2",),
}
ROW_AXES = {"lstm": 1} | dict.fromkeys(
    ("mlp", "lenet", "gpt", "char-gpt", "gpt-vocab", "wide-deep", "resnet-18", "resnet-50"), 0
)
"""Which axis of a batch may lie in any order; what is not named has numbers of rows in it."""
WARM_UP = 10


class Cycle:
    """A data source of some batches, again and again."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def spec(self):
        from actorflow.data import spec_of

        return spec_of(self.batches[0])

    def __next__(self):
        batch = self.batches[self.position % len(self.batches)]
        self.position += 1
        return batch

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]

    def fingerprint(self):
        parts = [batch[name].tobytes() for batch in self.batches for name in sorted(batch)]
        return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def widened(model, arrays):
    """Make a model's parameters and buffers float64, and return arrays as that, too."""
    import numpy as np

    from compiler.contract.types import DType, TensorType

    for _, leaf in (*model.named_parameters(), *model.named_buffers()):
        if leaf.type.dtype is DType.FLOAT32:
            leaf._type = TensorType(DType.FLOAT64, leaf.type.shape)  # layers have no word for it
    return {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in arrays.items()}


def in_other_order(batches, axis: int):
    """Return batches whose rows lie backwards: the same mathematics, sums in another order."""
    import numpy as np

    return [{n: np.ascontiguousarray(np.flip(a, axis)) for n, a in b.items()} for b in batches]


def train(asked: dict[str, object], folder: Path) -> None:
    """Do what one process does, and write what came of it to a file of its rank."""
    from engines.actorflow_models import FAMILIES, job_of
    from rows.all_rows import find_row

    import actorflow as af

    row = find_row(asked["row"])
    model, loss = FAMILIES[row.family](row)
    weights, batches = row.weights(), row.batches()
    if asked["is_wide"]:
        weights, batches = widened(model, weights), [widened(model, batch) for batch in batches]
    if asked["is_turned"]:
        batches = in_other_order(batches, ROW_AXES[row.name])
    model.load(weights)
    if asked["mesh"]:
        mesh = {k.strip(): int(v) for k, v in (a.split("=") for a in asked["mesh"].split(","))}
        asked["options"]["mesh"] = af.Mesh(**mesh)
    job = job_of(row, "fp32", loss, **asked["options"])
    losses, times, ended = [], [], []

    def on_step(step, outputs):
        losses.append(float(outputs["loss"]))
        times.append(time.perf_counter())
        ended.append(time.time())  # which other processes know, too

    steps = asked["steps"]
    job.fit(model, Cycle(batches), steps=steps, progress=False, on_step=on_step)
    state = b"".join([array.tobytes() for _, array in sorted(model.state().items())])
    spans = [after - before for before, after in pairwise(times)][WARM_UP:]
    report = {
        "losses": losses,
        "state": hashlib.blake2b(state, digest_size=16).hexdigest(),
        "first": ended[0],
        "ms": statistics.median(spans) * 1e3 if spans else None,
    }
    rank = os.environ.get("RANK", "0")
    (folder / f"{rank}.json").write_text(json.dumps(report))


def launched(
    row: str, mesh: str, ranks: int, steps: int, environ=None, root=ROOT, *, is_wide=False,
    is_turned=False, **options: object,
):  # fmt: skip
    """Return what each rank has told, or the last line of the error."""
    task = {"row": row, "mesh": mesh, "steps": steps, "options": options}
    task = json.dumps(task | {"is_wide": is_wide, "is_turned": is_turned})
    with tempfile.TemporaryDirectory() as folder:
        job = [str(root / "benchmarks" / "bench_ranks.py"), "child", task, folder]
        start = ["-m", "actorflow", "launch", "-n", str(ranks)] if ranks > 1 else []
        environ = {**os.environ, "PYTHONPATH": str(root), **(environ or {})}
        process = subprocess.run(
            [sys.executable, *start, *job], capture_output=True, text=True, env=environ, check=False
        )
        if process.returncode:
            return (process.stderr.strip().splitlines() or ["no word"])[-1]
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]


def apart(found, alone) -> tuple[float, float]:
    """Return the largest relative difference of the first ten losses, and of all."""
    pairs = zip(found["losses"], alone["losses"], strict=True)
    off = [abs(a - b) / abs(b) for a, b in pairs]
    return max(off[:10]), max(off)


def cases_of(row: str, counts, *, is_wide: bool):
    """Yield what a row is trained as: its name, how many ranks, the mesh, and more options."""
    if row in ROW_AXES:
        yield "one, rows backwards", 1, "", {"is_turned": True}
    if not is_wide:
        yield "one, float64", 1, "", {"is_wide": True}
    for ranks, mesh in [(count, mesh) for count in counts for mesh in MESHES[count]]:
        for zero in (False, True) if "data" in mesh else (False,):
            yield mesh, ranks, mesh, {"zero": zero}


def compare_losses(rows, counts, every, steps: int, *, is_wide: bool, is_twice: bool) -> None:
    more = " two runs alike |" if is_twice else ""
    print(f"| row | mesh | zero | batches a step | first ten losses | all | ranks agree |{more}")
    print("|---|---|---|---|---|---|---|" + ("---|" if is_twice else ""))
    for row, batches in product(rows, every):
        settings = {"accumulate": batches, "is_wide": is_wide}
        alone = launched(row, "", 1, steps, **settings)
        for name, count, mesh, options in cases_of(row, counts, is_wide=is_wide):
            line = f"| {row} | {name} | {'yes' if options.get('zero') else 'no'} | {batches} |"
            runs = [launched(row, mesh, count, steps, **settings | options)]
            runs += [launched(row, mesh, count, steps, **settings | options)] if is_twice else []
            refused = [run for run in (alone, *runs) if isinstance(run, str)]
            if refused:
                print(line, refused[0], "| - | - |", flush=True)
                continue
            first, worst = apart(runs[0][0], alone[0])
            bits = [[(f["state"], *f["losses"]) for f in run] for run in runs]
            line += f" {first:.1e} | {worst:.1e} | {'yes' if len(set(bits[0])) == 1 else 'NO'} |"
            if is_twice:
                line += " yes |" if bits[0] == bits[1] else " NO |"
            print(line, flush=True)


def compare_step_by_step(row_name: str, steps: int) -> None:
    """Print where one process and itself with its rows backwards come apart."""
    from engines.actorflow_models import FAMILIES, job_of
    from rows.all_rows import find_row

    from actorflow.run.runner import Runner

    row = find_row(row_name)
    model, loss = FAMILIES[row.family](row)
    model.load(row.weights())
    batches = row.batches()
    plan = job_of(row, "fp32", loss).compile(model, Cycle(batches))
    runners = [Runner(plan, values=model.state()) for _ in range(2)]
    sides = (batches, in_other_order(batches, ROW_AXES[row_name]))
    for step in range(steps):
        pairs = zip(runners, sides, strict=True)
        first, second = [float(r.step(side[step % len(side)])["loss"]) for r, side in pairs]
        one, other = [runner.variables() for runner in runners]
        cells = furthest(one, other, list(row.weights()))
        off = abs(first - second) / abs(second)
        print(f"| {row_name} | {step + 1} | {off:.1e} | {' | '.join(cells)} |", flush=True)


def furthest(one, other, names: list[str]) -> list[str]:
    """Return what is said of parameters that two processes have after the same step."""
    import numpy as np

    off = {name: np.abs(one[name] - other[name]) for name in names}
    worst = max(off, key=lambda name: off[name].max())
    at = np.unravel_index(off[worst].argmax(), off[worst].shape)
    many = sum([int((entries > 1e-5).sum()) for entries in off.values()])
    cells = [f"{many}", f"{worst}{[int(i) for i in at]}", f"{off[worst][at]:.1e}"]
    means = [values.get(f"adam_m/{worst}") for values in (one, other)]
    if means[0] is None:
        return [*cells, "-", "-", "-"]
    return [*cells, *[f"{m[at]:.1e}" for m in means], f"{np.median(np.abs(means[0])):.1e}"]


def compare_speed(rows, rounds: int, steps: int) -> None:
    print("| row | one rank, two threads, ms | two ranks of one thread, ms | ratio of rates |")
    print("|---|---|---|---|")
    for row in rows:
        alone, two = [], []
        for _ in range(rounds):
            (single,) = launched(row, "", 1, steps, {"ACTORFLOW_THREADS": "2"})
            alone.append(single["ms"])
            two.append(launched(row, "data=2", 2, steps)[0]["ms"])
        ratios = [a / b for a, b in zip(alone, two, strict=True)]
        spans = [
            f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
            for times in (alone, two, ratios)
        ]
        print(f"| {row} | {spans[0]} | {spans[1]} | {spans[2]} |", flush=True)


def start_s(row: str, ranks: int, root: Path, folder: Path, *, is_cold: bool) -> float:
    """Return the seconds from start to first step; the folder keeps what the C compiler built."""
    for path in folder.iterdir() if is_cold else folder.glob("*.plan"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before, environ = time.time(), {"ACTORFLOW_CACHE": str(folder)}
    reports = launched(row, f"data={ranks}", ranks, 1, environ, root)
    return max([report["first"] for report in reports]) - before


def compare_starts(rows, counts, rounds: int, roots: list[Path], *, is_cold: bool) -> None:
    print("| row | ranks | start to first step, s, here and there |")
    print("|---|---|---|")
    for row in rows:
        for ranks in counts:
            with ExitStack() as stack:
                folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in roots]
                places = list(zip(roots, folders, strict=True))
                seconds = [
                    [start_s(row, ranks, *place, is_cold=is_cold) for place in places]
                    for _ in range(rounds if is_cold else rounds + 1)
                ][-rounds:]
            spans = [
                f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
                for times in zip(*seconds, strict=True)
            ]
            print(f"| {row} | {ranks} | {' | '.join(spans)} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        train(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("losses", "apart", "speed", "start"))
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--every", default="1,4", help="batches a step")
    parser.add_argument("--float64", action="store_true", help="compute in it")
    parser.add_argument("--repeat", action="store_true", help="run all twice")
    parser.add_argument("--cold", action="store_true", help="build all kernels anew")
    parser.add_argument("--against", type=Path, help="another checkout, with this file in it")
    args = parser.parse_args()
    counts = [int(n) for n in args.ranks.split(",")]
    if args.what == "losses":
        every = [int(n) for n in args.every.split(",")]
        settings = {"is_wide": args.float64, "is_twice": args.repeat}
        compare_losses(args.rows, counts, every, args.steps, **settings)
    elif args.what == "apart":
        print("| row | step | losses | entries | furthest | apart | its mean | its mean | median |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in args.rows:
            compare_step_by_step(row, args.steps)
    elif args.what == "start":
        roots = [ROOT, *([args.against] if args.against else [])]
        compare_starts(args.rows, counts, args.rounds, roots, is_cold=args.cold)
    else:
        compare_speed(args.rows, args.rounds, args.steps)


if __name__ == "__main__":
    main()
