"""Where batches come from: sources that seek, so that a resumed run sees the same bytes.

source.py       the DataSource protocol, DataError, check_batch, the hash of some content
order.py        which item is seen when: a shuffled epoch without a permutation array
tokens.py       Tokens: windows of one long token sequence
arrays.py       ArraySource: rows of arrays in memory or memory-mapped
iterable.py     from_iterable: any iterator of dicts
"""

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
