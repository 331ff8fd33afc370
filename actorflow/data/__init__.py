"""Sources of batches: each is a position in a sequence, so that a resumed run sees the same bytes.

A source tells the types of a batch (`spec`), gives batches, tells its position (`state`) and goes
back to one (`restore`). Shuffled sources compute the item at a position, so seeking is O(1).

source.py    the `DataSource` protocol, `DataError`, checks of a batch, `from_iterable`
arrays.py    `EpochOrder`, a shuffled epoch without a permutation array; `ArraySource` over arrays
tokens.py    `Tokens`: windows of one long token sequence
beginnings.py where pipelines begin: `from_arrays`, `from_parquet`, `mix`, `bucket`, `pack`
pipeline.py  `Pipeline`: samples, what is done to each, their order, batches
samples.py   samples by number, and functions on one of them
ragged.py    samples of different lengths in batches of few shapes
augment.py   changes of images, drawn anew for each sample
files.py     samples from Parquet, CSV, images and text
order.py     which sample comes at which position
reading.py   a position in the batches of a pipeline
recipe.py    what is made of some samples: a value that travels to workers
workers.py   the processes that make batches

May import compiler.contract, and nothing else of actorflow: data knows neither jobs nor devices.
Begin reading at source.py: the protocol is all that a run asks of a source.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from actorflow.data.source import (
    Batch,
    DataError,
    DataSource,
    DeclaresSpecs,
    FillsBatches,
    FillsRows,
    IterableSource,
    check_batch,
    from_iterable,
    items_of,
    spec_of,
    specs_of,
)

if TYPE_CHECKING:
    from actorflow.data import augment
    from actorflow.data.arrays import ArraySource
    from actorflow.data.beginnings import (
        bucket,
        from_arrays,
        from_csv,
        from_dataset,
        from_image_folder,
        from_parquet,
        from_text,
        mix,
        pack,
    )
    from actorflow.data.pipeline import Pipeline
    from actorflow.data.tokens import Tokens

_LATE = {
    "ArraySource": "arrays",
    **dict.fromkeys(("bucket", "mix", "pack", "from_arrays", "from_csv"), "beginnings"),
    **dict.fromkeys(("from_dataset", "from_image_folder"), "beginnings"),
    **dict.fromkeys(("from_parquet", "from_text"), "beginnings"),
    "Pipeline": "pipeline",
    "Tokens": "tokens",
}
"""Names whose modules a job can do without: a tenth of the time in which actorflow is imported."""

__all__ = [
    "ArraySource",
    "Batch",
    "DataError",
    "DataSource",
    "DeclaresSpecs",
    "FillsBatches",
    "FillsRows",
    "IterableSource",
    "Pipeline",
    "Tokens",
    "augment",
    "bucket",
    "check_batch",
    "from_arrays",
    "from_csv",
    "from_dataset",
    "from_image_folder",
    "from_iterable",
    "from_parquet",
    "from_text",
    "items_of",
    "mix",
    "pack",
    "spec_of",
    "specs_of",
]

if not TYPE_CHECKING:  # which would take any attribute for one that is there

    def __getattr__(name: str) -> Any:
        """Hand on a name of `_LATE`, when it is first asked for."""
        if name == "augment":
            return import_module(f"{__name__}.{name}")
        if name in _LATE:
            module = import_module(f"{__name__}.{_LATE[name]}")
            value = globals()[name] = getattr(module, name)
            return value
        is_torchs = name in ("DataLoader", "Dataset", "TensorDataset", "IterableDataset")
        mend = "; af.data.ArraySource(arrays, batch=...) gives batches of arrays, and from_iterable"
        mend += " those of any loader (docs/data.md)"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{mend * is_torchs}")

    def __dir__() -> list[str]:
        """Return the public names, those that are loaded late among them."""
        return list(__all__)
