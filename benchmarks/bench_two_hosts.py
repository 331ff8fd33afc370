"""A step on two hosts at 1 Gbit/s: against its parts, the simulator, the plan's bytes, one process.

    sudo .venv/bin/python benchmarks/bench_two_hosts.py [--width 1024] [--steps 30] [--rate 1gbit]

The hosts are two network namespaces of this machine, joined by a link of that rate; each has a core
and memory segments of its own. It needs root, `ip` and `tc` (iproute2), and the extra [mpi]. The
job is data parallel: layers of width x width, and as many rows that its computation takes as long
as its messages. Prints

- the step, and its two parts alone: one process with the rows of one rank, and the plan's bytes at
  the rate of the link; the mark is 1.2 times the longer one;
- the step that `actorflow simulate` tells for this link, calibrated here; the mark is 20 %;
- the bytes that a rank sent in a step, counted where messages are sent, against those of the plan,
  as its collectives say; the mark is 3 %;
- how far losses of a GPT on 2 x 2 ranks are from those of one process; the mark is 1e-6.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCRIPT = """
import json, os, time
import numpy as np
import actorflow as af
from actorflow import nn
from actorflow.distributed.member import current_rank
from compiler.contract.placement import collective_rounds
from compiler.contract.plan_tables import ActorKind

ranks, rows, width = [int(os.environ[n]) for n in ("RANKS", "ROWS", "WIDTH")]
steps, kind = int(os.environ["STEPS"]), os.environ["KIND"]

