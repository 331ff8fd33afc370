"""Random runs that are read, written and trained a second time from everywhere; nothing may slip.

    python benchmarks/soak_state.py [--runs 100] [--seed 0]

Every run draws its streams, batches per step, rate of metrics, evaluation and call (`fit`,
`stream`). In the odd ones a model is trained, and threads, callbacks and the loop read it: each
read must be, bit for bit, what a twin held after one of its steps, and no older than the outputs at
hand. In the even ones steps change nothing and tell which values they were made of: threads and
callbacks load numbered models, and every step must be made of one of them as a whole, none older
than a step before; the last one loaded must be what is left. Meanwhile others try to train the same
model, and must be refused. Prints what was tried, what held and what was lost; exit code 1 for any
loss.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import actorflow as af
from actorflow import nn
from actorflow.compile import num_streams
from actorflow.compile.targets import HostTarget

STEPS = 24


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 5)

    def __call__(self, x):
        return self.down(af.relu(self.up(x)))


def loss_of(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def loss_and_sums(model, batch):
    sums = {name: p.sum() for name, p in model.named_parameters()}
    return {"loss": loss_of(model, batch), **sums}


@af.job(train=False)
def score(model, batch):
    return {"loss": loss_of(model, batch)}


def data_of(seed=0):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(320, 8)).astype(np.float32)
    y = (x @ rng.normal(size=(8, 5))).argmax(1).astype(np.int32)
    return af.data.ArraySource({"x": x, "y": y}, batch=16, seed=seed)


def bytes_of(state):
    return b"".join([state[name].tobytes() for name in sorted(state)])


class Soak:
    """One run; `counts` are (what, "held" or "lost")."""

    def __init__(self, seed: int, counts: Counter[tuple[str, str]]) -> None:
        self.random = random.Random(seed)
        self.counts = counts
        self.options = {"streams": self.random.choice([1, 2])}
        self.options["accumulate"] = self.random.choice([1, 1, 2, 3])
        self.rate = self.random.choice([1, 1, 3])
        self.model = Net()
        self.is_over, self.has_begun = threading.Event(), threading.Event()
        self.num_told = 0

    def note(self, what: str, *, is_held: bool) -> None:
        self.counts[what, "held" if is_held else "lost"] += 1

    def train(self, job, listen) -> None:
        """Train by a call that is drawn, with threads around it."""
        threads = [threading.Thread(target=t) for t in self.threads]
        watched = None
        if self.random.random() < 0.5:
            every, batches = self.random.choice([1, 3]), self.random.choice([1, 3])
            watched = af.Evaluation(score, data_of(7), every, batches, lambda s, _: listen(s, {}))
        is_stream = watched is None and self.random.random() < 0.5
        [thread.start() for thread in threads]
        try:
            if is_stream:
                for step, metrics in enumerate(job.stream(self.model, data_of(), steps=STEPS), 1):
                    listen(step, metrics)
            else:
                job.fit(
                    self.model, data_of(), steps=STEPS, progress=False, on_step=listen,
                    evaluation=watched,
                )  # fmt: skip
        finally:
            self.is_over.set()
            self.has_begun.set()
            [thread.join() for thread in threads]

    def second(self) -> None:
        """Try to train the model once more; only the end of the run lets that happen."""
        other = af.job(loss_of, optimizer=af.optim.SGD(0.0))
        self.has_begun.wait()
        while not self.is_over.is_set():
            try:
                next(other.stream(self.model, data_of(), steps=1))
            except af.CompileError as error:
                self.note("second trainings", is_held="would train parameter" in str(error))
            else:
                self.note("second trainings", is_held=self.num_told >= STEPS)

    # -- reads -----------------------------------------------------------------------------------

    def reads(self) -> None:
        job = af.job(
            loss_of, optimizer=af.optim.AdamW(1e-2), metrics_every=self.rate, **self.options
        )
        twin, data, steps = Net(), data_of(), {}
        for step in range(1, STEPS + 1):
            job.step(twin, [next(data) for _ in range(self.options["accumulate"])])
            steps[bytes_of(twin.state())] = step
        job.close(twin)
        start = af.job(loss_of, optimizer=af.optim.SGD(0.0))
        start.step(self.model, next(data_of()))  # the initial values are there from now on
        start.close(self.model)
        steps[bytes_of(self.model.state())] = 0
        states: list[tuple[int, bytes]] = []
        self.threads = [lambda: self.look(states)] * 2

        def listen(step, metrics):
            states.append((step, bytes_of(self.model.state())))

        self.train(job, listen)
        states.append((STEPS, bytes_of(self.model.state())))
        for least, state in states:
            self.note("reads", is_held=steps.get(state, -1) >= least)

    def look(self, found) -> None:
        while not self.is_over.is_set():
            found.append((0, bytes_of(self.model.state())))

    # -- writes ----------------------------------------------------------------------------------

    def writes(self) -> None:
        job = af.job(
            loss_and_sums, optimizer=af.optim.SGD(0.0), metrics_every=self.rate, **self.options
        )
        sizes = {name: p.type.num_elements for name, p in self.model.named_parameters()}
        shapes = {name: p.type.shape for name, p in self.model.named_parameters()}
        heard: list[set[int]] = []
        lock, number = threading.Lock(), 0

        def load():
            nonlocal number
            with lock:
                number += 1
                self.model.load({n: np.full(s, number, np.float32) for n, s in shapes.items()})
                state = self.model.state()
                self.note("writes", is_held={float(a.min()) for a in state.values()} == {number})

        load()

        def listen(step, metrics):
            self.has_begun.set()
            if metrics:
                self.num_told = step
                heard.append({round(metrics[n] / size) for n, size in sizes.items()})
            if self.random.random() < 0.4:
                load()

        def write():
            self.has_begun.wait()
            while not self.is_over.is_set():
                load()

        self.threads = [self.second, write][: self.random.choice([1, 2])]
        self.train(job, listen)
        numbers = [min(values) for values in heard]
        self.note("steps of whole models", is_held=all(len(values) == 1 for values in heard))
        self.note("steps in order", is_held=numbers == sorted(numbers))
        last = {float(a.min()) for a in self.model.state().values()}
        self.note("last writes", is_held=last == {number})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("ACTORFLOW_NATIVE", "0")  # plans are made faster; values change as well
    # So that a tiny model has several chains, on every stream that is asked for.
    HostTarget.message_ns = 100.0
    num_streams.asks_for_choice = lambda hardware, options: False
    counts: Counter[tuple[str, str]] = Counter()
    for seed in range(args.seed, args.seed + args.runs):
        soak = Soak(seed, counts)
        (soak.reads if seed % 2 else soak.writes)()
        if any(result == "lost" for _, result in counts):
            print(f"seed {seed} lost something")
            break
    print("| tried | held | lost |\n|---|---|---|")
    for what in dict.fromkeys([what for what, _ in counts]):
        num_held, num_lost = counts[what, "held"], counts[what, "lost"]
        print(f"| {num_held + num_lost:,} {what} | {num_held:,} | {num_lost:,} |")
    sys.exit(any(result == "lost" for _, result in counts))


if __name__ == "__main__":
    main()
