"""Samples from files: tables of Parquet and CSV, folders of images, lines of text; Parquet written.

pyarrow decodes tables and Pillow images (extra [data]); this is the one module that imports them.
Files are opened where they are read: a reader travels to a worker process as paths.

Parquet is read a row group at a time, which is what `blocks` tells an order of samples; those of
its window are kept. A folder of several files is one table: partitions in the names of folders
(key=value) are columns, and files whose columns differ are refused.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actorflow.data.order import hash_of
from actorflow.data.samples import ColumnArrays, Sample, owned
from actorflow.data.source import DataError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_ARROW = (OSError, ValueError, TypeError, KeyError, NotImplementedError)
"""What errors of pyarrow are, by their base classes."""

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


def _arrow(what: str) -> Any:
    try:
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{what} needs pyarrow: pip install 'actorflow[data]'") from error
    return pyarrow


def _pillow(what: str) -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError(f"{what} needs Pillow: pip install 'actorflow[data]'") from error
    return PIL.Image


class ParquetWriter:
    """Writes rows into a Parquet file, as a context that is what takes arrays [rows, ...] by name.

    Row groups have `group_bytes`, so no more than that and a batch is in memory. The file is there
    when the context has ended without an error, whole or not at all.

    Raises DataError, which begins with `what`, for a path that is taken or in no folder, and where
    there were no rows.
    """

    def __init__(
        self, path: str | os.PathLike[str], what: str, group_bytes: int = 64 << 20
    ) -> None:
        self._path, self._part, self._what = os.fspath(path), f"{os.fspath(path)}.part", what
        self._group_bytes = group_bytes
        self._arrow, self._waiting = _arrow(what), list[Any]()
        self._writer: Any = None

    def __enter__(self) -> Callable[[Mapping[str, npt.NDArray[Any]]], None]:
        """Return what takes rows."""
        try:
            if os.path.lexists(self._path):
                raise FileExistsError("there is a file or folder of this name")
            self._file = open(self._part, "xb")  # closed by __exit__
        except OSError as error:
            raise DataError(
                f"{self._what} cannot write {self._path!r}: {error}; give the path of a new file in"
                " a folder that is there"
            ) from None
        return self._write

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Put the file in its place; remove it after an error, and where there were no rows."""
        try:
            if error is None and self._waiting:
                self._flush()
            if self._writer is not None:  # after an error, too: else it writes to a closed file
                self._writer.close()
            if error is None and self._writer is None:
                raise DataError(f"{self._what} has no rows to write into {self._path!r}")
            self._file.close()
            if error is None:
                os.replace(self._part, self._path)
        finally:
            self._file.close()
            if os.path.exists(self._part):
                os.remove(self._part)

    def _write(self, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        columns = {name: _column(self._arrow, array) for name, array in rows.items()}
        self._waiting.append(self._arrow.table(columns))
        if sum([table.nbytes for table in self._waiting]) >= self._group_bytes:
            self._flush()

    def _flush(self) -> None:
        try:
            table, self._waiting = self._arrow.concat_tables(self._waiting), []
            if self._writer is None:
                self._writer = self._arrow.parquet.ParquetWriter(self._file, table.schema)
            self._writer.write_table(table)
        except ValueError as error:
            raise DataError(
                f"{self._what} writes rows of one shape and type, and batches have several:"
                f" {error}; give to= a function, which gets the arrays of each batch"
            ) from None


def _column(arrow: Any, array: npt.NDArray[Any]) -> Any:
    """Return rows as a column: numbers, or lists of one size of what the next axes have."""
    flat = arrow.array(np.ascontiguousarray(array).reshape(-1))
    for size in array.shape[:0:-1]:
        flat = arrow.FixedSizeListArray.from_arrays(flat, size)
    return flat


class ParquetSamples:
    """The rows of one or several Parquet files, in the order of their names.

    Args:
        paths: files, and folders with files in any depth.
        columns: which ones are read; None for all.

    Raises:
        DataError: there is no file, one is damaged, a column is missing, or columns of files
            differ.
    """

    def __init__(self, paths: Paths, columns: Sequence[str] | None) -> None:
        self._files, self._root = _found(paths, (".parquet", ".pq"), "from_parquet")
        self._columns = None if columns is None else list(columns)
        self._groups: list[tuple[int, int]] = []
        blocks: list[int] = []
        for file, metadata in enumerate(self._checked_metadata()):
            for group in range(metadata.num_row_groups):
                self._groups.append((file, group))
                blocks.append(metadata.row_group(group).num_rows)
        self.blocks = tuple(blocks)
        self._starts = np.concatenate([[0], np.cumsum(blocks, dtype=np.int64)])
        self._bounds = self._starts.tolist()  # a search for one number in an array takes 20 times
        self._kept: OrderedDict[int, ColumnArrays] = OrderedDict()
        self._most_kept = 2  # a batch may end in the next one
        self._pid = -1  # of what decodes ahead
        self._begun: dict[int, Future[ColumnArrays]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def keep_blocks(self, count: int) -> None:
        """Keep at least the last `count` row groups decoded."""
        self._most_kept = max(self._most_kept, count)

    def _checked_metadata(self) -> Iterable[Any]:
        schema = self._dataset.schema
        if missing := [c for c in self._columns or () if c not in schema.names]:
            raise DataError(
                f"from_parquet: {self._files[0]} has no column"
                f" {', '.join(map(repr, missing))}; it has {', '.join(map(repr, schema.names))}"
            )
        first = None
        for file, fragment in zip(self._files, self._fragments, strict=True):
            try:
                own, metadata = fragment.physical_schema, fragment.metadata
            except _ARROW as error:
                raise DataError(f"from_parquet: {file} cannot be read: {error}") from error
            first = own if first is None else first
            if not own.equals(first):
                raise DataError(
                    f"from_parquet: the columns of {file} differ from those of {self._files[0]}:"
                    f" {_difference(first, own)}; write all files with one schema, or read them"
                    " apart"
                )
            yield metadata

    @cached_property
    def _dataset(self) -> Any:
        dataset = _arrow("from_parquet").dataset
        try:
            return dataset.dataset(
                self._files, format="parquet",
                partitioning=dataset.partitioning(flavor="hive"),
                partition_base_dir=self._root,
            )  # fmt: skip
        except _ARROW as error:
            raise DataError(f"from_parquet: {self._files[0]}: {error}") from error

    @cached_property
    def _fragments(self) -> list[Any]:
        return list(self._dataset.get_fragments())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open, and what was decoded."""
        opened = ("_dataset", "_fragments")
        kept = {name: value for name, value in vars(self).items() if name not in opened}
        return kept | {"_kept": OrderedDict(), "_begun": {}, "_pool": None, "_pid": -1}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_ahead(self, numbers: npt.NDArray[np.int64]) -> None:
        """Begin to decode the row groups of some rows; of none forgets what was begun.

        pyarrow decodes 0.7 to 1 GB/s on a thread, and lets others run meanwhile.
        """
        if self._pool is None or self._pid != os.getpid():  # a forked child has no such threads
            from concurrent.futures import ThreadPoolExecutor  # 5 ms

            self._pid, self._begun = os.getpid(), {}
            self._pool = ThreadPoolExecutor(2, "actorflow-parquet")
        if not len(numbers):
            self._begun.clear()
        for number in np.unique(np.searchsorted(self._starts, numbers, side="right") - 1).tolist():
            is_there = number in self._kept or number in self._begun
            if not is_there and len(self._begun) < _MOST_BEGUN:
                self._begun[number] = self._pool.submit(self.decoded_group, number)

    def _block(self, number: int) -> ColumnArrays:
        columns = self._kept.get(number)
        if columns is None:
            begun = self._begun.pop(number, None) if self._pid == os.getpid() else None
            columns = self.decoded_group(number) if begun is None else begun.result()
        # Each of these is one step of the interpreter: another thread may read the same rows.
        self._kept.pop(number, None)
        self._kept[number] = columns
        if len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        return columns

    def decoded_group(self, number: int) -> ColumnArrays:
        """Return the columns of a row group, by its number. Raises DataError. From any thread."""
        file, group = self._groups[number]
        where = f"{self._files[file]}, row group {group}"
        fragment = self._fragments[file].subset(row_group_ids=[group])
        try:
            table = fragment.to_table(
                schema=self._dataset.schema, columns=self._columns, use_threads=False
            )
        except _ARROW as error:
            raise DataError(f"from_parquet: {where} cannot be read: {error}") from error
        return decoded(table, where)

    def row(self, number: int, epoch: int) -> Sample:
        """Return a row."""
        block = bisect_right(self._bounds, number) - 1
        inside = number - self._bounds[block]
        return {name: owned(column[inside]) for name, column in self._block(block).items()}

    def columns(self, numbers: npt.NDArray[np.int64]) -> ColumnArrays:
        """Return some rows, of each row group at once."""
        blocks = np.searchsorted(self._starts, numbers, side="right") - 1
        pieces = [(b, np.flatnonzero(blocks == b)) for b in dict.fromkeys(blocks.tolist())]
        if len(pieces) == 1:
            rows = numbers - self._starts[pieces[0][0]]
            return {name: column[rows] for name, column in self._block(pieces[0][0]).items()}
        out: ColumnArrays = {}
        for block, places in pieces:
            rows = numbers[places] - self._starts[block]
            for name, column in self._block(block).items():
                if name not in out:
                    out[name] = np.empty((len(numbers), *column.shape[1:]), column.dtype)
                _check_alike(name, column, out[name], self.where(int(numbers[places[0]])))
                out[name][places] = column[rows]
        return out

    def where(self, number: int) -> str:
        """Return the file and the row in it."""
        block = bisect_right(self._bounds, number) - 1
        file, group = self._groups[block]
        first = int(self._starts[block - group])
        return f"{self._files[file]}, row {number - first:,}"

    def fingerprint(self) -> str:
        """Return a hash of names, sizes and rows; bytes are not read."""
        return f"parquet({len(self)},{_of_files(self._files, self._root)},{self._columns})"


_MOST_BEGUN = 4
"""Row groups that are decoded ahead: those of a shuffled window come at once."""


def _check_alike(name: str, column: npt.NDArray[Any], other: Any, where: str) -> None:
    if column.shape[1:] != other.shape[1:] or column.dtype != other.dtype:
        raise DataError(
            f"{where}: column {name!r} has rows of {column.dtype}{list(column.shape[1:])}, and in"
            f" other row groups {other.dtype}{list(other.shape[1:])}; cut or pad them in a .map"
        )


def _difference(first: Any, own: Any) -> str:
    one, other = [
        {f.name: f"{f.type}{' not null' * (not f.nullable)}" for f in s} for s in (first, own)
    ]
    rows = [
        f"{name!r} is {other.get(name, 'missing')}, expected {one.get(name, 'no such column')}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]
    return ", ".join(rows[:5]) or "they stand in another order"


class TableSamples:
    """The rows of tables that are in memory, such as those of CSV files."""

    def __init__(self, files: Sequence[str], root: str, parts: Sequence[ColumnArrays]) -> None:
        self._files, self._root = list(files), root
        lengths = [len(next(iter(part.values()))) for part in parts]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._columns = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, number: int, epoch: int) -> Sample:
        """Return a row."""
        return {name: column[number] for name, column in self._columns.items()}

    def columns(self, numbers: npt.NDArray[np.int64]) -> ColumnArrays:
        """Return some rows."""
        return {name: column[numbers] for name, column in self._columns.items()}

    def where(self, number: int) -> str:
        """Return the file and the row in it, the header not counted."""
        file = int(np.searchsorted(self._starts, number, side="right")) - 1
        return f"{self._files[file]}, row {number - int(self._starts[file]):,}"

    def fingerprint(self) -> str:
        """Return a hash of names and sizes."""
        return f"table({len(self)},{_of_files(self._files, self._root)},{list(self._columns)})"


def read_csv(paths: Paths, columns: Sequence[str] | None) -> TableSamples:
    """Read CSV files with a header into memory. Raises DataError: names the file, and the row."""
    csv = _arrow("from_csv").csv
    files, root = _found(paths, (".csv", ".csv.gz"), "from_csv")
    parts: list[ColumnArrays] = []
    for file in files:
        try:
            table = _csv_table(csv, file, list(columns or ()))
        except _ARROW as error:
            raise DataError(f"from_csv: {file}: {error}") from error
        if not table.num_rows:
            raise DataError(f"from_csv: {file} has no row below its header")
        part = {
            # Text has no element types; jobs compute in float32.
            name: column.astype(np.float32) if column.dtype == np.float64 else column
            for name, column in decoded(table, file).items()
        }
        types = {name: column.dtype for name, column in part.items()}
        if parts and types != (expected := {name: c.dtype for name, c in parts[0].items()}):
            raise DataError(
                f"from_csv: the columns of {file} are {_listed(types)}, those of {files[0]}"
                f" {_listed(expected)}"
            )
        parts.append(part)
    return TableSamples(files, root, parts)


def _csv_table(csv: Any, file: str, columns: list[str]) -> Any:
    # Slower, but cells may have several lines, and errors tell the row.
    slow = {
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "read_options": csv.ReadOptions(use_threads=False),
    }
    with csv.open_csv(file, **slow) as head:
        names = head.schema.names
    for name in columns or names:
        if (count := names.count(name)) != 1:
            raise DataError(
                f"from_csv: {file} has {count or 'no'} columns {name!r}; its header has"
                f" {', '.join(map(repr, names))}, and each name stands for one column"
            )
    options = csv.ConvertOptions(include_columns=columns)
    try:
        return csv.read_csv(file, convert_options=options)
    except ValueError:
        return csv.read_csv(file, convert_options=options, **slow)


def _listed(types: dict[str, Any]) -> str:
    return ", ".join(f"{name!r} ({dtype})" for name, dtype in types.items())


class ImageSamples:
    """Images in a folder with a folder for each class.

    A sample has `image`, uint8 [height, width, 3] (RGB), and `label`, the number of its folder in
    the order of names.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """List the files. Raises DataError where there is no folder with images."""
        _pillow("from_image_folder")
        self._root = os.fspath(root)
        if not os.path.isdir(self._root):
            raise DataError(f"from_image_folder: expected a folder, came {self._root!r}")
        folders = [e.name for e in os.scandir(self._root) if e.is_dir() and e.name[0] != "."]
        self.classes = tuple(sorted(folders))
        files = [_images_below(os.path.join(self._root, name)) for name in self.classes]
        self._files = list(itertools.chain(*files))
        if not self._files:
            raise DataError(
                f"from_image_folder: expected folders of images in {self._root!r}, one for each"
                f" class, with names that end in {', '.join(IMAGE_SUFFIXES)}; there is none"
            )
        self.labels = np.repeat(np.arange(len(files), dtype=np.int64), list(map(len, files)))

    def __len__(self) -> int:
        return len(self._files)

    def row(self, number: int, epoch: int) -> Sample:
        """Decode an image. Raises what Pillow raises for a file that is damaged."""
        with _pillow("from_image_folder").open(self._files[number]) as image:
            if image.mode[0] in "IF":  # of 16 and 32 bits, which `convert` cuts at 255
                raise DataError(
                    f"{self.where(number)}: expected pixels of 8 bits, came Pillow's mode"
                    f" {image.mode!r}; write the image with 8, or read it in a from_dataset"
                )
            pixels = np.array(image.convert("RGB"))
        return {"image": pixels, "label": self.labels[number]}

    def where(self, number: int) -> str:
        """Return the file."""
        return self._files[number]

    def fingerprint(self) -> str:
        """Return a hash of names and sizes; bytes are not read."""
        return f"images({len(self)},{_of_files(self._files, self._root)})"


def _images_below(folder: str) -> list[str]:
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]  # of tools, as `._1.jpg` is
        shown = [n for n in names if n.lower().endswith(IMAGE_SUFFIXES) and n[0] != "."]
        found += [os.path.join(place, name) for name in shown]
    return sorted(found)


class TextSamples:
    """The lines of text files that are not empty, each a sample with `text`."""

    def __init__(self, paths: Paths) -> None:
        """Find the lines. Raises DataError where there is none."""
        self._files, self._root = _found(paths, (".txt",), "from_text")
        rows = [_lines_of(file, number) for number, file in enumerate(self._files)]
        self._lines = np.concatenate(rows)
        if not len(self._lines):
            raise DataError(f"from_text: {self._files[0]} has no line that is not empty")
        self._opened: tuple[int, Any] = (-1, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open."""
        return vars(self) | {"_opened": (-1, None)}

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, number: int, epoch: int) -> Sample:
        """Return a line, decoded as UTF-8. Raises DataError for one that is not."""
        file, _, begin, end = self._lines[number].tolist()
        opened = self._opened  # once: another thread may read another file
        if opened[0] != file:
            opened = self._opened = (file, np.memmap(self._files[file], np.uint8, "r"))
        try:
            return {"text": bytes(opened[1][begin:end]).decode("utf-8" if begin else "utf-8-sig")}
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(number)}: {error}; write the file in UTF-8") from error

    def where(self, number: int) -> str:
        """Return the file and the line in it, from 1."""
        file, line, _, _ = self._lines[number].tolist()
        return f"{self._files[file]}:{line}"

    def fingerprint(self) -> str:
        """Return a hash of names and sizes; bytes are not read."""
        return f"text({len(self)},{_of_files(self._files, self._root)})"


def _lines_of(file: str, number: int) -> npt.NDArray[np.int64]:
    """Return [file, line, begin, end) of each line that is not empty."""
    if not _size_of(file):
        return np.empty((0, 4), np.int64)
    content = np.memmap(file, np.uint8, "r")
    ends = np.flatnonzero(content == ord("\n"))
    begins = np.concatenate([[0], ends + 1])
    ends = np.concatenate([ends, [len(content)]])
    has_return = (ends > begins) & (content[np.maximum(ends - 1, 0)] == ord("\r"))
    ends = ends - has_return
    lines = np.flatnonzero(ends > begins)
    rows = [np.full(len(lines), number), lines + 1, begins[lines], ends[lines]]
    return np.stack(rows, axis=1).astype(np.int64)


def decoded(table: Any, where: str) -> ColumnArrays:
    """Return the columns of a table of Arrow: arrays [rows, ...], of objects where rows differ.

    Raises DataError for a value that is missing.
    """
    return {
        name: _decoded(column.combine_chunks(), f"{where}: column {name!r}")
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _decoded(column: Any, where: str) -> npt.NDArray[Any]:
    types = _arrow("a table").types
    if column.null_count:
        raise DataError(
            f"{where}: {column.null_count:,} of {len(column):,} values are missing, the first is"
            f" number {column.is_null().index(True).as_py():,}; fill them in before, such as by"
            " pyarrow.compute.fill_null"
        )
    kind = column.type
    if types.is_dictionary(kind):
        return _decoded(column.dictionary_decode(), where)
    if types.is_fixed_size_list(kind):
        values = _decoded(column.flatten(), where)
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if types.is_list(kind) or types.is_large_list(kind):
        values = _decoded(column.flatten(), where)
        offsets = column.offsets.to_numpy()
        lengths = np.diff(offsets)
        if len(lengths) and (lengths == lengths[0]).all():
            return values.reshape(len(column), lengths[0], *values.shape[1:])
        rows = np.empty(len(column), object)
        rows[:] = np.split(values, offsets[1:-1] - offsets[0])
        return rows
    array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array


def _found(paths: Paths, suffixes: tuple[str, ...], what: str) -> tuple[list[str], str]:
    """Return files in the order of their names, and the folder above all of them."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files: list[str] = []
    names = [os.fspath(one) for one in given]
    for one in names:
        if os.path.isdir(one):
            files += sorted(
                str(path)
                for path in Path(one).rglob("*")
                if path.name.endswith(suffixes) and not _is_hidden(path.relative_to(one))
                if not path.is_dir()  # as Spark names a table
            )
        elif os.path.isfile(one):
            files.append(one)
        else:
            raise DataError(f"{what}: there is no file or folder {one!r}")
    if not files:
        raise DataError(f"{what}: no file in {given} has a name that ends in {suffixes[0]!r}")
    folders = [one for one in names if os.path.isdir(one)]
    root = folders[0] if len(given) == len(folders) == 1 else ""
    return files, root


def _is_hidden(path: Path) -> bool:
    """Whether a part of a path is no data, as Spark names it: `_temporary`, `.crc`."""
    return any([p.startswith(".") or (p.startswith("_") and "=" not in p) for p in path.parts])


def _of_files(files: Sequence[str], root: str) -> str:
    """Return a hash of names below a folder, and of sizes: the same in another place."""
    rows = [
        f"{os.path.relpath(file, root) if root else os.path.basename(file)}:{_size_of(file)}"
        for file in files
    ]
    return hash_of("\n".join(rows).encode())


def _size_of(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError as error:  # a link to nothing
        raise DataError(f"{file}: {error.strerror}") from error


def resized(image: npt.NDArray[Any], height: int, width: int) -> npt.NDArray[Any]:
    """Return an image, uint8 [height, width, channels], resized bilinearly by Pillow.

    Raises DataError for one of another type.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise DataError(
            "augment: expected an image of uint8 [height, width, 1 or 3], came"
            f" {image.dtype}{list(image.shape)}; resize it before .map(Normalize())"
        )
    pillow = _pillow("augment")
    flat = np.ascontiguousarray(image if image.shape[2] == 3 else image[..., 0])
    small = pillow.fromarray(flat).resize((width, height), pillow.Resampling.BILINEAR)
    return np.asarray(small).reshape(height, width, image.shape[2])
