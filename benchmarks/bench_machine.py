"""What the runtime costs when the kernels cost nothing.

Measures, through the real loop: nanoseconds per firing in chains of actors with one empty launch
each, nanoseconds per launch inside one long chain, and the latency of a message across threads.
Prints a Markdown table. Run: `python benchmarks/bench_machine.py`.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from actors.device.host import HostDevice
from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.loop.load import load
from actors.loop.loop import Loop
from compiler.contract.placement import HOST, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Launch,
    Port,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
)
from compiler.contract.types import ActorId, RegisterId, StreamId

REPEATS = 9


class EmptyPort:
    def bind(self, tokens):
        return nothing

    def close(self):
        pass


class EmptyKernel:
    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(), lambda *operands: nothing)


def nothing():
    pass


def chain_plan(num_actors: int, num_launches: int) -> Plan:
    """A source, compute actors and a sink in a row, all on the dispatcher's thread."""
    launch = Launch("empty", "empty", (), (), (), None, "", 0, 0.0)
    stream = Stream(StreamId(0), HOST, StreamRole.COMPUTE, 0, "compute")
    registers = tuple(
        [
            Register(RegisterId(i), f"r{i}", RegisterKind.CONTROL, 0, 0, 1, (0,), (0, 1), "")
            for i in range(num_actors - 1)
        ]
    )
    actors = []
    for i in range(num_actors):
        is_source, is_sink = i == 0, i == num_actors - 1
        kind = ActorKind.SOURCE if is_source else ActorKind.SINK if is_sink else ActorKind.COMPUTE
        inputs = () if is_source else (Port(RegisterId(i - 1), 1),)
        outputs = () if is_sink else (Port(RegisterId(i), 1),)
        launches = (launch,) * num_launches if kind is ActorKind.COMPUTE else ()
        actors.append(
            Actor(ActorId(i), f"a{i}", kind, stream.id, launches, inputs, outputs, False, 0.0)
        )
    return Plan(
        "chain", (stream,), (), registers, (), tuple(actors), (), (), (),
        (SourceLine("", 0),), (), "", "", (),
    )  # fmt: skip


def run_seconds(num_actors: int, num_launches: int, steps: int) -> float:
    """Seconds of one run, from the start of the threads to the end of the last firing."""
    ports = {"a0": EmptyPort(), f"a{num_actors - 1}": EmptyPort()}
    host = HostDevice({"empty": EmptyKernel()})
    bound = load(chain_plan(num_actors, num_launches), ports, (host,))
    loop = Loop(bound)
    loop.admit(steps)
    loop.end()
    start = time.perf_counter()
    loop.start()
    loop.wait()
    seconds = time.perf_counter() - start
    loop.close()
    return seconds


def us_per_firing(num_actors: int) -> float:
    steps = max(60, 60_000 // num_actors)  # few steps would measure cold caches
    return (
        min([run_seconds(num_actors, 1, steps) for _ in range(REPEATS)])
        / (steps * num_actors)
        * 1e6
    )


def us_per_launch() -> float:
    """Difference of two chain lengths, so that the firing itself drops out."""
    few, many, steps = 10, 1010, 400
    times = [
        min([run_seconds(3, launches, steps) for _ in range(REPEATS)]) for launches in (few, many)
    ]
    return (times[1] - times[0]) / ((many - few) * steps) * 1e6


def us_across_threads(rounds: int = 2000) -> float:
    """Half of a round trip over two queues to a thread that waits, as between loop and worker."""
    there: SimpleQueue[int] = SimpleQueue()
    back: SimpleQueue[int] = SimpleQueue()

    def answer():
        while (code := there.get()) >= 0:
            back.put(code)

    thread = threading.Thread(target=answer)
    thread.start()
    medians = []
    for _ in range(REPEATS):
        trips = []
        for _ in range(rounds):
            start = time.perf_counter_ns()
            there.put(1)
            back.get()
            trips.append(time.perf_counter_ns() - start)
        medians.append(statistics.median(trips))
    there.put(-1)
    thread.join()
    return min(medians) / 2e3


def main() -> None:
    rows = [(f"us per firing, chain of {n}", us_per_firing(n), 1.2) for n in (3, 10, 1000)]
    rows.append(("us per launch in a chain", us_per_launch(), 0.15))
    rows.append(("us per message across threads, p50", us_across_threads(), 15.0))
    print("| what | measured | mark |\n|---|---|---|")
    for what, value, mark in rows:
        print(f"| {what} | {value:.3f} | {mark} |")


if __name__ == "__main__":
    main()