class Gpt(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(64, 64)
        self.block = nn.TransformerBlock(64, heads=4, causal=True, sbp={"model": af.split(0)})
        self.out = nn.Linear(64, 64)

    def __call__(self, x):
        return self.out(self.block(self.table(x)))

rng = np.random.default_rng(0)
if kind == "gpt":
    model, mesh = Gpt(), af.Mesh(data=2, model=2)
    tokens = rng.integers(0, 64, (256, 33)).astype(np.int32)
    arrays = {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    batch = 16
else:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model, mesh, batch = nn.Sequential(*layers), af.Mesh(data=2), rows * ranks
    x = rng.normal(size=(2 * batch, width)).astype(np.float32)
    arrays = {"x": x, "y": np.abs(x)}

@af.job(optimizer=af.optim.SGD(0.01), **({"mesh": mesh} if ranks > 1 else {}))
def train(model, batch):
    if kind == "gpt":
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())
    return af.mse_loss(model(batch.x), batch.y)

losses, ends = [], []

def note(step, metrics):
    losses.append(float(metrics["loss"]))
    ends.append(time.perf_counter())

data = af.data.ArraySource(arrays, batch=batch, seed=1)
train.fit(model, data, steps=steps, progress=False, on_step=note)
sent = planned = 0
if ranks > 1 and "RANK" in os.environ:
    from actors.collectives import mpi
    member = current_rank()
    sent = mpi.connect(member.rank, ranks, member.all_gather_object).bytes_sent / steps
    types = {n: af.TensorType(af.DType(str(a.dtype)), a[:batch].shape) for n, a in arrays.items()}
    plan = train.compile(model, types)
    for launch in [x for a in plan.actors if a.kind is ActorKind.COMM for x in a.launches]:
        ends_of = launch.inputs, launch.outputs
        sizes = [sum([plan.views[v].type.size_bytes for v in views]) for views in ends_of]
        for one in collective_rounds(launch.op, 2, 1):
            planned += one.sent_bytes(max(sizes))
row = {"losses": losses, "ends": ends, "sent": sent, "planned": planned}
with open(os.environ["RESULT"] + os.environ.get("RANK", "0"), "w") as file:
    json.dump(row, file)
"""
NAMES = ("two-hosts-a", "two-hosts-b")


def run(*words: str) -> None:
    """Run a command. Raises CalledProcessError where it fails."""
    subprocess.run(words, check=True)


@contextmanager
def namespaces(rate: str) -> Iterator[None]:
    """Make two network namespaces, joined at a rate each way; 10.79.0.1 is in the first."""
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        far = ("peer", "name", "bth1", "netns", NAMES[1])
        run("ip", "link", "add", "bth0", "netns", NAMES[0], "type", "veth", *far)
        for number, name in enumerate(NAMES):
            end = f"bth{number}"
            run("ip", "-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", end)
            for device in ("lo", end):
                run("ip", "-n", name, "link", "set", device, "up")
            # A larger burst lets a bucket of gradients through unshaped, a smaller one cuts frames.
            shape = ("tbf", "rate", rate, "burst", "72kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", end, "root", *shape)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Bench:
    """Runs the script in some ways; `folder` has what it leaves."""

    def __init__(self, folder: Path, width: int, steps: int, rate: str) -> None:
        self.folder, self.width, self.steps = folder, width, steps
        self.link = f"{to_gb_per_s(rate):.4f}:60"
        self.script, self.key, self.port = folder / "job.py", folder / "key", 29_411
        self.script.write_text(SCRIPT)
        self.key.touch(mode=0o600)
        self.key.write_text(os.urandom(32).hex() + "\n")

    def environ(self, ranks: int, rows: int, kind: str) -> dict[str, str]:
        """Return the environment of a run."""
        own = {"RANKS": ranks, "ROWS": rows, "WIDTH": self.width, "STEPS": self.steps}
        files = {"RESULT": self.folder / "row", "ACTORFLOW_CACHE": self.folder / "cache"}
        rest = {"KIND": kind, "ACTORFLOW_LINK": self.link, "ACTORFLOW_THREADS": 1}
        return {**os.environ, **{name: str(v) for name, v in (own | files | rest).items()}}

    def alone(self, rows: int, kind: str = "layers") -> dict[str, Any]:
        """Run one process on one core."""
        command = ["taskset", "-c", "0", sys.executable, str(self.script)]
        subprocess.run(command, env=self.environ(1, rows, kind), check=True)
        return self.row()

    def on_hosts(self, rows: int, ranks: int = 2, kind: str = "layers") -> dict[str, Any]:
        """Run ranks on both hosts, a core for each host."""
        self.port += 1  # a connection of the run before may still be closing
        hosts = []
        for index, name in enumerate(NAMES):
            inside = ["ip", "netns", "exec", name, "unshare", "-i", "taskset", "-c", str(index)]
            options = [f"-n{ranks}", "--hosts=2", f"--host-index={index}", f"--key-file={self.key}"]
            launch = [sys.executable, "-m", "actorflow", "launch", *options]
            command = [*inside, *launch, f"--coordinator=10.79.0.1:{self.port}", str(self.script)]
            hosts.append(subprocess.Popen(command, env=self.environ(ranks, rows, kind)))
        for host in hosts:
            if host.wait():
                sys.exit("a host failed: see above")
        return self.row()

    def row(self) -> dict[str, Any]:
        """Return what rank 0 of the last run has left."""
        found: dict[str, Any] = json.loads((self.folder / "row0").read_text())
        return found

    def simulated_s(self, rows: int) -> float:
        """Return the seconds of a step that the simulator tells."""
        rate, latency = self.link.split(":")
        options = ["--per-host=1", f"--link={rate}", f"--latency={latency}", "--json"]
        command = ["taskset", "-c", "0", sys.executable, "-m", "actorflow", "simulate", *options]
        done = subprocess.run(
            [*command, str(self.script)], env=self.environ(2, rows, "layers"),
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return float(json.loads(done.stdout)["step_ms"]) / 1e3


def to_gb_per_s(rate: str) -> float:
    """Return what a link of such a rate carries: 95 % of it, the rest are headers."""
    units = {"gbit": 1e9, "mbit": 1e6}
    unit = rate[-4:]
    return float(rate[:-4]) * units[unit] / 8 * 0.95 / 1e9


def step_s(row: dict[str, Any]) -> float:
    """Return the median of the last two thirds of the steps."""
    ends: Sequence[float] = row["ends"]
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.median(gaps[len(gaps) // 3 :])


def main() -> None:
    """Measure, and print a row for each mark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", default="1gbit", help="of the link each way, as tc reads it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, namespaces(args.rate):
        bench = Bench(Path(name), args.width, args.steps, args.rate)
        bytes_per_s = to_gb_per_s(args.rate) * 1e9
        # Of gradients, which an all-reduce of two sends once. Few rows would be gathered instead.
        messages = 4 * args.width * (args.width + 1) * 4 / bytes_per_s
        rows, some = 256, 64
        few, many = [step_s(bench.alone(n)) for n in (some, rows)]
        # Time is a part for the update, and one for each row.
        per_row = max(1e-9, (many - few) / (rows - some))
        rows = max(1, int(some + (messages - few) / per_row))
        compute, step = step_s(bench.alone(rows)), bench.on_hosts(rows)
        took, told = step_s(step), bench.simulated_s(rows)
        messages = step["planned"] / bytes_per_s
        longer = max(compute, messages)
        print(f"{rows} rows a rank: computing alone {compute * 1e3:.1f} ms, messages alone"
              f" {messages * 1e3:.1f} ms")  # fmt: skip
        print(f"step {took * 1e3:.1f} ms: {took / longer:.2f} of the longer (mark 1.2)")
        print(f"simulated {told * 1e3:.1f} ms: {told / took - 1:+.1%} of the step (mark 20 %)")
        share = step["sent"] / step["planned"] - 1
        print(f"sent {step['sent']:,.0f} bytes a step, planned {step['planned']:,.0f}: {share:+.2%}"
              " (mark 3 %)")  # fmt: skip
        one, four = bench.alone(1, "gpt")["losses"], bench.on_hosts(1, 4, "gpt")["losses"]
        apart = max([abs(a - b) / abs(a) for a, b in zip(one, four, strict=True)])
        print(f"GPT on 2 x 2 ranks: losses are {apart:.1e} from those of one process (mark 1e-6)")


if __name__ == "__main__":
    main()
