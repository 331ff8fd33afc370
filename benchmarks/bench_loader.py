"""Loading: images by worker processes beside torch's DataLoader, tokens from Parquet, and training.

    python benchmarks/bench_loader.py [--torch PYTHON] [--images 1024] [--workers 2] [--rounds 5]
                                      [--only images,tokens,training]

Both loaders decode the same JPEG files of 224 x 224 by Pillow, mirror half of them, make them
float32 [3, 224, 224] and give batches of 64; torch's keeps its workers and fetches 4 batches ahead
for each. PYTHON is an interpreter with torch, numpy and Pillow. The batches are compared before
anything is timed: the sum of all pixels without mirroring. Rounds are in turns; printed are images
per second, medians and ranges. Then rows of 1,024 int32 from one Parquet file in the page cache, in
their order and shuffled, and the same rows through a filter that keeps all; and pyarrow alone on
one thread. Last, ResNet-18 on batches of 8 images of 32 x 32, from memory and from a worker that
needs 0.9 of a step for each batch: it waits for so long, as for a disk, or computes. The trainer
has one thread, so two cores are enough for both.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("ACTORFLOW_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import actorflow as af
from actorflow.data import augment

BATCH = 64

RIVAL = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
from PIL import Image
folder, workers, batch = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((.485, .456, .406), (.229, .224, .225)))

class Photos(torch.utils.data.Dataset):
    def __init__(self, p):
        self.p = p
        self.files = sorted(folder.rglob("*.jpg"))
        names = sorted({f.parent.name for f in self.files})
        self.labels = [names.index(f.parent.name) for f in self.files]
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        with Image.open(self.files[i]) as image:
            x = torch.from_numpy(np.asarray(image.convert("RGB")))
        x = x.permute(2, 0, 1)
        if torch.rand(()) < self.p:
            x = x.flip(2)
        return x.float().div_(255).sub_(mean).div_(std).contiguous(), self.labels[i]

def loader(p):
    return torch.utils.data.DataLoader(Photos(p), batch, shuffle=True, num_workers=workers,
                                       persistent_workers=workers > 0, drop_last=True,
                                       prefetch_factor=4 if workers else None)

if __name__ == "__main__":
    still = loader(0.0)
    print(json.dumps(sum(float(x.double().sum()) for x, _ in still)), flush=True)
    photos = loader(0.5)
    for _ in photos:
        pass
    for line in sys.stdin:
        begin = time.perf_counter()
        count = sum(len(x) for x, _ in photos)
        print(json.dumps(count / (time.perf_counter() - begin)), flush=True)
"""


def write_photos(folder: Path, count: int) -> None:
    """Write JPEG files of smooth random content in two folders."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(count):
        place = folder / ("cat" if number % 2 else "dog")
        place.mkdir(exist_ok=True, parents=True)
        small = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)
        large = Image.fromarray(small).resize((224, 224), Image.Resampling.BICUBIC)
        large.save(place / f"{number:05}.jpg", quality=90)


def photos(folder: Path, workers: int, p: float) -> Any:
    """Return batches of one epoch after the other."""
    data = af.data.from_image_folder(folder).shuffle(0)
    return data.map(augment.Flip(p)).map(augment.Normalize()).repeat().batch(BATCH).workers(workers)


def ours(folder: Path, count: int, workers: int) -> tuple[float, Callable[[], float]]:
    """Return the sum of all pixels, and what measures images per second of an epoch."""
    still = photos(folder, workers, 0.0)
    total = sum([float(next(still)["image"].sum(dtype=np.float64)) for _ in range(count // BATCH)])
    still.end_workers()
    data = photos(folder, workers, 0.5)
    out = {name: np.empty(t.shape, t.dtype.value) for name, t in data.spec().items()}

    def epoch() -> float:
        begin = time.perf_counter()
        for _ in range(count // BATCH):
            data.next_into(out)  # as a run reads it: into the memory of a register
        return count // BATCH * BATCH / (time.perf_counter() - begin)

    epoch()
    return total, epoch


def measure_photos(options: argparse.Namespace, folder: Path) -> None:
    """Measure both loaders in turns."""
    write_photos(folder, options.images)
    total, epoch = ours(folder, options.images, options.workers)
    rows: dict[str, list[float]] = {"actorflow": [], "torch": []}
    rival = None
    if options.torch:
        words = [options.torch, "-c", RIVAL, str(folder), str(options.workers), str(BATCH)]
        rival = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert rival.stdin is not None
        assert rival.stdout is not None
        theirs = json.loads(rival.stdout.readline())
        if abs(theirs - total) > 1e-4 * abs(total):
            raise SystemExit(f"other pixels: {total} and {theirs}")
    for _ in range(options.rounds):
        rows["actorflow"].append(epoch())
        if rival is not None:
            rival.stdin.write("\n")
            rival.stdin.flush()
            rows["torch"].append(json.loads(rival.stdout.readline()))
    if rival is not None:
        rival.stdin.close()
        rival.wait()
    for name, rates in rows.items():
        if rates:
            print(
                f"{name}, {options.workers} workers: {median(rates):,.0f} images/s"
                f" ({min(rates):,.0f} to {max(rates):,.0f})"
            )
    if rows["torch"]:
        print(f"ratio of medians {median(rows['actorflow']) / median(rows['torch']):.2f}")


def is_kept(sample: Any) -> bool:
    """Keep every sample."""
    return True


def measure_tokens(folder: Path, rounds: int) -> None:
    """Measure rows of tokens in GB/s."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows, length = 100_000, 1024
    ids = np.random.default_rng(0).integers(0, 50_000, rows * length, dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(ids), length)
    parquet.write_table(
        pa.table({"ids": column}), folder / "tokens.parquet", row_group_size=2048,
        compression="none", use_dictionary=False,
    )  # fmt: skip
    data = af.data.from_parquet(folder / "tokens.parquet")
    ways = {"in order": data, "shuffled": data.shuffle(0), "filtered": data.filter(is_kept)}
    for name, way in ways.items():
        batches = way.repeat().batch(BATCH)
        out = {"ids": np.empty((BATCH, length), np.int32)}
        rates = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(400):
                batches.next_into(out)
            rates.append(400 * out["ids"].nbytes / (time.perf_counter() - begin) / 1e9)
        print(f"tokens {name}: {median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})")
    file, rates = parquet.ParquetFile(folder / "tokens.parquet"), []
    for _ in range(rounds):
        begin = time.perf_counter()
        size = sum([file.read_row_group(g, use_threads=False).nbytes for g in range(12)])
        rates.append(size / (time.perf_counter() - begin) / 1e9)
    print(f"pyarrow alone: {median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})")


