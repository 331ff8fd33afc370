"""From a fault to the first new step: of a job that is launched with --restarts.

    python benchmarks/bench_restart.py [--kills 10] [--ranks 2] [--fault kill,stop]
    python benchmarks/bench_restart.py --place hosts [--fault kill,agent,gone]
    python benchmarks/bench_restart.py --place ray [--fault kill,agent]
    python benchmarks/bench_restart.py --end-to-end

One job trains without end, saves every 10 steps, and loses a rank again and again; the seconds from
the signal to the end of the next step on rank 0 are printed, with what they consist of: until all
old processes are gone and the script of rank 0 has begun (exit, start of Python, handshake), its
imports, until `fit` is called, and until the first step of the new epoch (the plan from the cache,
the restored checkpoint, the step).

The place is one host; two, which are processes of the launcher on this machine, of which the second
is started again where it ended; or two nodes of Ray on this machine. Of several hosts tensors go by
MPI. `kill` is SIGKILL of a rank. `stop` is SIGSTOP of one, which is noticed after
ACTORFLOW_RANK_SECONDS, here 3; that time is subtracted from the first column. `agent` is SIGKILL of
the agent of the last host, under Ray of its actor. `gone` is SIGSTOP of that agent and its ranks,
which to the launcher is a link that is down: it is noticed after --host-timeout, by default 15 s,
which count here; the time until the host is named is printed, too.

`--end-to-end` trains 40 steps with and without a kill at step 25, on one host and on two, and
compares the files of tensors of the last checkpoint, byte by byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 3.0
MOST_S = 120.0

SCRIPT = """
import os, signal, sys, time

def tell(word):
    with open("told", "a") as file:
        file.write(f"{os.environ['ACTORFLOW_EPOCH']} {word} {time.monotonic()}\\n")

rank = int(os.environ["RANK"])
with open(f"pid{rank}", "w") as file:
    file.write(f"{os.getpid()} {os.getppid()}")
if rank == 0:
    tell("script")
import numpy as np
import actorflow as af
from actorflow import nn
if rank == 0:
    tell("imported")

class Net(nn.Module):
    def __init__(self):
        self.table = nn.Embedding(64, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 64)

    def __call__(self, x):
        return self.down(af.relu(self.up(self.table(x))))

@af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(data=int(os.environ["WORLD_SIZE"])))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)

steps, killed_rank = [int(word) for word in sys.argv[1:]]
first = []

def on_step(step, metrics):
    if rank == killed_rank and os.environ["ACTORFLOW_EPOCH"] == "1" and step == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and (not first or step == first[0] + 30):
        first.append(step)
        tell("stepped" if len(first) == 1 else "saved")

x = np.random.default_rng(0).integers(0, 64, 4096)
if rank == 0:
    tell("fit")
train.fit(Net(), af.data.ArraySource({"x": x, "y": x}, batch=64), steps=steps, checkpoint="run",
          every=10, progress=False, on_step=on_step)
