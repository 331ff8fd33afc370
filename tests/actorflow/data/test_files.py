"""Samples from files: what pyarrow and Pillow wrote comes back, and damage is named."""

import contextlib
import os
import pickle
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.data import DataError, files

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def written(path, first, count, rows=40, **more):
    ids = np.arange(first * 8, (first + count) * 8).reshape(count, 8)
    columns = {"ids": pa.array(ids.tolist(), pa.list_(pa.int32())), "y": np.arange(count) + first}
    path.parent.mkdir(exist_ok=True, parents=True)
    parquet.write_table(pa.table({**columns, **more}), path, row_group_size=rows)


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        written(tmp_path / "table" / f"{number}.parquet", 100 * number, 100)
    return tmp_path / "table"


def values(data, name="y"):
    return np.concatenate([batch[name] for batch in data]).tolist()


def test_rows_of_files_come_in_the_order_of_names(folder):
    data = af.data.from_parquet(folder).batch(50)
    assert {name: str(type_) for name, type_ in data.spec().items()} == {
        "ids": "int32[50, 8]", "y": "int64[50]",
    }  # fmt: skip
    batches = list(data)
    assert values(batches) == list(range(300))
    assert values(batches, "ids") == np.arange(2400).reshape(300, 8).tolist()
    assert values(af.data.from_parquet(folder / "1.parquet", columns=["y"]).batch(50)) == list(
        range(100, 200)
    )


