"""What collectives between ranks of this host take, and how much memory they move per second.

    python benchmarks/bench_collectives.py [--ranks 2] [--kinds all_reduce,...] [--json FILE]
    python benchmarks/bench_collectives.py --hosts ab [--ranks 2] [--kinds all_reduce]
    python benchmarks/bench_collectives.py --gloo PYTHON [--ranks 2] [--rounds 3]

Each rank is a process. All sizes are gone through in rounds, so that what else the machine does
meets all of them alike; a row is the median over all rounds of the slowest rank. With `--gloo`
PYTHON is one that has torch: its all-reduce by gloo takes turns with ours, a thread for each rank,
and the medians of the rounds stand beside each other. `--hosts` has a letter for the host of each
rank, between which messages go by MPI.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actorflow.distributed.rank_process import on_cores, split_cores
from actors.collectives import mpi
from actors.collectives.hierarchical import HierarchicalCommunicator
from actors.collectives.shared_memory import SharedMemory
from actors.kernels.library.toolchain import find_toolchain
from compiler.contract.collective import Collective, LaunchSite
from compiler.contract.placement import Mesh
from compiler.contract.types import DType, TensorType

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 16 * KIB, 64 * KIB, MIB, 25_000_000, 100_000_000)
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SECONDS = 0.25
"""Of each size in a round, as far as it fits at least three times."""

GLOO = """
import json, statistics, sys, time
import torch
import torch.distributed as dist

rank, ranks, file, seconds, *sizes = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + file, rank=int(rank), world_size=int(ranks)
)

def once(x):
    begin = time.perf_counter_ns()
    dist.all_reduce(x)
    return time.perf_counter_ns() - begin

