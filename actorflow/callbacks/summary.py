"""A table of what is trained, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actorflow.callbacks.protocol import StartedRun
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor.literals import checked_size
from memory.report import format_bytes


class ModelSummary:
    """Prints the modules of the model with their numbers of parameters before the first step.

    Args:
        depth: how many names a path has at most; 0 for the model as a whole.
        report: takes the text.
    """

    def __init__(self, depth: int = 1, report: Callable[[str], object] = print) -> None:
        self._depth, self._report = checked_size(depth, "depth"), report

    def on_start(self, run: StartedRun) -> None:
        """Print the table; nothing of a plan from a file, which has no modules."""
        if isinstance(run.model, Module):
            self._report(summary_of(run.model, self._depth))


def summary_of(model: Module, depth: int) -> str:
    """Return the table of a model: a line for each module down to a depth, and the totals."""
    stored = [*model.named_stored()]
    rows = [("module", "type", "parameters", "trained")]
    for path, module in model.named_modules():
        if path and path.count(".") < depth:
            own = [p for name, p in stored if name.startswith(f"{path}.")]
            rows.append((path, type(module).__name__, *_counts(own)))
    rows.append(("all", type(model).__name__, *_counts([p for _, p in stored])))
    first, second, third, fourth = [max([len(row[i]) for row in rows]) for i in range(4)]
    lines = [f"{a:<{first}}  {b:<{second}}  {c:>{third}}  {d:>{fourth}}" for a, b, c, d in rows]
    size_bytes = sum([item.type.size_bytes for _, item in stored])
    return "\n".join([*lines, f"{format_bytes(size_bytes)} of parameters and buffers"])


def _counts(items: Sequence[object]) -> tuple[str, str]:
    parameters = [item for item in items if isinstance(item, Parameter)]
    every = sum([p.type.num_elements for p in parameters])
    trained = sum([p.type.num_elements for p in parameters if not p.is_frozen])
    return f"{every:,}", f"{trained:,}"