def test_shuffled_rows_are_all_rows_window_by_window(folder):
    seen = values(af.data.from_parquet(folder).shuffle(0, buffer=80).batch(50))
    assert sorted(seen) == list(range(300))
    assert seen[:40] != sorted(seen[:40])
    groups = {(row // 100, row % 100 // 40) for row in seen[:40]}
    assert len(groups) <= 3, "of 40 rows, those of a window of two or three row groups"


@pytest.mark.parametrize("seed", [None, 0])
def test_row_groups_are_decoded_ahead_and_hardly_one_twice(folder, seed, monkeypatch):
    groups, threads, decoded = Counter(), set(), files.decoded

    def noted(table, where):
        groups[where] += 1
        threads.add(threading.current_thread())
        return decoded(table, where)

    data = af.data.from_parquet(folder)
    data = (data if seed is None else data.shuffle(seed)).batch(10)
    data.spec()  # by a reader that keeps the first row groups
    monkeypatch.setattr(files, "decoded", noted)
    assert sorted(values(data)) == list(range(300))
    assert 6 <= len(groups) <= 9
    # What the look for the types has begun may go on, and be counted.
    assert sum(groups.values()) <= 9 + 4
    assert len(threads - {threading.main_thread()}) in (1, 2)


def test_a_forked_child_decodes_for_itself(folder):
    data = af.data.from_parquet(folder).batch(10)
    next(data)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(values(data) != list(range(10, 300)))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert values(data) == list(range(10, 300))


def test_a_map_sees_rows_and_a_reader_travels_as_paths(folder):
    data = af.data.from_parquet(folder).map(lambda s: {"z": s["ids"].sum() + s["y"]}).batch(300)
    ids = np.arange(2400).reshape(300, 8)
    assert next(data)["z"].tolist() == (ids.sum(1) + np.arange(300)).tolist()
    samples = af.data.from_parquet(folder).samples
    assert len(pickle.dumps(samples)) < 4000
    samples.row(250, 0)
    again = pickle.loads(pickle.dumps(samples))
    assert again.row(250, 0)["y"] == 250
    assert samples.where(141) == f"{folder}/1.parquet, row 41"


def test_partitions_are_columns(tmp_path):
    for key in (5, 6):
        (tmp_path / "table" / f"key={key}").mkdir(parents=True)
        parquet.write_table(
            pa.table({"v": [1.0 * key, 2.0]}), tmp_path / "table" / f"key={key}" / "a.parquet"
        )
    batch = next(af.data.from_parquet(tmp_path / "table").batch(4))
    assert (batch["key"].tolist(), batch["v"].tolist()) == ([5, 5, 6, 6], [5.0, 2.0, 6.0, 2.0])


def test_columns_of_every_kind_are_arrays(tmp_path):
    table = pa.table(
        {
            "fixed": pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.float32(), 2), 2)),
            "half": pa.array(np.arange(3, dtype=np.float16)),
            "flag": [True, False, True],
            "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
            "ragged": [[1], [2, 3], []],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    row = af.data.from_parquet(tmp_path / "a.parquet").samples.row(1, 0)
    assert row["fixed"].tolist() == [[1, 2], [3, 4]]
    assert (row["half"].dtype, bool(row["flag"]), row["kind"]) == (np.float16, False, "b")
    assert row["ragged"].tolist() == [2, 3]
    data = af.data.from_parquet(tmp_path / "a.parquet", columns=["ragged"])
    assert next(data.batch(3, pad={"ragged": 2}))["ragged"].tolist() == [[1, 0], [2, 3], [0, 0]]


def test_csv_files_are_tables_of_float32_and_int64(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,c\n1,2.5,x\n3,4,y\n")
    (tmp_path / "b.csv").write_text("a,b,c\n5,6.5,z\n")
    batch = next(af.data.from_csv(tmp_path, columns=["a", "b"]).batch(3))
    assert (batch["a"].dtype, batch["b"].dtype) == (np.int64, np.float32)
    assert (batch["a"].tolist(), batch["b"].tolist()) == ([1, 3, 5], [2.5, 4.0, 6.5])
    data = af.data.from_csv([tmp_path / "b.csv", tmp_path / "a.csv"])
    assert [data.samples.row(n, 0)["c"] for n in range(3)] == ["z", "x", "y"]
    assert data.samples.where(2) == f"{tmp_path}/a.csv, row 1"


def test_lines_of_text_are_samples(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\n\r\n\nzwölf\r\nend".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"last\n")
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "d.txt").write_bytes(b"half\n")
    data = af.data.from_text(tmp_path)
    samples = data.samples
    assert [samples.row(n, 0)["text"] for n in range(4)] == ["one", "zwölf", "end", "last"]
    assert samples.where(1) == f"{tmp_path}/a.txt:4"
    assert next(data.map(lambda s: {"n": len(s["text"])}).batch(4))["n"].tolist() == [3, 5, 3, 4]


def number_of(sample):
    return {"y": int(sample["text"])}


@pytest.mark.parametrize("kind", ["text", "parquet", "mixture"])
def test_pipelines_of_one_reader_and_order_are_read_on_two_threads(folder, tmp_path, kind):
    for number in range(3):
        lines = "\n".join(map(str, range(100 * number, 100 * number + 100)))
        (tmp_path / f"{number}.txt").write_text(lines)

    def make():
        text = af.data.from_text(tmp_path).map(number_of).shuffle(0)
        rows = af.data.from_parquet(folder, columns=["y"]).shuffle(0)
        data = {"text": text, "parquet": rows, "mixture": af.data.mix([text, rows], [1, 1])}
        return data[kind].repeat()

    def read(data, found):
        with contextlib.suppress(Exception):  # what it left out is told below
            found += [next(data)["y"].tolist() for _ in range(150)]

    shared, alone, found = make(), make(), ([], [])
    threads = [
        threading.Thread(target=read, args=(shared.batch(size), own), daemon=True)
        for size, own in zip((7, 5), found, strict=True)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    for size, own in zip((7, 5), found, strict=True):
        batches = alone.batch(size)
        assert own == [next(batches)["y"].tolist() for _ in range(150)]


def test_a_function_may_write_into_rows_and_images(tmp_path, photos):
    def less(sample):
        for value in (sample["x"], sample.get("y")):
            value -= 1
        return sample

    lists = pa.array([[1, 2], [3, 4]])
    parquet.write_table(pa.table({"x": lists, "y": pa.array([[1], [2, 3]])}), tmp_path / "a.pq")
    data = af.data.from_parquet(tmp_path / "a.pq").map(less).repeat(2).batch(2, pad={"y": 2})
    assert [batch["x"].tolist() for batch in data] == [[[0, 1], [2, 3]]] * 2

    def darker(sample):
        sample["image"] //= 2
        return sample

    batch = next(af.data.from_image_folder(photos).map(darker).batch(6))
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 20, 40, 50, 70, 90]


@pytest.fixture
def photos(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.full((8, 6, 3), 40 * number + (100 if name == "dog" else 0), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_images_have_the_number_of_their_folder(photos):
    data = af.data.from_image_folder(photos).batch(6)
    batch = next(data)
    assert batch["image"].shape == (6, 8, 6, 3)
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 40, 80, 100, 140, 180]
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    assert data.samples.classes == ("cat", "dog")
    drawn = af.data.from_image_folder(photos).sample(balanced=data.samples.labels)
    assert next(drawn.batch(6))["label"].shape == (6,)


def test_an_empty_folder_is_a_class_and_hidden_names_are_none(photos):
    (photos / "cow").mkdir()
    (photos / "dog" / "._0.png").write_bytes(b"of macOS")
    for hidden in (photos / ".ipynb_checkpoints", photos / "dog" / ".cache"):
        hidden.mkdir()
        (hidden / "9.png").write_bytes((photos / "cat" / "0.png").read_bytes())
    data = af.data.from_image_folder(photos)
    assert data.samples.classes == ("cat", "cow", "dog")
    assert next(data.batch(6))["label"].tolist() == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_pixels_of_more_than_8_bits_are_refused_and_not_cut(photos, kind):
    Image.fromarray(np.full((8, 6), 300, kind)).save(photos / "cat" / "2.tif")
    with pytest.raises(DataError, match=r"cat/2\.tif: expected pixels of 8 bits, came .* mode"):
        list(af.data.from_image_folder(photos).batch(7))


def test_a_link_to_nothing_is_named(photos, tmp_path):
    for path in (photos / "cat" / "9.png", tmp_path / "9.txt"):
        path.symlink_to("nothing")
    for data in (lambda: af.data.from_image_folder(photos), lambda: af.data.from_text(tmp_path)):
        with pytest.raises(DataError, match=r"9\.(png|txt): No such file"):
            data().fingerprint()


def test_a_table_in_a_folder_of_its_name_is_found(tmp_path):
    written(tmp_path / "data" / "train.parquet" / "part-0.parquet", 0, 2)
    assert values(af.data.from_parquet(tmp_path / "data").batch(2)) == [0, 1]


def test_cells_of_csv_may_have_several_lines_in_files_of_any_size(tmp_path):
    count = 60_000  # several of the blocks that pyarrow reads
    rows = "".join([f'"a,{number}\nb",{number}\n' for number in range(count)])
    (tmp_path / "a.csv").write_text("text,y\n" + rows)
    samples = af.data.from_csv(tmp_path).samples
    assert len(samples) == count
    assert samples.row(count - 1, 0) == {"text": f"a,{count - 1}\nb", "y": count - 1}


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\n\ufefftwo".encode())
    samples = af.data.from_text(tmp_path).samples
    assert [samples.row(n, 0)["text"] for n in range(2)] == ["one", "\ufefftwo"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-60])


def other_schema(folder):
    parquet.write_table(pa.table({"ids": [[1]], "y": ["a"]}), folder / "3.parquet")


def missing_value(path):
    parquet.write_table(pa.table({"y": pa.array([1, None, 3])}), path)


def without_null(path):
    schema = parquet.read_schema(path.parent / "0.parquet")
    fields = [field.with_nullable(field.name != "y") for field in schema]
    parquet.write_table(pa.table({"ids": [[1]], "y": [1]}, pa.schema(fields)), path)
    return path


REFUSED = {
    "no such file": lambda d: af.data.from_parquet(d / "nothing"),
    "empty folder": lambda d: (d / "new").mkdir() or af.data.from_parquet(d / "new"),
    "no such column": lambda d: af.data.from_parquet(d, columns=["q"]),
    "another schema": lambda d: other_schema(d) or af.data.from_parquet(d),
    "missing values": lambda d: (
        missing_value(d / "0.parquet") or af.data.from_parquet(d / "0.parquet").batch(1).spec()
    ),
    "no images": lambda d: af.data.from_image_folder(d),
    "no folder of images": lambda d: af.data.from_image_folder(d / "0.parquet"),
    "no text": lambda d: (d / "a.txt").touch() or af.data.from_text(d),
    "no rows": lambda d: (d / "a.csv").write_text("a,b\n") and af.data.from_csv(d),
    "missing cell": lambda d: (d / "a.csv").write_text("a,b\n1,2\n3,\n") and af.data.from_csv(d),
    "one name twice": lambda d: (
        (d / "a.csv").write_text("a,b,a\n1,2,3\n") and af.data.from_csv(d, columns=["a"])
    ),
    "no such column of text": lambda d: (
        (d / "a.csv").write_text("a,b\n1,2\n") and af.data.from_csv(d, columns=["c"])
    ),
    "null or not": lambda d: af.data.from_parquet([d / "0.parquet", without_null(d / "n.pq")]),
    "other columns": lambda d: (
        (d / "a.csv").write_text("a\n1\n")
        and (d / "b.csv").write_text("b\n1\n")
        and af.data.from_csv(d)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_no_table_are_refused(folder, name):
    with raises(DataError):
        REFUSED[name](folder)


def test_damage_that_another_library_finds_names_the_file(folder, photos):
    cut(folder / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet"):
        af.data.from_parquet(folder).batch(10).spec()
    (folder / "a.csv").write_text("a,b\n1,2.5\n3\n")
    with pytest.raises(DataError, match=r"a\.csv.*Row #3: Expected 2 columns, got 1"):
        af.data.from_csv(folder)
    (folder / "a.csv").write_bytes("ä,b\n1,2\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.csv: 'utf-8' codec"):
        af.data.from_csv(folder)
    for key in (1, 2):
        (folder / f"y={key}").mkdir()
        parquet.write_table(pa.table({"y": [0.5]}), folder / f"y={key}" / "a.pq")
    with pytest.raises(DataError, match=r"y=1/a\.pq: Unable to merge: Field y"):
        af.data.from_parquet([folder / "y=1", folder / "y=2"])
    cut(photos / "cat" / "2.png")
    with pytest.raises(DataError, match=r"cat/2\.png: "):
        list(af.data.from_image_folder(photos).batch(3))
    kept = af.data.from_image_folder(photos).on_error("skip").batch(5)
    assert next(kept)["label"].tolist() == [0, 0, 1, 1, 1]


def test_the_fingerprint_of_files_is_the_same_in_another_place(folder, tmp_path):
    one = af.data.from_parquet(folder).batch(2).fingerprint()
    moved = folder.rename(tmp_path / "moved")
    assert af.data.from_parquet(moved).batch(2).fingerprint() == one
    written(moved / "3.parquet", 0, 1)
    assert af.data.from_parquet(moved).batch(2).fingerprint() != one