found = []
for size in map(int, sizes):
    x = torch.full((size // 4,), float(rank))
    once(x)
    assert x[0] == sum(range(int(ranks)))
    x.zero_()
    longest = torch.tensor([once(x)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    own = [once(x) for _ in range(max(3, min(2000, int(float(seconds) * 1e9 / longest.item()))))]
    all_ranks = [None] * int(ranks)
    dist.all_gather_object(all_ranks, own)
    found.append(statistics.median(map(max, zip(*all_ranks))))
if rank == "0":
    print(json.dumps(found))
dist.destroy_process_group()
"""


def bound(communicator: SharedMemory | HierarchicalCommunicator, kind: str, size: int, order: int):
    """Return a launch of a collective over so many bytes of float32 as all ranks have together."""
    ranks = communicator.mesh.num_ranks
    rows = size // (4 * ranks) // ranks * ranks
    whole = TensorType(DType.FLOAT32, (ranks, rows))
    part = TensorType(DType.FLOAT32, (1, rows))
    column = TensorType(DType.FLOAT32, (ranks, rows // ranks))
    source, target = {
        "all_reduce": (whole, whole),
        "reduce_scatter": (whole, part),
        "all_gather": (part, whole),
        "all_to_all": (part, column),
    }[kind]
    attrs = {"group": "data", "order": order, "num_ranks": ranks}
    attrs |= {
        "all_reduce": {"by": "sum"},
        "reduce_scatter": {"by": "sum", "axis": 0, "rows": 1},
        "all_gather": {"axis": 0, "rows": ranks},
        "all_to_all": {"axis": 0, "rows": ranks, "to_axis": 1, "to_rows": rows // ranks},
    }[kind]
    arrays = [
        communicator.allocate(type_.size_bytes, 64).view(np.float32).reshape(type_.shape)
        for type_ in dict.fromkeys((source, target))
    ]
    arrays[0][...] = communicator.rank
    site = LaunchSite("bench", 0, kind, kind, "here")
    collective = Collective.of(kind, attrs, (source,), (target,), site)
    return communicator.bind(collective, (arrays[0],), (arrays[-1],))


def once(meet) -> int:
    begin = time.perf_counter_ns()
    meet()
    return time.perf_counter_ns() - begin


def run(rank: int, options: argparse.Namespace, pipe) -> None:
    """Be one rank: time what the options ask for, in rounds."""

    def gather(name: str, value: object):
        pipe.send(value)
        return pipe.recv()

    mesh = Mesh(("data",), (options.ranks,))
    toolchain = find_toolchain(os.environ, Path(options.cache))
    communicator: SharedMemory | HierarchicalCommunicator
    if options.hosts:
        communicator = HierarchicalCommunicator(
            rank, mesh, gather, toolchain, host=options.hosts[rank], connect=mpi.connect
        )
    else:
        communicator = SharedMemory(rank, mesh, gather, toolchain, deadline_s=60)
    cases = [(kind, size) for kind in options.kinds.split(",") for size in SIZES]
    meets = {case: bound(communicator, *case, order) for order, case in enumerate(cases)}
    communicator.ready()
    times: dict[tuple[str, int], list[int]] = {case: [] for case in meets}
    for _ in range(options.rounds):
        for case, meet in meets.items():
            meet()
            # All ranks make as many: as many as the slowest one's first says.
            longest = max(gather("times", once(meet)))
            for _ in range(max(3, min(2000, int(SECONDS * 1e9 / longest)))):
                times[case].append(once(meet))
    gather("found", list(times.items()))
    communicator.close()


def measure(options: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Run all ranks; return the median time in ns by kind and size."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(options.ranks)]
    ranks = [
        context.Process(target=run, args=(rank, options, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    parts = split_cores(sorted(os.sched_getaffinity(0)), options.ranks) or [None] * options.ranks
    for rank, part in zip(ranks, parts, strict=True):
        with on_cores(part):
            rank.start()
    while True:
        answers = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send(answers)
        if isinstance(answers[0], list):
            break
    for rank in ranks:
        rank.join()
    by_rank = [dict(times) for times in answers]
    return {
        case: statistics.median(map(max, zip(*[times[case] for times in by_rank], strict=True)))
        for case in by_rank[0]
    }


def by_gloo(options: argparse.Namespace) -> dict[int, float]:
    """Return the median time in ns of gloo's all-reduce by size."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(options.ranks), f"{folder}/meet", str(SECONDS), *map(str, SIZES)]
        ranks = [
            subprocess.Popen(
                [options.gloo, "-c", GLOO, str(rank), *arguments], stdout=subprocess.PIPE, text=True
            )
            for rank in range(options.ranks)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    return dict(zip(SIZES, json.loads(outputs[0]), strict=True))


def compare(options: argparse.Namespace) -> None:
    """Print a table of all-reduces, ours and gloo's in turns."""
    rows: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    settings = argparse.Namespace(**{**vars(options), "kinds": "all_reduce", "rounds": 1})
    for _ in range(options.rounds):
        ours, theirs = measure(settings), by_gloo(options)
        for size in SIZES:
            rows[size].append((ours["all_reduce", size] / 1e6, theirs[size] / 1e6))
    print("| bytes | ours, ms | gloo, ms | gloo / ours |\n|---|---|---|---|")
    for size, pairs in rows.items():
        columns = [*zip(*pairs, strict=True), [theirs / ours for ours, theirs in pairs]]
        cells = [f"{statistics.median(c):.4g} ({min(c):.4g}-{max(c):.4g})" for c in columns]
        print(f"| {size:,} | {' | '.join(cells)} |")


def main() -> None:
    """Print a table, or write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", default=tempfile.gettempdir() + "/actorflow-bench")
    parser.add_argument("--hosts", default="", help="a letter for each rank")
    parser.add_argument("--gloo", metavar="PYTHON", help="which has torch")
    options = parser.parse_args()
    Path(options.cache).mkdir(mode=0o700, exist_ok=True)
    if options.gloo:
        compare(options)
        return
    times = measure(options)
    print(f"{options.ranks} ranks; median of the slowest rank, ms (GB/s of the whole tensor)")
    for kind in dict.fromkeys([kind for kind, _ in times]):
        cells = [
            f"{size / 1000:.6g} KB {ns / 1e6:.4g} ({size / ns:.3g})"
            for (other, size), ns in times.items()
            if other == kind
        ]
        print(f"{kind:16}", "   ".join(cells))
    if options.json:
        rows = [[kind, size, ns] for (kind, size), ns in times.items()]
        options.json.write_text(json.dumps({"ranks": options.ranks, "ns": rows}))


if __name__ == "__main__":
    main()
