"""The programs of docs/tasks.md, and the same by torch and Lightning in tests/data/tasks.

Programs that draw no random numbers are trained for some steps from weights that hang on names and
shapes alone, on the first batches of their data. What torch's losses are then is stored by
`store`, so that tests need no torch; Lightning's part is played by a module of a few lines.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from oracle import seeded

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tasks.md"
FOLDER = ROOT / "tests" / "data" / "tasks"
LOSSES = FOLDER / "losses.json"
PROGRAMS: dict[str, str] = dict(
    re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
)
WITH_LOSSES = (
    "classify", "keep_best", "fine_tune", "lstm", "transformer", "language_model", "seq2seq",
    "embeddings", "unet", "contrastive", "distill", "physics",
)  # fmt: skip
STEPS = 5

Arrays = dict[str, np.ndarray[Any, Any]]


def counterpart(name: str) -> str:
    """Return the program of torch and Lightning."""
    return (FOLDER / f"{name}.txt").read_text()


def num_lines(code: str) -> int:
    """Return the number of lines that are not blank."""
    return len([line for line in code.splitlines() if line.strip()])


def first_weights(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Return float32 values that hang on names and shapes alone."""
    return {
        name: np.asarray(0.3 * seeded("task", name, shape).standard_normal(shape), np.float32)
        for name, shape in shapes.items()
    }


def first_batches(namespace: Mapping[str, Any]) -> list[Arrays]:
    """Return the first batches of a program's data."""
    data = namespace["data"]
    data.restore({**data.state(), "batches": 0})
    return [{name: np.array(array) for name, array in next(data).items()} for _ in range(STEPS)]


def our_losses(namespace: Mapping[str, Any]) -> list[float]:
    """Return the losses of the first steps of a program that has run."""
    model, train = namespace["model"], namespace["train"]
    shapes = {name: array.shape for name, array in model.state().items()}
    model.load(first_weights(shapes))
    losses = [float(train.step(model, batch)["loss"]) for batch in first_batches(namespace)]
    train.close(model)
    return losses


def torch_losses(name: str, batches: list[Arrays], shapes: Mapping[str, Any]) -> list[float]:
    """Return the same of the counterpart, in float64; `shapes` are those of our parameters."""
    import torch

    trainers: list[dict[str, Any]] = []
    sys.modules |= _stand_ins(torch, trainers)
    namespace: dict[str, Any] = {}
    exec(compile(counterpart(name), str(FOLDER / f"{name}.txt"), "exec"), namespace)
    model = namespace["model"].double()
    theirs = model.state_dict()
    weights = {n if n in theirs else f"net.{n}": a for n, a in first_weights(shapes).items()}
    model.load_state_dict({n: torch.tensor(a) for n, a in weights.items()})
    optimizer, scheduler = model.configure_optimizers(), None
    if isinstance(optimizer, tuple):
        (optimizer,), (scheduled,) = optimizer
        scheduler = scheduled["scheduler"]
    losses = []
    for batch in batches:
        tensors = [torch.tensor(a.astype(_WIDE[a.dtype.kind])) for a in batch.values()]
        if name == "language_model":  # one row of a text has both
            tensors = [torch.cat([tensors[0], tensors[1][:, -1:]], 1)]
        loss = model.training_step(tuple(tensors), len(losses))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if "gradient_clip_val" in trainers[-1]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainers[-1]["gradient_clip_val"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return losses


_WIDE = {"f": np.float64, "i": np.int64, "u": np.int64}


def _stand_ins(torch: Any, trainers: list[dict[str, Any]]) -> dict[str, ModuleType]:
    """Return modules in place of Lightning's, whose trainers train nothing and are listed."""

    class LightningModule(torch.nn.Module):  # type: ignore[misc, name-defined]  # of no stubs
        def log(self, name: str, value: object) -> None:
            pass

        @classmethod
        def load_from_checkpoint(cls, path: object) -> Any:
            return cls()

    class Trainer:
        def __init__(self, **options: Any) -> None:
            trainers.append(options)
            self.logged_metrics: dict[str, float] = defaultdict(float)

        def fit(self, *given: object) -> None:
            pass

        def test(self, *given: object) -> None:
            pass

    class Callback:
        best_model_path, best_model_score = "", 0.0

        def __init__(self, *given: object, **options: object) -> None:
            pass

    names = {"LightningModule": LightningModule, "Trainer": Trainer}
    modules = {n: ModuleType(n) for n in ("lightning", "lightning.pytorch.callbacks")}
    modules["lightning"].__dict__.update(names)
    modules["lightning.pytorch.callbacks"].__dict__.update(
        {"EarlyStopping": Callback, "ModelCheckpoint": Callback}
    )
    return {"lightning.pytorch": ModuleType("lightning.pytorch"), **modules}


def run(name: str) -> dict[str, Any]:
    """Run a program of the page in this process; return what it has defined."""
    namespace: dict[str, Any] = {"__name__": f"task_{name}"}
    exec(compile(PROGRAMS[name], f"docs/tasks.md:{name}", "exec"), namespace)
    return namespace


def store() -> None:
    """Store the losses of torch."""
    stored = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in WITH_LOSSES:
            namespace = run(name)
            shapes = {n: a.shape for n, a in namespace["model"].state().items()}
            losses = torch_losses(name, first_batches(namespace), shapes)
            stored[name] = [float(f"{loss:.9g}") for loss in losses]
    rows = [f'"{name}": {json.dumps(losses)}' for name, losses in stored.items()]
    LOSSES.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    store()