"""
WORDS = ("script", "imported", "fit", "stepped")
FAULTS = {
    "one": ("kill", "stop"), "hosts": ("kill", "stop", "agent", "gone"),
    "ray": ("kill", "stop", "agent"),
}  # fmt: skip
ENDLESS = 10**9
NOBODY = -1

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

# Of 127.0.0.1 Ray makes the machine's own address, and then waits for minutes.
node = {"num_cpus": 1, "object_store_memory": 80 << 20}
head = {**node, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(node_ip_address="127.0.0.3", **node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def cluster(environ: dict[str, str]) -> Iterator[str]:
    """Yield the address of a Ray of two nodes; `environ` is given its token."""
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if re.fullmatch(r"127\.0\.0\.2:\d+\s*", line):
                yield line.strip()
                break
        process.stdin.close()


class Job:
    """A launched job: its processes, and what it has told."""

    def __init__(
        self, folder: Path, place: str, options: list[str], environ: dict[str, str], address: str
    ) -> None:
        self.folder, self._environ = folder, environ
        (folder / "train.py").write_text(SCRIPT)
        self._command = [sys.executable, "-m", "actorflow", "launch", *options]
        if place == "ray":
            self._command += ["--ray", address, "--hosts", "2"]
        if place == "hosts":
            (folder / "key").touch(mode=0o600)
            (folder / "key").write_text(secrets.token_hex(32))
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self._command += ["--hosts", "2", "--key-file", "key"]
            self._command += ["--coordinator", f"127.0.0.1:{port}"]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, place: str, *arguments: str) -> None:
        """Start all hosts, the launcher first."""
        self._arguments = ["train.py", *arguments]
        for host in (0, 1) if place == "hosts" else (0,):
            self.processes.append(self._start(host, place))

    def _start(self, host: int, place: str = "hosts") -> subprocess.Popen[bytes]:
        index = ["--host-index", str(host)] if place == "hosts" else []
        return subprocess.Popen(
            [*self._command, *index, *self._arguments], cwd=self.folder, env=self._environ,
            stderr=(self.folder / f"err{host}").open("a"),
        )  # fmt: skip

    @property
    def said(self) -> str:
        """What the launcher has printed."""
        return (self.folder / "err0").read_text()

    def tend(self) -> None:
        """Start the second host again where it ended, as a scheduler does; look for the end."""
        if self.processes[0].poll() is not None:
            sys.exit(f"the launcher has ended, status {self.processes[0].poll()}:\n{self.said}")
        if self.processes[1:] and self.processes[1].poll() is not None:
            self.processes[1] = self._start(1)

    def told(self, epoch: int, word: str) -> float:
        """Wait until rank 0 has told a word in an epoch; return when, in seconds."""
        deadline_s, path = time.monotonic() + MOST_S, self.folder / "told"
        while time.monotonic() < deadline_s:
            for line in path.read_text().splitlines() if path.exists() else []:
                parts = line.split()
                if parts[:2] == [str(epoch), word] and len(parts) == 3:
                    return float(parts[2])
            self.tend()
            time.sleep(0.01)
        sys.exit(f"epoch {epoch} has not come to {word!r}:\n{self.said}")

    def says(self, text: str, after: int) -> float:
        """Wait until the launcher has printed a text, after so many characters; return when."""
        deadline_s = time.monotonic() + MOST_S
        while text not in self.said[after:]:
            self.tend()
            time.sleep(0.01)
            if time.monotonic() > deadline_s:
                sys.exit(f"the launcher has not said {text!r}:\n{self.said}")
        return time.monotonic()

    def strike(self, fault: str, rank: int, place: str) -> list[int]:
        """Do what a fault is; return the processes that it stopped."""
        own, agent = [int(word) for word in (self.folder / f"pid{rank}").read_text().split()]
        if fault in ("kill", "stop"):
            os.kill(own, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            return []
        if fault == "gone":
            os.kill(agent, signal.SIGSTOP)
            os.kill(own, signal.SIGSTOP)
            return [own, agent]
        if place == "ray":  # the actor is the parent of the agent
            agent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        return []

    def end(self) -> None:
        """End all processes."""
        self.processes[0].send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a job."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORFLOW_RANK_SECONDS": "60"}
    # As for a user: the first epoch keeps bytecode, without which imports take twice as long.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    return environ


def measured(num_kills: int, num_ranks: int, fault: str, place: str) -> list[list[float]]:
    """Return for each fault the seconds that each part took; print when a host was named."""
    rows, named, rng = [], [], random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = environment(folder)
        if fault == "stop":
            environ["ACTORFLOW_RANK_SECONDS"] = str(WAIT_S)
        restarts = ["-n", str(num_ranks), "--restarts", str(num_kills), "--restart-window", "1"]
        with cluster(environ) if place == "ray" else nullcontext("") as address:
            job = Job(folder, place, restarts, environ, address)
            job.start(place, str(ENDLESS), str(NOBODY))
            try:
                for epoch in range(1, num_kills + 1):
                    job.told(epoch, "saved")
                    last = fault in ("agent", "gone")
                    rank = num_ranks - 1 if last else rng.randrange(num_ranks)
                    said, since = len(job.said), time.monotonic()
                    stopped = job.strike(fault, rank, place)
                    if stopped:
                        named.append(job.says("has been silent for", said) - since)
                        job.says("is lost: its host was lost", said)
                        for pid in stopped:
                            os.kill(pid, signal.SIGKILL)
                    at = [since + (WAIT_S if fault == "stop" else 0.0)]
                    at += [job.told(epoch + 1, word) for word in WORDS]
                    rows.append([b - a for a, b in pairwise(at)])
            finally:
                job.end()
    if named:
        print(f"named after {statistics.median(named):.2f} s, at most {max(named):.2f}")
    return rows


def end_to_end() -> None:
    """Train with and without a kill, on one host and on two; compare the last checkpoints."""
    hashes = {}
    for place, killed in (("one", 0), ("hosts", 1)):
        for rank in (NOBODY, killed):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                environ = {**environment(folder), "ACTORFLOW_THREADS": "1"}
                job = Job(folder, place, ["-n", "2", "--restarts", "3"], environ, "")
                since = time.monotonic()
                job.start(place, "40", str(rank))
                codes = [process.wait() for process in job.processes]
                took_s = time.monotonic() - since
                files = sorted((folder / "run" / "step-0000000040").glob("*.safetensors"))
                if any(codes) or not files:
                    sys.exit(f"{place}: exit status {codes}\n{job.said}")
                hashes[place, rank] = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
            what = "undisturbed" if rank == NOBODY else f"rank {rank} killed at step 25"
            print(f"{place:6} {what:24} {took_s:6.1f} s, {len(files)} files of tensors")
        is_same = hashes[place, NOBODY] == hashes[place, killed]
        print(f"{place:6} the last checkpoint is {'equal to the byte' if is_same else 'ANOTHER'}")


def main() -> None:
    """Measure, and print a row for each fault and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fault", default="kill", help="some of kill,stop,agent,gone")
    parser.add_argument("--place", choices=tuple(FAULTS), default="one")
    parser.add_argument("--end-to-end", action="store_true")
    options = parser.parse_args()
    if options.end_to_end:
        end_to_end()
        return
    for fault in options.fault.split(","):
        if fault not in FAULTS[options.place]:
            parser.error(f"--fault {fault}: --place {options.place} has {FAULTS[options.place]}")
        rows = measured(options.kills, options.ranks, fault, options.place)
        head = f"{fault}, {options.ranks} ranks, place {options.place}"
        print(f"{head}: seconds from the fault to the first new step")
        print(f"{'all':>8}" + "".join([f"{word:>10}" for word in WORDS]))
        for row in rows:
            print(f"{sum(row):8.2f}" + "".join([f"{part:10.2f}" for part in row]))
        middle = [statistics.median(part) for part in zip(*rows, strict=True)]
        total = [sum(row) for row in rows]
        print(f"median {statistics.median(total):.2f}, most {max(total):.2f};", end=" ")
        print(", ".join([f"{w} {s:.2f}" for w, s in zip(WORDS, middle, strict=True)]))


if __name__ == "__main__":
    main()
