"""Time how long a job on two hosts takes to start, and to end after something was killed.

    python -m benchmarks.bench_hosts [--repeats 5]

Both hosts are processes of `actorflow launch` on this machine, joined over 127.0.0.1, with a rank
each. A kill is timed from the signal to the exit of the host that is left, and of its rank with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, threading, time
from actorflow.distributed.member import current_rank

member = current_rank()
member.all_gather_object("meet", 0)
started = time.perf_counter()
for _ in range(200):
    member.all_gather_object("round", member.rank)
round_us = (time.perf_counter() - started) / 200 * 1e6
rows = member.all_gather_object("processes", (os.getpid(), round_us))
if member.rank == 0:
    print(rows[1][0], rows[0][1], flush=True)
if "wait" in sys.argv:
    member.all_gather_object("the end", 0) if member.rank == 0 else threading.Event().wait()
"""


def started(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start both hosts; return their processes, host 0 first."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    script, key = folder / "script.py", folder / "key"
    script.write_text(SCRIPT)
    if not key.exists():
        key.touch(mode=0o600)
        key.write_text(os.urandom(32).hex())
    own = [sys.executable, "-m", "actorflow", "launch", "-n2", "--hosts=2", f"--key-file={key}"]
    pair = [
        subprocess.Popen(
            [*own, f"--coordinator={address}", f"--host-index={index}", str(script), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in (0, 1)
    ]  # fmt: skip
    return pair[0], pair[1]


def timed(folder: Path, killed: str) -> tuple[float, float, float]:
    """Return seconds until both ranks met, seconds from a kill to the end, and us of a gather."""
    began = time.perf_counter()
    first, second = started(folder, *(["wait"] if killed else []))
    assert first.stdout is not None
    process, round_us = first.stdout.readline().split()
    start_s = time.perf_counter() - began
    targets = {"rank": int(process), "agent": second.pid, "launcher": first.pid}
    left = second if killed == "launcher" else first
    began = time.perf_counter()
    if killed:
        os.kill(targets[killed], signal.SIGKILL)
    left.communicate()
    end_s = time.perf_counter() - began
    for host in (first, second):
        host.communicate()
    return start_s, end_s, float(round_us)


def main() -> None:
    """Print a row for each kind of end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        for killed in ("", "rank", "agent", "launcher"):
            rows = [timed(Path(name), killed) for _ in range(repeats)]
            starts, ends, rounds = zip(*rows, strict=True)
            print(
                f"{killed or 'none':8} killed: start {statistics.median(starts):.2f} s, end"
                f" {statistics.median(ends):.2f} s (at most {max(ends):.2f}), gather"
                f" {statistics.median(rounds):.0f} us"
            )


if __name__ == "__main__":
    main()
