"""Training that is killed again and again: no sample may come twice, and none may be left out.

    python benchmarks/soak_data.py [--kills 100] [--seconds S] [--ranks 2] [--sources arrays,text]

For each source a tiny job is trained with checkpoints. While it runs, its worker processes are
killed at random moments (SIGKILL), and then the trainer, or one of its ranks; the next run goes on
from the newest checkpoint, with another number of workers. All samples of every step, also of one
that is done a second time, must be those that this process reads from the source alone, at the same
step. Whoever is killed must leave no process behind. Sources take turns, so that --seconds, where
it comes first, cuts all of them alike. Prints a row for each source, and ends with an error at the
first difference.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ACTORFLOW_THREADS", "1")
os.environ.setdefault("ACTORFLOW_NATIVE", "0")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import actorflow as af
from actorflow import nn

BATCH, SAMPLES, EVERY = 16, 997, 5
FEWEST, MOST = 1, 12
"""Steps between two kills."""
PATIENCE_S = 600.0
MARK = "ACTORFLOW_SOAK"


# What happens to samples. Workers import these functions.


def numbered(sample: Any) -> dict[str, Any]:
    """Return the number that a text, or the first pixel of an image, tells."""
    if "text" in sample:
        return {"n": int(sample["text"])}
    low, high, _ = sample["image"][0, 0].tolist()
    return {"n": low + 256 * high}


def risky(sample: Any) -> Any:
    """Raise for one of 31 samples."""
    if sample["n"] % 31 == 3:
        raise ValueError("broken")
    return sample


def is_kept(sample: Any) -> bool:
    """Drop one of three samples."""
    return bool(sample["n"] % 3)


def words(sample: Any) -> dict[str, Any]:
    """Return 1 to 9 ids that tell the sample."""
    n = int(sample["n"])
    return {"ids": (10 * n + np.arange(1 + n * 7 % 9)).astype(np.int32)}


# Sources; each gives `n` or `ids`, which tell the samples of a batch.


def write_files(folder: Path) -> None:
    """Write the samples into files of every kind."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from PIL import Image

    numbers = np.arange(SAMPLES)
    parquet.write_table(pa.table({"n": numbers}), folder / "a.parquet", row_group_size=40)
    (folder / "a.csv").write_text("n\n" + "\n".join(map(str, numbers)) + "\n")
    (folder / "a.txt").write_text("\n".join(map(str, numbers)) + "\n")
    for n in range(SAMPLES // 4):
        place = folder / "photos" / str(n % 3)
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 4, 3), (n % 256, n // 256, 0), np.uint8)
        Image.fromarray(pixels).save(place / f"{n}.png")


def pipelines(folder: Path) -> dict[str, af.data.Pipeline]:
    """Return the sources that have workers, by name."""
    arrays = af.data.from_arrays({"n": np.arange(SAMPLES)})
    text = af.data.from_text(folder / "a.txt").map(numbered)
    samples = {
        "arrays": arrays.shuffle(1),
        "dataset": af.data.from_dataset([{"n": n} for n in range(SAMPLES)]).shuffle(2),
        "parquet": af.data.from_parquet(folder / "a.parquet").shuffle(3),
        "csv": af.data.from_csv(folder / "a.csv").shuffle(4, buffer=100),
        "images": af.data.from_image_folder(folder / "photos").map(numbered).shuffle(5),
        "text": text,
        "filtered": arrays.shuffle(6).map(risky).filter(is_kept).on_error("skip", limit=1 << 40),
        "sampled": arrays.sample(weights=1.0 + np.arange(SAMPLES), seed=7),
    }
    made = {name: data.repeat().batch(BATCH) for name, data in samples.items()}
    made["mixed"] = af.data.mix([arrays.shuffle(8), text], [2, 1], seed=8).batch(BATCH)
    made["filled"] = arrays.shuffle(9).repeat().batch(BATCH, drop_last=False)
    made["bucket"] = arrays.map(words).shuffle(10).repeat().bucket(8, by="ids", edges=(4, 9))
    made["pack"] = arrays.map(words).shuffle(11).repeat().pack(24, batch=8)
    return made


def batches(start: int) -> Iterator[dict[str, Any]]:
    """Yield batches without end, as a loader of the user's does."""
    for batch in itertools.count(start):
        yield {"n": (np.arange(BATCH) + BATCH * batch) % SAMPLES}


def sources(folder: Path) -> dict[str, Any]:
    """Return all sources, by name."""
    more = {
        "ArraySource": af.data.ArraySource({"n": np.arange(SAMPLES)}, batch=BATCH, seed=12),
        "Tokens": af.data.Tokens(np.arange(9 * SAMPLES), seq=4, batch=BATCH, seed=13),
        "from_iterable": af.data.from_iterable(lambda: batches(0)),
    }
    return {**pipelines(folder), **more}


def told_by(name: str) -> str:
    """Return the array of a batch that tells its samples."""
    return {"bucket": "ids", "pack": "ids", "Tokens": "x"}.get(name, "n")


class Scale(nn.Module):
    """A model of one weight."""

    def __init__(self) -> None:
        self.scale = nn.Parameter((1,), init="zeros")


def train(options: argparse.Namespace) -> None:
    """Train until somebody kills this process; write what each step has read."""
    told, folder = told_by(options.train), Path(options.folder)
    mesh = {"mesh": af.Mesh(data=options.ranks)} if options.ranks > 1 else {}

    @af.job(optimizer=af.optim.SGD(1e-3), seed=1, **mesh)
    def job(model: Scale, batch: Any) -> Any:
        read = batch[told]
        loss = ((read.to("float32") / SAMPLES * model.scale) ** 2).mean()
        return {"loss": loss, "read": read}

    data = sources(folder)[options.train]
    data = data.workers(options.workers) if isinstance(data, af.data.Pipeline) else data
    rank = int(os.environ.get("RANK", "0"))
    with open(folder / f"{options.log}.{rank}", "w", buffering=1) as log:

        def on_step(step: int, metrics: Any) -> None:
            pids = [os.getpid(), *getattr(data, "worker_pids", ())]
            read = np.asarray(metrics["read"]).ravel().tolist()
            log.write(f"{step};{' '.join(map(str, pids))};{' '.join(map(str, read))};\n")

        job.fit(
            Scale(), data, steps=1 << 39, progress=False, checkpoint=folder / "run", every=EVERY,
            on_step=on_step,
        )  # fmt: skip


# The process that kills.


@dataclass
class Soak:
    """What one source has been through."""

    name: str
    folder: Path
    ranks: int
    rng: random.Random
    kills: dict[str, int] = field(default_factory=lambda: {"trainer": 0, "worker": 0})
    counts: list[int] = field(default_factory=list)
    """Workers of each run."""
    num_steps: int = 0
    num_again: int = 0
    newest: int = 0
    """The last step that any run has reported."""
    expected: list[list[int]] = field(default_factory=list)
    source: Any = None

    def run(self) -> None:
        """Start a run, kill its workers and then it; check all that it read."""
        has_workers = isinstance(self.source, af.data.Pipeline)
        others = [n for n in range(4) if n not in self.counts[-1:]] if has_workers else [0]
        self.counts.append(self.rng.choice(others))
        log, mark = f"log{len(self.counts)}", uuid.uuid4().hex
        words = [__file__, "--train", self.name, "--folder", self.folder, "--log", log,
                 "--workers", self.counts[-1], "--ranks", self.ranks]  # fmt: skip
        launch = ["-m", "actorflow", "launch", "-n", self.ranks, "--grace", "2"]
        command = [sys.executable, *(launch if self.ranks > 1 else ()), *words]
        errors = self.folder / f"{log}.err"
        with open(errors, "w") as err:
            process = subprocess.Popen(
                list(map(str, command)), env={**os.environ, MARK: mark}, stdout=err, stderr=err
            )
        try:
            for _ in range(self.rng.randint(0, 4) if self.counts[-1] else 0):
                victims = self.wait(process, log, errors)[1:]
                self.kill(self.rng.choice(victims), "worker")
            self.kill(self.wait(process, log, errors)[0], "trainer")
            process.wait(PATIENCE_S)
            if left := wait_until_gone(mark):
                raise SystemExit(f"{self.name}: processes {left} are left")
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()
        self.check(log)

    def wait(self, process: Any, log: str, errors: Path) -> list[int]:
        """Wait for a random number of steps; return the pids of a rank and of its workers."""
        wanted, rank = self.rng.randint(FEWEST, MOST), self.rng.randrange(self.ranks)
        path, before, until = self.folder / f"{log}.{rank}", -1, time.monotonic() + PATIENCE_S
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            before = len(lines) if before < 0 else before
            whole = [line for line in lines if line.endswith(";")]
            if whole and len(lines) >= before + wanted:
                return list(map(int, whole[-1].split(";")[1].split()))
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(
                    f"{self.name}: no step in {path}, which has {len(lines)} lines; the run"
                    f" {'goes on' if process.poll() is None else 'has ended'}:"
                    f" {errors.read_text()[-3000:]}"
                )
            time.sleep(0.002)  # watches another process

    def kill(self, pid: int, what: str) -> None:
        """Kill a process, which may have ended by now."""
        try:
            os.kill(pid, signal.SIGKILL)
            self.kills[what] += 1
        except ProcessLookupError:
            pass

    def check(self, log: str) -> None:
        """Compare what a run has read with what this process reads."""
        text = (self.folder / f"{log}.0").read_text()
        first = True
        for line in text.splitlines():
            if not line.endswith(";"):
                continue  # cut by the kill
            step, _, read = line.rstrip(";").split(";")
            number = int(step)
            if first and not self.newest - 3 * EVERY < number <= self.newest + 1:
                raise SystemExit(f"{self.name}: a run begins with {number} after {self.newest}")
            first = False
            while len(self.expected) < number:
                batch = next(self.source)[told_by(self.name)]
                self.expected.append(batch.ravel().tolist())
            if list(map(int, read.split())) != self.expected[number - 1]:
                raise SystemExit(
                    f"{self.name}: step {number} has read {read[:60]} ..., expected"
                    f" {self.expected[number - 1][:12]} ..."
                )
            self.num_steps += 1
            self.num_again += number <= self.newest
            self.newest = max(self.newest, number)

    @property
    def num_kills(self) -> int:
        """All kills."""
        return sum(self.kills.values())


def marked(mark: str) -> list[int]:
    """Return the processes of a run."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in environ and state != "Z" and int(entry) != os.getpid():
            found.append(int(entry))
    return found


def wait_until_gone(mark: str) -> list[int]:
    """Wait for the processes of a run to end; return those that do not."""
    until = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.01)  # watches other processes
    return left


def main() -> int:
    """Kill, check, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="for each source")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sources", default="", help="names with commas; all by default")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("--train", "--folder", "--log"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        soaks = []
        (files := Path(name) / "files").mkdir()
        write_files(files)
        known = sources(files)
        for source in options.sources.split(",") if options.sources else known:
            own = Path(name) / source
            own.mkdir()
            for file in files.iterdir():
                (own / file.name).symlink_to(file)
            rng = random.Random(f"{options.seed}{source}")
            soaks.append(Soak(source, own, options.ranks, rng, source=known[source]))
        try:
            while open_ := [s for s in soaks if s.num_kills < options.kills]:
                for soak in open_:
                    if time.monotonic() < until:
                        soak.run()
                if time.monotonic() >= until:
                    break
        finally:  # also what held before a difference
            print("| source | trainer killed | worker killed | steps compared | done again |")
            print("|---|--:|--:|--:|--:|")
            for soak in soaks:
                row = (soak.kills["trainer"], soak.kills["worker"], soak.num_steps, soak.num_again)
                print(f"| {soak.name} | {' | '.join([f'{n:,}' for n in row])} |", flush=True)
    print(f"\n{sum([s.num_kills for s in soaks]):,} kills, {options.ranks} ranks, 0 differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
