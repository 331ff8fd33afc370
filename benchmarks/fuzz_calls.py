"""Calls of functions, methods and layers with random arguments: results or typed errors, no more.

    python benchmarks/fuzz_calls.py [--count 100000] [--seconds N] [--first 0] [--only NAME]
        [--workers 2]
        [--native] [--device sim|cuda] [--group 24] [--show 3]
    python benchmarks/fuzz_calls.py --one "function conv2d 17"

Everything public is called (`fuzzing.calls`), a group of calls in one job, in a child process
(`fuzzing.call_trial`) that is started again when it dies: a group that kills it, or hangs, is tried
call by call. Each call is traced, with its gradients, compiled and run. Where torch can be imported
its results are compared, of dtype, shape and values; else numpy's of a few functions.

Prints how many calls came to what, and the causes of faults, with examples. `--one` tries a single
call again, in this process. Fails where a call died, hung, raised anything untyped, did not name
the line of its user, or came to something else than the oracle.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from fuzz_plans import Child, environment  # noqa: E402  # a neighbour, in no package

BAD = ("untyped", "nowhere", "other", "died", "hung")

Asked = tuple[str, str, int]


@dataclass
class Tally:
    """What became of the calls, and the first examples of each cause of a fault."""

    outcomes: Counter = field(default_factory=Counter)
    causes: Counter = field(default_factory=Counter)
    examples: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def num_lost(self) -> int:
        """Calls that are faults of ours."""
        return sum([self.outcomes[name] for name in BAD])

    def add(self, asked: Asked, outcome: str, cause: str, words: str) -> None:
        self.outcomes[outcome] += 1
        if outcome in BAD:
            self.causes[outcome, cause] += 1
            example = f'--one "{" ".join(map(str, asked))}"\n{words}'
            self.examples.setdefault((outcome, cause), []).append(example)


def chosen(count: int, first: int, only: str | None) -> list[Asked]:
    """Return the calls of some seeds: all that is public in turn, or what has one name."""
    from fuzzing.calls import subjects

    candidates = [s for s in subjects() if only in (None, s[1])]
    return [(*candidates[seed % len(candidates)], seed) for seed in range(first, first + count)]


def campaign(
    asked: list[Asked],
    group: int,
    workers: int,
    environ: dict[str, str],
    seconds: float = float("inf"),
) -> Tally:
    """Try calls in children, so many at once, for some time; return what became of them."""
    until = time.monotonic() + seconds
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for at in range(0, len(asked), group):
        todo.put(asked[at : at + group])
    tally, lock = Tally(), threading.Lock()

    def work() -> None:
        child = Child(("fuzzing.call_trial",), environ)
        while time.monotonic() < until:
            try:
                calls = todo.get_nowait()
            except queue.Empty:
                break
            for call, outcome in zip(calls, _outcomes(child, calls), strict=True):
                with lock:
                    tally.add(call, *outcome)
        child.end()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _outcomes(child: Child, calls: list[Asked]) -> list[tuple[str, str, str]]:
    """Return what a child says of calls, of each alone where it dies of all."""
    answer = child.ask(calls)
    if isinstance(answer, list):
        return answer
    if len(calls) == 1:
        return [(answer.outcome, " ".join(calls[0][:2]), f"{answer.code}\n{answer.errors}")]
    return [_outcomes(child, [call])[0] for call in calls]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="a function, method or layer by name")
    parser.add_argument("--group", type=int, default=24, help="calls of one job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--native", action="store_true", help="native kernels in place of numpy's")
    parser.add_argument("--device", help="sim or cuda, which the host emulates")
    parser.add_argument("--show", type=int, default=1, help="examples of each cause of a fault")
    parser.add_argument("--one", metavar='"KIND NAME SEED"', help="try this call alone, here")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-calls-") as place:
        environ = environment(Path(place), is_native=options.native)
        if options.device:
            environ |= {"ACTORFLOW_DEVICE": options.device, "ACTORFLOW_CUDA": "emulated"}
        if options.one:
            return _tried_here(options.one, environ)
        calls = chosen(options.count, options.first, options.only)
        tally = campaign(calls, options.group, options.workers, environ, options.seconds)
    for cause, count in tally.causes.most_common():
        print(f"-- {count} {': '.join(cause)}")
        for text in tally.examples[cause][: options.show]:
            print(f"{text}\n")
    print("| outcome | calls |\n|---|--:|")
    for outcome, count in tally.outcomes.most_common():
        print(f"| {outcome} | {count:,} |")
    took = time.monotonic() - began
    count = sum(tally.outcomes.values())
    print(f"{count:,} calls from seed {options.first} on in {took:.0f} s")
    print(f"{len(tally.causes)} causes of faults")
    return bool(tally.num_lost)


def _tried_here(one: str, environ: dict[str, str]) -> int:
    os.environ |= environ
    from fuzzing import call_trial
    from fuzzing.calls import drawn

    kind, name, seed = one.split()
    call = drawn(kind, name, int(seed))
    print(call)
    outcome = call_trial.tried([call])[0]
    print(*outcome, sep="\n")
    return outcome[0] in BAD


if __name__ == "__main__":
    raise SystemExit(main())
