import json
from pathlib import Path

import pytest

from actorflow.cli import inspect as cli_pack
from actorflow.cli.main import main

SMALL = "id,lower,upper,size\na,0,2,3\nb,1,3,5\nc,2,4,3\n"
BIG = "9" * 18


def written(tmp_path, content):
    path = tmp_path / "buffers.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def packed(tmp_path, capsys, content, *options):
    code = main(["pack", written(tmp_path, content), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_the_report_holds_the_placement_and_its_certificate(tmp_path, capsys):
    code, report = packed(tmp_path, capsys, SMALL)
    assert code == 0
    assert set(report) == {
        "peak_bytes", "lower_bound_bytes", "fits", "optimal", "certificate", "seconds", "offsets",
    }  # fmt: skip
    assert (report["peak_bytes"], report["lower_bound_bytes"]) == (8, 8)
    assert (report["fits"], report["optimal"]) == (True, True)
    assert report["certificate"] == "peak = max live bytes: optimal for this order"
    a, b, c = (report["offsets"][name] for name in "abc")
    assert a == c == (0 if b == 3 else 5)


def test_columns_may_come_in_any_order(tmp_path, capsys):
    _, one = packed(tmp_path, capsys, SMALL)
    _, other = packed(tmp_path, capsys, "size,id,upper,lower\n3,a,2,0\n5,b,3,1\n3,c,4,2\n")
    assert one["offsets"] == other["offsets"]


def test_offsets_are_multiples_of_the_alignment(tmp_path, capsys):
    _, report = packed(tmp_path, capsys, SMALL, "--alignment", "64")
    assert report["peak_bytes"] == 128
    assert all(offset % 64 == 0 for offset in report["offsets"].values())


@pytest.mark.parametrize(("capacity", "code"), [("8", 0), ("7", 3), ("9", 0)])
def test_the_exit_code_tells_whether_it_fits(tmp_path, capsys, capacity, code):
    got, report = packed(tmp_path, capsys, SMALL, "--capacity", capacity)
    assert (got, report["fits"]) == (code, code == 0)


def test_people_read_why_it_does_not_fit(tmp_path, capsys):
    assert main(["pack", written(tmp_path, SMALL), "--capacity", "7"]) == 3
    out = capsys.readouterr().out
    assert "3 buffers, at most 8 bytes (8 B) live at once, at step 1" in out
    assert "does not fit into 7 bytes, 1 too many: no placement does" in out


def test_people_read_how_much_is_to_spare(tmp_path, capsys):
    assert main(["pack", written(tmp_path, SMALL), "--capacity", "10"]) == 0
    assert "fits into 10 bytes, 2 to spare" in capsys.readouterr().out


def test_a_file_without_buffers_needs_no_bytes(tmp_path, capsys):
    code, report = packed(tmp_path, capsys, "id,lower,upper,size\n")
    assert (code, report["peak_bytes"], report["offsets"]) == (0, 0, {})


def test_blank_lines_and_a_byte_order_mark_are_no_harm(tmp_path, capsys):
    _, report = packed(tmp_path, capsys, "\ufeff" + SMALL.replace("\n", "\r\n\r\n"))
    assert report["peak_bytes"] == 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty: expected a header id,lower,upper,size"),
        ("id,lower,upper\n", "line 1: expected the columns id,lower,upper,size in any order"),
        ("id,lower,upper\n", "lacks size"),
        ("id,lower,upper,size,alignment\n", "'alignment', which would not be heeded"),
        ("id,id,lower,upper,size\n", "names a column twice"),
        ("id,lower,upper,size\na,0,1\n", "line 2: expected 4 values, got 3"),
        ("id,lower,upper,size\na,0,1,4.5\n", "line 2: expected an integer as size, got '4.5'"),
        ("id,lower,upper,size\na,0,1,\n", "line 2: expected an integer as size, got ''"),
        ("id,lower,upper,size\na,0,1,1_0\n", "expected an integer as size, got '1_0'"),
        ("id,lower,upper,size\na,0,1,-4\n", "expected a size of 0 bytes or more, got -4"),
        ("id,lower,upper,size\na,2,1,4\n", "line 2: expected upper >= lower, got [2, 1)"),
        ("id,lower,upper,size\na,0,1,4\n\na,0,1,4\n", "line 4: expected ids to differ, got 'a'"),
        ("id,lower,upper,size\na,0,1," + "9" * 19 + "\n", "at most 18 digits"),
        (
            "id,lower,upper,size\n" + "".join(f"{i},0,1,{BIG}\n" for i in "abc"),
            "line 4: expected sizes that add up to less than 2^61 bytes",
        ),
        (b"\x7fELF\xd0\xff", "expected a CSV file in UTF-8, got the byte 0xd0 at offset 4"),
        ('id,lower,upper,size\n"a,0,1,4\n', "line 2: not CSV"),
        ("a" * 200_000, "line 1: not CSV"),
    ],
)
def test_a_bad_file_is_an_error_line_that_names_the_place(tmp_path, capsys, content, words):
    path = written(tmp_path, content)
    assert main(["pack", path]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"actorflow: {path}")
    assert words in error
    assert error.count("\n") == 1


