"""Time and memory of weights from a file: `model.load`, beside the safetensors library alone.

    python benchmarks/bench_weights.py [--mib 512] [--rounds 5]

Each way reads files that are in the page cache, in a process of its own: the least time of some
rounds, and the most memory above that before the load, as a multiple of the model's bytes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import actorflow as af
from actorflow import nn

WIDTH = 2048


def model_of(size_mib):
    """Layers without bias of as many bytes, 16 MiB each."""
    layers = max(1, size_mib * (1 << 20) // (WIDTH * WIDTH * 4))
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


WAYS = {
    "model.load, one float32 file": lambda model, folder: model.load(folder / "whole.safetensors"),
    "model.load, bfloat16 shards": lambda model, folder: model.load(folder / "shards"),
    "model.load, float16 file": lambda model, folder: model.load(folder / "half.safetensors"),
    "safetensors.numpy.load_file alone": lambda model, folder: load_file(
        folder / "whole.safetensors"
    ),
    "af.load, one tensor read": lambda model, folder: af.load(folder / "whole.safetensors")[
        "0.weight"
    ],
}


def peak_bytes():
    # Not ru_maxrss, which a child has from its parent.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def measure(way, folder, size_mib):
    """Print seconds and bytes of one load in this process."""
    warm = nn.Linear(2, 2)
    warm.save(Path(folder) / "warm.safetensors")
    warm.load(Path(folder) / "warm.safetensors")  # imports
    model = model_of(size_mib)
    before, began = peak_bytes(), time.perf_counter()
    kept = WAYS[way](model, Path(folder))
    seconds = time.perf_counter() - began
    print(seconds, peak_bytes() - before, kept is None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="of the model in float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options.way, options.folder, options.mib)
        return
    with tempfile.TemporaryDirectory() as folder:
        model, size_bytes = model_of(options.mib), options.mib << 20
        weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
        model.load(dict.fromkeys([path for path, _ in model.named_parameters()], weight))
        model.save(Path(folder) / "whole.safetensors")
        model.save(Path(folder) / "half.safetensors", dtype="float16")
        model.save(Path(folder) / "shards", dtype="bfloat16", shard_bytes=size_bytes // 8)
        print(f"model of {options.mib} MiB in float32, least of {options.rounds} rounds")
        print("| way | seconds | GB/s of float32 | memory / model |\n|---|--:|--:|--:|")
        for way in WAYS:
            rows = []
            for _ in range(options.rounds):
                command = [sys.executable, __file__, "--mib", str(options.mib), "--way", way]
                done = subprocess.run(
                    [*command, "--folder", folder], capture_output=True, text=True, check=True
                )
                rows.append([float(word) for word in done.stdout.split()[:2]])
            seconds, peak = min(row[0] for row in rows), max(row[1] for row in rows)
            rate = size_bytes / seconds / 1e9
            print(f"| {way} | {seconds:.3f} | {rate:.2f} | {peak / size_bytes:.2f} |")


if __name__ == "__main__":
    main()
