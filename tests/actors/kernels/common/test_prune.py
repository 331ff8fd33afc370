"""A cache that stays within its bounds, whoever else uses it."""

import os
import threading
import time
from contextlib import suppress

import pytest

from actors.kernels.common.files import (
    MOST_DAYS,
    DamagedFile,
    mark_used,
    prune,
    prune_in_turn,
    read_checksummed,
    write_checksummed,
)

DAY = 86_400


@pytest.fixture
def fill(tmp_path):
    """Write files of 100 bytes each, by name and the days since they were used."""

    def write(**days):
        now = time.time()
        for name, age in days.items():
            file = tmp_path / name.replace("_", ".")
            file.write_bytes(bytes(100))
            os.utime(file, (now, now - age * DAY))
        return tmp_path

    return write


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("most_bytes", "left"),
    [
        (1000, ["a.x", "b.x", "c.x", "new.x"]),
        (400, ["a.x", "b.x", "c.x", "new.x"]),
        (399, ["b.x", "c.x", "new.x"]),
        (250, ["c.x", "new.x"]),
        (100, ["new.x"]),
        (0, ["new.x"]),
    ],
)
def test_what_was_used_longest_ago_goes_first(fill, most_bytes, left):
    folder = fill(a_x=3, b_x=2, c_x=1, new_x=0)
    prune(folder / "new.x", most_bytes)
    assert names(folder) == left


def test_what_was_not_used_for_long_goes_however_little_it_takes(fill):
    folder = fill(a_x=MOST_DAYS + 1, b_x=MOST_DAYS - 1, new_x=0)
    assert prune(folder / "new.x", 1 << 40) == [folder / "a.x"]
    assert names(folder) == ["b.x", "new.x"]


def test_what_is_used_becomes_young(fill):
    folder = fill(a_x=MOST_DAYS + 1, b_x=2, new_x=0)
    mark_used(folder / "a.x")
    prune(folder / "new.x", 200)
    assert names(folder) == ["a.x", "new.x"]


def test_files_of_other_kinds_links_and_folders_stay(fill, tmp_path):
    folder = fill(a_json=900, a_x=900, new_x=0)
    (folder / "folder.x").mkdir()
    (folder / "link.x").symlink_to("a.json")
    prune(folder / "new.x", 0)
    assert names(folder) == ["a.json", "folder.x", "link.x", "new.x"]


def test_what_a_writer_left_unfinished_goes_after_a_day(fill):
    folder = fill(a_x_partial=2, b_x_partial=0, new_x=0)
    prune(folder / "new.x", 1 << 40)
    assert names(folder) == ["b.x.partial", "new.x"]


def test_a_file_of_the_future_is_young(fill):
    folder = fill(a_x=-400, b_x=1, new_x=0)
    prune(folder / "new.x", 200)
    assert names(folder) == ["a.x", "new.x"]


def test_a_folder_that_is_gone_costs_nothing(tmp_path):
    assert prune(tmp_path / "gone" / "new.x", 0) == []
    mark_used(tmp_path / "gone" / "new.x")


def test_a_cache_that_grows_stays_near_its_bound_without_a_look_at_each_file(tmp_path, monkeypatch):
    looks, most = [], 0
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: looks.append(folder) or scandir(folder))
    for number in range(2000):
        path = tmp_path / f"{number * 7919:032x}.x"
        path.write_bytes(bytes(10))
        prune_in_turn(path, 1000)
        most = max(most, len(names(tmp_path)) if number % 50 == 0 else 0)
    assert 30 <= len(looks) <= 130
    assert 100 <= most <= 100 + 300


def test_writers_readers_and_pruners_side_by_side_see_whole_files_or_none(tmp_path):
    errors = []

    def work(own):
        try:
            for number in range(60):
                path = tmp_path / f"{(own + number) % 7}.x"
                write_checksummed(path, bytes([number]) * 300)
                prune(path, 900)
                with suppress(FileNotFoundError):
                    assert len(set(read_checksummed(tmp_path / f"{number % 7}.x"))) == 1
        except (OSError, DamagedFile, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    prune(tmp_path / "0.x", 900)
    assert 1 <= len(names(tmp_path)) <= 3
