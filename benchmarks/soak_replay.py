"""Find planted ops whose result is not finite by `actorflow replay`.

    python benchmarks/soak_replay.py [--runs 20] [--first 0]

Each run trains a network of some blocks from a script of its own. In one of them an op is planted
that gives NaN or an infinity for one row of the data: the log of a negative number, a division by
zero, an overflow, a root of a negative number, or a difference of infinities. The run ends there.
`actorflow replay RUN` must name the line of the planted op as the first one, the file's row, and
make losses that are the run's own bit for bit. Of 20 runs 5 have two ranks and 5 are in bf16.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FAULTS = {
    "log": "af.log(1.5 - flag * 3.0)",
    "div": "1.0 / (1.0 - flag)",
    "exp": "af.exp(flag * 200.0)",
    "sqrt": "af.sqrt(0.5 - flag)",
    "mul": "(1.0 + flag * 1e25) * (1.0 + flag * 1e25)",
}
"""Expressions that are finite for a flag of 0 and not for one of 1; the name is the op's."""

SCRIPT = """
import sys

import numpy as np

import actorflow as af
from actorflow import nn


class Net(nn.Module):
    def __init__(self):
        self.blocks = [nn.Linear(8, 8) for _ in range({blocks})]
        self.head = nn.Linear(8, 1)

    def __call__(self, x, flag):
        for number, block in enumerate(self.blocks):
            h = af.tanh(block(x))
            if number == {place}:
                h = h * {fault}  # planted
            x = x + h
        return self.head(x)


rng = np.random.default_rng({seed})
x = rng.standard_normal((320, 8)).astype(np.float32)
flag = np.zeros((320, 1), np.float32)
flag[{row}] = 1.0
data = af.data.from_arrays({{"x": x, "y": x[:, :1] ** 2, "flag": flag}})
data = data.shuffle(seed={seed}).repeat().batch(16)


@af.job(optimizer=af.optim.AdamW(1e-3){options})
def train(model, batch):
    return ((model(batch.x, batch.flag) - batch.y) ** 2.0).mean()


if __name__ == "__main__":
    train.fit(Net(), data, steps=40, checkpoint=sys.argv[1], every={every})
"""


@dataclass(frozen=True)
class Planted:
    """A script with a planted fault; `row` is the one that it is seen in."""

    script: str
    op: str
    line: int
    row: int
    num_ranks: int


def planted(number: int) -> Planted:
    """Return the run of a number: every fourth has two ranks, every fourth is in bf16."""
    draw = random.Random(number)
    blocks, op = draw.randint(1, 6), sorted(FAULTS)[number % len(FAULTS)]
    options = {1: ", mesh=af.Mesh(data=2)", 2: ', precision="bf16"'}.get(number % 4, "")
    row = draw.randrange(320)
    script = SCRIPT.format(
        blocks=blocks,
        place=draw.randrange(blocks),
        fault=FAULTS[op],
        seed=number,
        row=row,
        options=options,
        every=draw.choice([3, 7, 100]),
    )
    line = 1 + next(i for i, text in enumerate(script.splitlines()) if "# planted" in text)
    return Planted(script, op, line, row, 1 + (number % 4 == 1))


def check(case: Planted, folder: Path) -> str:
    """Run a script and replay its last step; return what is wrong, "" for nothing."""
    (folder / "train.py").write_text(case.script, encoding="utf-8")
    program = [sys.executable, "-m", "actorflow"]
    train = [sys.executable] if case.num_ranks == 1 else [*program, "launch", "-n", "2"]
    done = _called([*train, "train.py", "run"], folder)
    if "step" not in done.stderr or done.returncode == 0:
        return f"the run did not end by its fault: {done.stderr[-400:]}"
    replay = [*program, "replay", "run", "--json"]
    done = _called(replay, folder)
    if done.returncode:
        return f"replay failed: {done.stderr[-400:]}"
    (step,) = json.loads(done.stdout)["steps"]
    wrong = []
    broken = [v for v in step["values"] if (v["num_nan"] or v["num_inf"]) and v["phase"]]
    ranks = {v["rank"] for v in step["values"]}
    # Of several ranks one has the row: what the others are sent is not finite later.
    firsts = {r: next(v for v in broken if v["rank"] == r) for r in {v["rank"] for v in broken}}
    named = [v for v in firsts.values() if v["line"] == f"train.py:{case.line}"]
    if not any([v["what"].partition(" ")[0] == case.op for v in named]):
        told = [f"{v['what']} at {v['line']}" for v in firsts.values()]
        wrong.append(f"expected {case.op} at line {case.line}, came {told}")
    if len(ranks) != case.num_ranks:
        wrong.append(f"values of {len(ranks)} ranks, expected {case.num_ranks}")
    compared = step["compared"]
    # From the checkpoint right before the step on there is nothing to compare but NaN.
    is_told = compared["num_values"] or step["first_step"] == step["step"] - 1
    if compared["num_different"] or not is_told:
        wrong.append(f"losses: {compared}")
    (batch,) = step["batches"]
    if f"row {case.row:,} of the arrays" not in batch["origins"]:
        wrong.append(f"row {case.row} is not among {batch['origins']}")
    losses = [float(loss) for loss in batch["row_losses"]]
    bad = [row for row, loss in enumerate(losses) if not abs(loss) < float("inf")]
    if losses and [batch["origins"][row] for row in bad] != [f"row {case.row:,} of the arrays"]:
        wrong.append(f"rows {bad} have losses that are not finite")
    return "; ".join(wrong)


def _called(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=False, cwd=folder, capture_output=True, text=True)


def main() -> int:
    """Check the runs and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    num_wrong = 0
    for number in range(options.first, options.first + options.runs):
        case = planted(number)
        with tempfile.TemporaryDirectory() as made:
            wrong = check(case, Path(made))
        num_wrong += bool(wrong)
        kind = {1: "two ranks", 2: "bf16"}.get(number % 4, "float32")
        print(
            f"run {number} ({kind}, {case.op} at line {case.line}): {wrong or 'found'}", flush=True
        )
    print(f"{options.runs - num_wrong} of {options.runs} found")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
