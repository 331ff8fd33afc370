"""The batch as a job's function sees it: symbolic tensors by attribute or key."""

from __future__ import annotations

from actorflow.tensor import Tensor
from actorflow.trace.tracer import Trace


class Batch:
    """`batch.x` and `batch["x"]` are the tensor of the data source's entry "x"."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor of an entry. Raises CompileError naming the entries there are."""
        return Tensor(self._trace, self._trace.batch_input(key))

    def __getattr__(self, key: str) -> Tensor:
        """Return the tensor of an entry, as `batch[key]`."""
        if key.startswith("_"):
            raise AttributeError(key)
        return self[key]
