"""Data as a pipeline: samples, what is done to each, their order, and batches of them.

    data = (
        af.data.from_image_folder("photos")
        .shuffle(seed=0)
        .map(crop)                     # a function of one sample
        .repeat()
        .batch(64)
        .map(mixup)                    # a function of one batch
        .workers(4)
    )
    train.fit(model, data, steps=10_000, checkpoint="runs/a")

A pipeline is a value: each method returns another one. It is a `DataSource` as well, with a
position of its own. A sample is a function of (number, epoch), the order one of (seed, epoch,
position), and random numbers ones of (seed, epoch, number): so the batches are the same for any
number of workers, and a position is a number of batches, with the number of samples read so far
where samples are dropped. A run that goes on repeats no sample and leaves none out.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from actorflow.data.order import Drawn, Passes, SampleOrder, checked_weights, separate
from actorflow.data.ragged import Grouping, LineOrder
from actorflow.data.reading import Cursor, Description, num_batches, recipe_of
from actorflow.data.recipe import Arrays, Collation, Fill
from actorflow.data.samples import Samples, Staged, blocks_of, keep_blocks
from actorflow.data.source import (
    Batch,
    DataError,
    EndlessSource,
    checked_seed,
    place_of_spec,
    position_of,
    position_state,
    positive,
    spec_of,
)
from compiler.contract.types import TensorType

if TYPE_CHECKING:
    from actorflow.data.workers import Workers

_KIND = "pipeline"


class Pipeline:
    """Samples on their way to batches; see the module. Made by `from_arrays` and the like."""

    item_name = "samples"

    def __init__(self, description: Description) -> None:
        # Several may be made of one, and read on several threads: data of a training, and of an
        # evaluation. They share what they read, and no state of an order.
        self.description = replace(description, order=separate(description.order))
        self._cursor: Cursor | None = None
        self._batches = self._read = 0
        self.num_skipped = 0
        """Samples that could not be read and were skipped, up to the position."""
        self._specs: tuple[dict[str, TensorType], ...] = ()
        self._fingerprint: str | None = None
        self._workers: Workers | None = None
        self._finalizer: Callable[[], object] | None = None

    # What is done to samples.

    def map(self, function: Callable[..., Mapping[str, Any]], *, seed: int = 0) -> Pipeline:
        """Apply a function to each sample; after `batch`, to each batch.

        Args:
            function: takes and returns a dict of names and arrays, numbers or texts. With a
                parameter `rng` it is given a numpy generator of its own for each sample, drawn
                from (seed, epoch, sample), so that it does the same in every run.
            seed: of those random numbers.

        Raises:
            DataError: it cannot be called. What it raises later names the sample.
        """
        own = self.description
        _check_function("map", function)
        if own.collations:
            return self._with(stages=(*own.stages, (function, checked_seed(seed))))
        samples = Staged(own.samples, function, False, checked_seed(seed), own.num_stages)
        return self._with(samples=samples, num_stages=own.num_stages + 1)

    def filter(self, function: Callable[[Mapping[str, Any]], object]) -> Pipeline:
        """Drop the samples for which a function is false."""
        _check_function("filter", function)
        self._before_batch("filter")
        samples = Staged(self.description.samples, function, is_filter=True)
        return self._with(samples=samples, can_drop=True)

    def on_error(self, policy: str, *, limit: int = 100) -> Pipeline:
        """Say what a sample does that cannot be read, or for which a function raises.

        Args:
            policy: "raise" ends the run with an error that names the sample. "skip" drops it, with
                a line that names it.
            limit: how many may be skipped before that is an error.

        Raises:
            DataError: another policy, or a limit that is no integer above 0.
        """
        if policy not in ("raise", "skip"):
            raise DataError(f'pipeline: expected on_error("raise") or ("skip"), came {policy!r}')
        skips = None if policy == "raise" else positive("limit", limit)
        return self._with(skip_limit=skips)

    # Their order.

    def shuffle(self, seed: int = 0, *, buffer: int | None = None) -> Pipeline:
        """Read the samples in a random order, another one in each epoch.

        Args:
            seed: of the order.
            buffer: samples among which the next one is drawn; None draws from all of them. Files
                that are read in blocks (Parquet) are shuffled block by block, and then within a
                buffer of some blocks, which stay in memory; None is four.

        Raises:
            DataError: after `batch`, `sample` or `mix`; or a seed or buffer that is none.
        """
        self._before_batch("shuffle")
        buffer = None if buffer is None else positive("buffer", buffer)
        return self._in_order(self.description.order.shuffled(seed, buffer))

    def repeat(self, epochs: int | None = None) -> Pipeline:
        """Read all samples that many times; None for no end."""
        epochs = None if epochs is None else positive("epochs", epochs)
        return self._with(order=self.description.order.repeated(epochs))

    def sample(
        self,
        *,
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
        balanced: Sequence[Any] | npt.NDArray[Any] | None = None,
        seed: int = 0,
    ) -> Pipeline:
        """Draw samples with replacement, as many in an epoch as there are.

        Of files that are read in blocks (Parquet) all blocks stay in memory once they are read.

        Args:
            weights: how likely each sample is, from 0 up; they need not add up to 1.
            balanced: the class of each sample; every class is drawn equally often.
            seed: of the draws, which are the same on all ranks.

        Raises:
            DataError: not one of both is given, or not a value for each sample.
        """
        self._before_batch("sample")
        count = len(self.description.samples)
        if (weights is None) == (balanced is None):
            raise DataError("pipeline: sample takes weights= or balanced=, one of both")
        if balanced is not None:
            classes = np.asarray(balanced)
            if classes.shape != (count,):
                raise DataError(
                    f"pipeline: sample(balanced=) expected a class for each of {count:,} samples,"
                    f" came an array of {list(classes.shape)}"
                )
            _, its, sizes = np.unique(classes, return_inverse=True, return_counts=True)
            weights = 1.0 / sizes[its]
        checked = checked_weights(weights, count, "sample")  # type: ignore[arg-type]  # one is given
        epochs = self.description.order.epochs
        return self._in_order(Drawn(count, checked, checked_seed(seed), epochs))

    # Batches.

    def batch(
        self,
        size: int,
        *,
        drop_last: bool = True,
        pad: Mapping[str, int] | None = None,
        mask: str = "",
        collate: Callable[[list[Arrays]], Mapping[str, Any]] | None = None,
    ) -> Pipeline:
        """Put `size` samples into one batch: arrays [size, ...], for each name of a sample.

        Args:
            size: samples of a batch.
            drop_last: True drops the samples at the end of an epoch that fill no batch. False fills
                a batch from the next epoch; the last one of all needs `mask`.
            pad: of arrays whose lengths differ, the length that they are filled up to with zeros.
            mask: the name of an array [size] of float32 to be added: 1 for a sample, 0 where the
                last batch is filled up with zeros.
            collate: makes a batch of a list of samples instead.

        Raises:
            DataError: there are batches already, or an argument is of another kind.
        """
        self._before_batch("batch")
        lengths = tuple([(name, positive("pad", length)) for name, length in (pad or {}).items()])
        if collate is not None:
            _check_function("collate", collate)
        if not isinstance(mask, str) or (mask and drop_last):
            raise DataError("pipeline: batch(mask=) is the name of an array that tells samples from"
                            " padding; give mask='rows', drop_last=False")  # fmt: skip
        if mask and collate is not None:
            raise DataError("pipeline: batch takes mask= or collate=, which makes all of a batch")
        collation = Collation(positive("size", size), lengths, collate, mask)
        return self._with(collation=collation, drop_last=bool(drop_last))

    def bucket(
        self,
        batch: int | Sequence[int],
        *,
        by: str | Sequence[str],
        edges: Sequence[int],
        pad: float | Mapping[str, float] = 0,
        group: int = 1,
        lengths: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> Pipeline:
        """Put samples that are about equally long into one batch, padded to one of a few lengths.

            data.shuffle(0).bucket(16, by="ids", edges=(32, 64, 128))

        In place of `batch`. A batch has [batch, edge, ...] for each name of `by`, with its lengths
        `<name>_lengths`, int32 [batch]; [batch, ...] for others; and `weights`, float32 [batch]: 1
        for a sample, 0 for what fills up the last batch of a bucket, which is all padding, of
        length 0. Every sample comes once in an epoch. All samples are read once before the first
        batch, for their lengths; functions and filters have to do the same in each epoch.

        Args:
            batch: rows of a batch, or one number for each edge: more of short ones.
            by: names of arrays [length, ...]; the longest of a sample counts.
            edges: lengths to pad to, ascending.
            pad: what fills up, or one number for each name.
            group: so many batches of one bucket come one after the other: `accumulate` of the job.
                The last ones of a bucket may be all padding.
            lengths: of all samples, where they are known: then nothing is read for them.

        Raises:
            DataError: what came, what was expected and how to mend it.
        """
        names = (by,) if isinstance(by, str) else tuple(by)
        checked = [positive("edges", edge) for edge in edges] if names else [0]
        sizes = [batch] * len(checked) if isinstance(batch, (int, np.integer)) else list(batch)
        if not checked or checked != sorted(set(checked)) or len(sizes) != len(checked):
            raise DataError(
                f"bucket: expected edges= ascending lengths, such as (32, 64, 128), and batch= one"
                f" number, or one for each of them; came edges={tuple(edges)} and batch={batch}"
            )
        counts = tuple([positive("batch", size) for size in sizes])
        group = positive("group", group)
        return self._in_lines(Grouping(names, tuple(checked), counts, _fill(pad), group), lengths)

    def pack(
        self,
        length: int,
        *,
        batch: int,
        pad: float | Mapping[str, float] = 0,
        lengths: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> Pipeline:
        """Put samples into sequences of one length, one after the other.

            data.shuffle(0).pack(512, batch=8)  # samples {"ids": array}

        In place of `batch`. Every sample comes once in an epoch, whole, always with the same
        others: which has no effect where attention has `segments=`. The longest are placed first,
        each where the least space is left (best fit decreasing: Johnson, 1973). All samples are
        read once before the first batch, for their lengths. A batch has, all [batch, length]:

        - `ids`, and what else samples have, of the same length: [length, ...] each;
        - `labels`: the id after each one of its sample. The last id of a sample has none, and
          padding neither: -100, for `ignore_index`. Or those of the samples, padded with -100;
        - `positions`, int32: of each id within its sample, for embeddings of positions or `rotary`;
        - `segments`, int32: the number of the sample in its sequence, from 1 on; 0 for padding;
        - `weights`, float32: 1 where there is a label, else 0.

        Args:
            length: tokens in a sequence. A longer sample is an error.
            batch: sequences of a batch; the last one of an epoch is filled up with padding.
            pad: what fills up, or one number for each name.
            lengths: of all samples, where they are known: then nothing is read for them.

        Raises:
            DataError: what came, what was expected and how to mend it.
        """
        edges, sizes = (positive("length", length),), (positive("batch", batch),)
        return self._in_lines(Grouping((), edges, sizes, _fill(pad), is_packed=True), lengths)

    def _in_lines(self, grouping: Grouping, lengths: Any) -> Pipeline:
        own, what = self.description, "pack" if grouping.is_packed else "bucket"
        self._before_batch(what)
        if not isinstance(own.order, Passes) or own.order.has_buffer:
            raise DataError(
                f"pipeline: .{what} has an order of all samples; leave out .sample, mix and buffer="
            )
        if lengths is not None:
            known, count = np.asarray(lengths), len(own.samples)
            if known.shape != (count,) or known.dtype.kind not in "iu":
                raise DataError(
                    f"pipeline: .{what}(lengths=) expected an integer for each of {count:,}"
                    f" samples, came {known.dtype}{list(known.shape)}"
                )
            grouping = replace(grouping, lengths=known.astype(np.int64))
        keep_blocks(own.samples, len(blocks_of(own.samples)) + 1)  # the next sample may be any
        return self._with(grouping=grouping, drop_last=False)

    def workers(self, count: int) -> Pipeline:
        """Make the batches in that many processes; 0 for this one. They are the same ones."""
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise DataError(f"pipeline: expected workers(n) with n from 0 up, came {count!r}")
        return self._with(num_workers=int(count))

    def _with(self, **changes: Any) -> Pipeline:
        return Pipeline(replace(self.description, lines=None, **changes))

    def _in_order(self, order: SampleOrder) -> Pipeline:
        samples = self.description.samples
        # And one that it begins with.
        keep_blocks(samples, order.blocks_at_once(len(blocks_of(samples))) + 1)
        return self._with(order=order)

    def _before_batch(self, what: str) -> None:
        if self.description.collations:
            raise DataError(f"pipeline: .{what} works on samples; put it before .batch")

    # As a source of batches.

    @property
    def samples(self) -> Samples:
        """What is read, with the functions on samples; of images, `.samples.classes` as well."""
        return self.description.samples

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The worker processes that there are."""
        return () if self._workers is None else self._workers.pids

    @property
    def items_per_batch(self) -> int:
        """Samples in a batch; of those that have several numbers of them the mean, rounded."""
        lines = self.batched().lines
        return self.description.collations[0].size if lines is None else lines.samples_per_batch

    @property
    def row_mask(self) -> str:
        """The array of a batch that is 0 for rows that fill it up, where there is one."""
        masks = [c.mask for c in self.description.collations if isinstance(c, Collation)]
        return "".join(masks[:1])

    def batched(self) -> Description:
        """Return how batches are made. The first call reads the lengths of samples, if need be."""
        own = self.description
        if not own.collations:
            raise DataError(
                "pipeline: this one gives samples, and a job takes batches; end it with .batch(n)"
            )
        if own.grouping is None or own.lines is not None:
            return own
        lengths = own.grouping.lengths
        if lengths is None:
            rows = self._measured(own.grouping)
        elif own.can_drop or own.skip_limit is not None:
            raise DataError("pipeline: lengths= are those of all samples, and .filter or .on_error"
                            " drops some; leave out lengths=")  # fmt: skip
        else:
            rows = np.stack([np.arange(len(lengths)), lengths], axis=1)
        seed = own.order.seed if isinstance(own.order, Passes) else None
        lines = LineOrder(own.grouping, rows, seed, own.samples.where)
        self.description = replace(own, lines=lines)
        return self.description

    def _measured(self, grouping: Grouping) -> npt.NDArray[np.int64]:
        """Return number and length of each sample that filters and errors leave, [samples, 2]."""
        samples, collation = self.description.samples, Collation(_MEASURED)
        measured = replace(
            self.description, order=Passes(len(samples)), can_drop=True, grouping=None,
            collation=collation,
        )  # fmt: skip
        workers = self._new_workers(measured)
        cursor = Cursor(measured, workers=workers, report=partial(_report, measured.skip_limit))
        rows, num_skipped = [np.empty((0, 2), np.int64)], 0
        try:
            for _, unit, outcomes in cursor.outcomes():
                kept = []
                for number, outcome in zip(unit.numbers.tolist(), outcomes, strict=True):
                    if outcome.arrays is not None:
                        where = partial(samples.where, number)
                        kept.append((number, grouping.length_of(outcome.arrays, where)))
                    elif outcome.why:
                        num_skipped += 1
                        cursor.skip(outcome.why, num_skipped)
                rows.append(np.array(kept, np.int64).reshape(-1, 2))
        finally:
            if workers is not None:
                workers.end()
        self.num_skipped = num_skipped
        return np.concatenate(rows)

    def __bool__(self) -> bool:
        """Whether there is a source; how many batches it has, `len` says where that is known."""
        return True

    def __len__(self) -> int:
        """Batches from the start to the end.

        Raises:
            TypeError: it never ends, or a filter decides how many there are.
        """
        if self.description.order.epochs is None:
            raise EndlessSource("this pipeline has no length: it never ends")
        if self.description.drops:
            raise TypeError("this pipeline has no length: it may drop samples")
        return num_batches(self.batched() if self.description.grouping else self.description)

    def spec(self) -> dict[str, TensorType]:
        """Return the type of every array of a batch, of several types the largest.

        The first call makes the first batch.

        Raises:
            DataError: there is no batch, or not one that a plan can take.
        """
        return dict(self.specs()[-1])

    def specs(self) -> tuple[dict[str, TensorType], ...]:
        """Return the types of all batches that there are, the largest last.

        Raises:
            DataError: there is no batch, or not one that a plan can take.
        """
        if not self._specs:
            self._check_length()
            own = self.batched()
            if own.lines is not None:
                recipe = recipe_of(own)
                firsts = [cast("Arrays", recipe.make(unit)) for unit in own.lines.examples()]
            else:
                firsts = [made.arrays for made in itertools.islice(Cursor(own), 1)]
            if not firsts:
                raise DataError(
                    f"pipeline: a batch of {own.collations[0].size:,} samples is asked for, and"
                    " there are fewer; make the batch smaller, or give"
                    " batch(drop_last=False, mask=name)"
                )
            found = [spec_of(first) for first in firsts]  # a function may make several alike
            specs = [spec for place, spec in enumerate(found) if spec not in found[:place]]
            specs.sort(key=lambda spec: sum([type_.size_bytes for type_ in spec.values()]))
            self._specs = tuple(specs)
        return self._specs

    def _check_length(self) -> None:
        description = self.batched()
        collation = description.collation
        if not len(description.samples):
            raise DataError("pipeline: there are no samples")
        if collation is None or collation.mask:
            return
        if description.drop_last or description.order.epochs is None:
            return
        total = description.order.length * description.order.epochs
        if description.drops or total % collation.size:
            counted = "an unknown number of" if description.drops else f"{total:,}"
            raise DataError(
                f"pipeline: {counted} samples may end in a short batch, and a plan has static"
                " shapes; give batch(drop_last=False, mask=name) and weigh the loss by batch.name,"
                " or drop_last=True"
            )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, npt.NDArray[Any]]:
        """Return the next batch in fresh arrays.

        Raises:
            StopIteration: all epochs are over.
            DataError: a sample cannot be read, or a batch is of another type than the first.
        """
        return {name: np.array(array) for name, array in self._next(None).items()}

    def origins(self) -> tuple[str, ...]:
        """Return where each row of the next batch comes from; () where samples may be dropped."""
        return Cursor(self.batched(), self._batches).origins()

    def next_into(self, out: Batch) -> None:
        """Write the next batch into the arrays of `out`; else as `next_rows_into`."""
        self.next_rows_into(out, {})

    def next_rows_into(self, out: Batch, rows: Mapping[str, slice]) -> None:
        """Write some rows of the next batch into `out`; of an array without a slice, all.

        Only those are read, where a batch is known by its number and nothing works on all of it.

        Raises:
            StopIteration: all epochs are over; `out` is unchanged.
        """
        part = self._part(rows)
        batch = self._next(part)
        for name, array in batch.items():
            if name in out and out[name].size:  # of an empty slice nothing is wanted
                out[name][...] = array if part is not None else array[rows.get(name, slice(None))]

    def _part(self, rows: Mapping[str, slice]) -> slice | None:
        """Return the samples that are enough for some rows; None for all of the batch."""
        own = self.description
        parts = {(part.start, part.stop) for part in rows.values() if part.start < part.stop}
        collate = None if own.collation is None else own.collation.collate
        if own.drops or own.stages or collate is not None or len(parts) != 1:
            return None
        if len(self.specs()) > 1 or rows.keys() != self.spec().keys():
            return None
        return slice(*parts.pop())

    def _next(self, part: slice | None) -> Arrays:
        specs = self.specs()
        if self._cursor is None or self._cursor.part != part:
            self._leave()
            self._check_length()
            self._workers = self._started()
            self._cursor = Cursor(
                self.batched(), self._batches, self._read, self.num_skipped, part,
                self._workers, partial(_report, self.description.skip_limit),
            )  # fmt: skip
        try:
            made = self._cursor.next()
            if len(specs) > 1:
                place_of_spec(made.arrays, specs)
            else:
                _check_types(made.arrays, specs[0], part)
        except BaseException:
            # The end, an error of a sample, or a stop: what was taken ahead is forgotten, and the
            # position is that after the last batch.
            self.end_workers()
            raise
        self._batches += 1
        self._read, self.num_skipped = made.read, made.num_skipped
        return made.arrays

    def _leave(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = None

    def _started(self) -> Workers | None:
        if self._workers is None and (workers := self._new_workers(self.batched())) is not None:
            # With the last name for this object: cursor and generators do not refer to it.
            self._finalizer = weakref.finalize(self, workers.end)
            return workers
        return self._workers

    def _new_workers(self, description: Description) -> Workers | None:
        if not description.num_workers:
            return None
        from actorflow.data.workers import Workers  # multiprocessing: 20 ms

        return Workers(recipe_of(description), description.num_workers)

    def close(self) -> None:
        """Make a call that waits for a worker raise DataError. From any thread."""
        if self._workers is not None:
            self._workers.close()

    def end_workers(self) -> None:
        """End the worker processes; the next batch starts them again."""
        if self._finalizer is not None:
            self._finalizer()
        self._workers = self._cursor = None

    def state(self) -> dict[str, Any]:
        """Return the number of batches returned so far, and of samples read for them."""
        counts = {"samples": self._read, "skipped": self.num_skipped}
        return position_state(_KIND, self._batches) | (counts if self.description.drops else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches counted in `state`; O(1).

        Raises:
            DataError: the state is of another kind of source, or damaged.
        """
        batches = position_of(state, _KIND)
        own = self.description
        if own.grouping is not None and own.order.epochs is not None and batches > len(self):
            raise DataError(
                f"pipeline: the state is after batch {batches:,}, and this one ends after"
                f" {len(self):,}; give epochs and data as in the run that wrote it"
            )
        counts = [state.get(name, 0) for name in ("samples", "skipped")]
        if not all([isinstance(count, int) and count >= 0 for count in counts]):
            raise DataError(f"pipeline: expected a state with counts, came {dict(state)!r}"[:200])
        self._leave()
        self._batches = batches
        if self.description.drops:
            self._read, self.num_skipped = counts

    def fingerprint(self) -> str:
        """Return what all batches depend on, functions by their names; hashes arrays once."""
        if self._fingerprint is None:
            self._fingerprint = self.description.fingerprint()
        return self._fingerprint

    def __repr__(self) -> str:
        return f"Pipeline({self.description})"

    def _repr_html_(self) -> str:
        return self.description.html(self._specs)


_MEASURED = 256
"""Samples whose lengths a worker reads at once."""

_NAMED = 10
"""Skipped samples that get a line each; later ones at powers of two."""


def _report(limit: int | None, why: str, number: int) -> None:
    if number <= _NAMED or number & (number - 1) == 0:
        logging.getLogger("actorflow").warning(
            "skipped sample %d (at most %d): %s", number, limit, why
        )


def _check_function(what: str, function: object) -> None:
    if not callable(function):
        raise DataError(f"pipeline: .{what} expected a function, came {type(function).__name__}")


def _fill(pad: float | Mapping[str, float]) -> Fill:
    return tuple(pad.items()) if isinstance(pad, Mapping) else pad


def _check_types(batch: Arrays, spec: Mapping[str, TensorType], part: slice | None) -> None:
    for name, type_ in spec.items():
        array = batch.get(name)
        shape = type_.shape if part is None else (part.stop - part.start, *type_.shape[1:])
        if array is None or array.shape != shape or array.dtype != np.dtype(type_.dtype.value):
            came = "none" if array is None else f"{array.dtype}{list(array.shape)}"
            raise DataError(
                f"batch[{name!r}]: expected {type_.dtype}{list(shape)} as in the first batch, came"
                f" {came}; a plan has static shapes: make samples alike in a .map, or give"
                f" .batch(pad={{{name!r}: length}})"
            )
    if extra := batch.keys() - spec.keys():
        raise DataError(f"batch: {sorted(extra)} were not in the first batch")
