"""Sources of batches: each is a position in a sequence, so that a resumed run sees the same bytes.

A source tells the types of a batch (`spec`), gives batches, tells its position (`state`) and goes
back to one (`restore`). Shuffled sources compute the item at a position, so seeking is O(1).

source.py    the `DataSource` protocol, `DataError`, checks of a batch, `from_iterable`
arrays.py    `EpochOrder`, a shuffled epoch without a permutation array; `ArraySource` over arrays
tokens.py    `Tokens`: windows of one long token sequence

May import compiler.contract, and nothing else of actorflow: data knows neither jobs nor devices.
Begin reading at source.py: the protocol is all that a run asks of a source.
"""

from typing import TYPE_CHECKING, NoReturn

from actorflow.data.arrays import ArraySource
from actorflow.data.source import (
    Batch,
    DataError,
    DataSource,
    FillsBatches,
    FillsRows,
    IterableSource,
    check_batch,
    from_iterable,
    items_of,
    spec_of,
)
from actorflow.data.tokens import Tokens

__all__ = [
    "ArraySource",
    "Batch",
    "DataError",
    "DataSource",
    "FillsBatches",
    "FillsRows",
    "IterableSource",
    "Tokens",
    "check_batch",
    "from_iterable",
    "items_of",
    "spec_of",
]

if not TYPE_CHECKING:  # which would take any attribute for one that is there

    def __getattr__(name: str) -> NoReturn:
        """Say what there is in place of torch's loaders."""
        is_torchs = name in ("DataLoader", "Dataset", "TensorDataset", "IterableDataset")
        mend = "; af.data.ArraySource(arrays, batch=...) gives batches of arrays, and from_iterable"
        mend += " those of any loader (docs/data.md)"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{mend * is_torchs}")