def test_a_missing_file_and_a_directory_are_error_lines(tmp_path, capsys):
    assert main(["pack", str(tmp_path / "none.csv")]) == 1
    assert "none.csv: No such file" in capsys.readouterr().err
    assert main(["pack", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--alignment", "--capacity"])
@pytest.mark.parametrize("value", ["0", "-1", str(1 << 61), "1e9", "many"])
def test_an_option_that_is_no_size_is_refused_as_an_argument(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        main(["pack", written(tmp_path, SMALL), f"{option}={value}"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"argument {option}: expected" in message
    assert repr(value) in message


def test_sizes_that_overflow_when_rounded_up_are_refused(tmp_path, capsys):
    rows = "".join([f"{name},0,1,1\n" for name in "abcde"])
    path = written(tmp_path, "id,lower,upper,size\n" + rows)
    assert main(["pack", path, "--alignment", str(1 << 59)]) == 1
    assert "2^61" in capsys.readouterr().err


def test_a_wrong_placement_is_never_shown(tmp_path, capsys, monkeypatch):
    def faulty(*columns, **options):
        return cli_pack.OffsetPlan((0, 0, 0), 8, 8, 0, "fault", "", 8, 0)

    monkeypatch.setattr(cli_pack, "plan_offsets", faulty)
    path = written(tmp_path, SMALL)
    assert main(["pack", path]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "share bytes while both are live" in captured.err


def test_a_hard_public_instance_fits(capsys):
    path = Path(__file__).parents[3].parent / "shared/data/memory/D.1048576.csv"
    if not path.exists():
        pytest.skip(f"the public instance {path.name} is not beside this checkout")
    assert main(["pack", str(path), "--capacity", "1048576"]) == 0
    assert "fits into 1048576 bytes" in capsys.readouterr().out


def test_a_buffer_that_is_never_live_takes_no_bytes(tmp_path, capsys):
    code, report = packed(tmp_path, capsys, "id,lower,upper,size\na,0,0,5\nb,0,1,3\n")
    assert (code, report["peak_bytes"]) == (0, 3)


def test_a_capacity_may_have_a_unit(tmp_path, capsys):
    code, report = packed(tmp_path, capsys, SMALL, "--capacity", "1KiB")
    assert (code, report["fits"]) == (0, True)


def test_only_ends_of_lines_end_a_line(tmp_path, capsys):
    _, report = packed(tmp_path, capsys, "\n  \nid,lower,upper,size\na,0,1,3\n")
    assert report["offsets"] == {"a": 0}
    assert main(["pack", written(tmp_path, "id,lower,upper,size\na\u2028b,0,1,3\n")]) == 1
    assert "an id that can be printed" in capsys.readouterr().err
    assert main(["pack", written(tmp_path, "id,lower,upper,size\n,0,1,3\n")]) == 1
    assert "line 2: expected an id" in capsys.readouterr().err
