import json
import math
import os
from pathlib import Path

import pytest

from actorflow.metrics import MetricsFile, read_metrics


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
def test_a_full_disk_is_an_os_error():
    file = MetricsFile("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        file.append({"step": 1})
    file.close()


def test_a_line_written_in_part_is_an_os_error(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file._file.close()

    class Short:
        def write(self, line):
            return len(line) - 1

    file._file = Short()
    with pytest.raises(OSError, match=r"only 11 of 12 bytes"):
        file.append({"step": 1})


def test_a_folder_in_place_of_the_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=os.path.basename(tmp_path)):
        MetricsFile(tmp_path)
