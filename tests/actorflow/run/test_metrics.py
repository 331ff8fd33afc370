import json
import math
import os
import sys
import threading
from io import FileIO
from pathlib import Path

import pytest
from error_texts import raises

from actorflow.run.report import MetricsFile, MetricsKeeper, read_metrics


def test_lines_are_on_the_file_as_soon_as_they_are_appended(tmp_path):
    path = tmp_path / "runs" / "demo" / "metrics.jsonl"
    file = MetricsFile(path)
    file.append({"step": 1, "loss": 4.5})
    file.append({"step": 2, "loss": 4.25})
    assert path.read_text() == '{"step": 1, "loss": 4.5}\n{"step": 2, "loss": 4.25}\n'
    file.close()


def test_a_second_run_appends(tmp_path):
    for step in (1, 2):
        file = MetricsFile(tmp_path / "m.jsonl")
        file.append({"step": step})
        file.close()
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [1, 2]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_line_cut_anywhere_costs_that_line_only(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    whole = b'{"step": 1}\n'
    path.write_bytes(whole + b'{"step": 2222}\n'[:cut])
    before = path.read_bytes()
    file = MetricsFile(path)
    file.append({"step": 3})
    file.close()
    assert path.read_bytes() == before + b'\n{"step": 3}\n'
    assert [row["step"] for row in read_metrics(path)][::2][:1] == [1]
    assert read_metrics(path)[-1] == {"step": 3}


def test_damage_of_other_kinds_is_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n17\n\n{"step": 2}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_numbers_that_json_lacks_come_back_through_float(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append({"a": math.nan, "b": math.inf, "c": -math.inf, "d": None})
    file.close()
    text = (tmp_path / "m.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(float(row["a"]))
    assert (float(row["b"]), float(row["c"]), row["d"]) == (math.inf, -math.inf, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_an_os_error(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", lambda path: FileIO("/dev/full", "ab"))
    with raises(OSError):
        file.append({"step": 1})
    file.close()


class Short(FileIO):
    def write(self, line):
        return super().write(line[:-1])


def test_a_line_written_in_part_is_an_os_error(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", lambda path: Short(path, "ab"))
    with raises(OSError):
        file.append({"step": 1})
    file.close()


def test_a_folder_in_place_of_the_file_is_an_os_error(tmp_path):
    with raises(OSError):
        MetricsFile(tmp_path)


class Disk:
    """Makes files that take only `room` lines, and a part of the next one."""

    def __init__(self, path):
        self.path, self.room, self.said = path, 1_000, []

    def open_file(self, path):
        disk = self

        class Limited(FileIO):
            def write(self, line):
                if disk.room == 0:
                    super().write(line[: len(line) // 2])
                    raise OSError(28, "No space left on device")
                disk.room -= line != b"\n"
                return super().write(line)

        return Limited(path, "ab+")

    def keeper(self, **options):
        return MetricsKeeper(self.path, self.said.append, open_file=self.open_file, **options)


def test_rows_that_a_full_disk_refused_are_written_when_it_has_room(tmp_path):
    disk = Disk(tmp_path / "m.jsonl")
    keeper = disk.keeper()
    keeper.append({"step": 1})
    disk.room = 0
    for step in (2, 3):
        keeper.append({"step": step})
    (said,) = disk.said
    assert "m.jsonl cannot be written ([Errno 28] No space left on device)" in said
    disk.room = 1_000
    keeper.append({"step": 4})
    keeper.close()
    assert [row["step"] for row in read_metrics(disk.path)] == [1, 2, 3, 4]
    assert len(disk.said) == 1


@pytest.mark.parametrize(("room", "lost", "steps"), [(0, 5, []), (1_000, 3, [3, 4])])
def test_what_a_disk_never_took_is_counted_at_the_end(tmp_path, room, lost, steps):
    """No more is kept than was said, and the newest rows at that."""
    disk = Disk(tmp_path / "m.jsonl")
    keeper = disk.keeper(most_rows=2)
    disk.room = 0
    for step in range(5):
        keeper.append({"step": step})
    disk.room = room
    keeper.close()
    assert disk.said[1:] == [f"warning: {lost} rows of metrics are not in {disk.path}"]
    assert [row["step"] for row in read_metrics(disk.path)] == steps


def test_a_place_that_cannot_be_opened_is_told_at_once(tmp_path):
    said = []
    MetricsKeeper(tmp_path, said.append).close()
    assert said[0].startswith(f"warning: {tmp_path} cannot be written")


class Slow(FileIO):
    """Lets other threads run while a line is written, as a disk does."""

    def write(self, line):
        written = super().write(line)
        os.sched_yield()
        return written


def test_rows_of_several_threads_are_each_written_once(tmp_path):
    """A run's outputs and its evaluations come on threads of their own."""
    interval = sys.getswitchinterval()
    path, failed = tmp_path / "m.jsonl", []
    keeper = MetricsKeeper(path, pytest.fail, open_file=lambda path: Slow(path, "ab+"))

    def append(first):
        try:
            for step in range(first, first + 300):
                keeper.append({"step": step})
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=append, args=(1000 * i,)) for i in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    keeper.close()
    assert not failed
    steps = [row["step"] for row in read_metrics(tmp_path / "m.jsonl")]
    assert sorted(steps) == [s for i in range(3) for s in range(1000 * i, 1000 * i + 300)]