@dataclass(frozen=True)
class Slow:
    """Takes so long for each batch; workers import it."""

    seconds: float
    computes: bool

    def __call__(self, batch: Any) -> Any:
        """Return the batch."""
        until = time.perf_counter() + self.seconds
        if not self.computes:
            time.sleep(self.seconds)
        while time.perf_counter() < until:
            pass
        return batch


def measure_training(rounds: int, steps: int = 10) -> None:
    """Measure steps of ResNet-18 on data in memory and on data of a slow loader, in turns."""
    from models.resnet import resnet18

    @af.job(optimizer=af.optim.SGD(0.01))
    def train(model: Any, batch: Any) -> Any:
        return af.cross_entropy(model(batch.image), batch.label)

    logging.getLogger("actorflow").setLevel(logging.ERROR)  # it is trained anew on purpose
    rng = np.random.default_rng(0)
    images = rng.normal(size=(256, 3, 32, 32)).astype(np.float32)
    data = af.data.from_arrays({"image": images, "label": rng.integers(0, 10, 256)})
    memory, model = data.shuffle(0).repeat().batch(8), resnet18(10, stem="cifar")

    def step_s(source: Any) -> tuple[float, float]:
        """Return the seconds of a step and the share that waited, of a run after its start."""
        times: list[float] = []
        done = train.fit(
            model, source, steps=steps, progress=False,
            on_step=lambda step, metrics: times.append(time.perf_counter()),
        )  # fmt: skip
        return (times[-1] - times[2]) / (len(times) - 3), done.data_wait or 0.0

    needs = 0.9 * median([step_s(memory)[0] for _ in range(3)])
    ways = {"that waits": Slow(needs, False), "that computes": Slow(needs, True)}
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, slow in ways.items():
            loader = memory.map(slow).workers(1)
            before, (own, waited), after = step_s(memory)[0], step_s(loader), step_s(memory)[0]
            loader.end_workers()
            rows[name].append(own / ((before + after) / 2) - 1)
            print(f"  loader {name}: {own * 1e3:.0f} ms a step, from memory {before * 1e3:.0f} and"
                  f" {after * 1e3:.0f}, waited {waited:.0%}", flush=True)  # fmt: skip
    for name, costs in rows.items():
        print(
            f"ResNet-18, a loader {name} for {needs * 1e3:.0f} ms: {median(costs):+.1%}"
            f" ({min(costs):+.1%} to {max(costs):+.1%}) over data in memory"
        )


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", help="an interpreter with torch, numpy and Pillow")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="images,tokens,training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if "images" in options.only:
            measure_photos(options, Path(name) / "photos")
        if "tokens" in options.only:
            measure_tokens(Path(name), options.rounds)
        if "training" in options.only:
            measure_training(options.rounds)


if __name__ == "__main__":
    sys.exit(main())
