"""The tables of error texts: what fails where a text, a row, a case or a test changes."""

import error_texts
import pytest
from error_texts import RunningTest, normalised, read, written

ROWS = {
    "nn/test_a.py::test_one": ["ValueError: no", "KeyError: first\nsecond\n\nfourth"],
    "nn/test_a.py::test_two[a]": ["ValueError: same"],
    "nn/test_a.py::test_two[b]": ["ValueError: another"],
    "nn/test_a.py::test_two[c-  d]": ["ValueError: same"],
}


def running(expected, *texts):
    test = RunningTest("nn/test_a.py::test_one", expected)
    for text in texts:
        test.add(text)
    test.close()
    return test.texts


def test_a_table_is_read_as_it_was_written(tmp_path):
    (tmp_path / "nn.txt").write_text(written(ROWS))
    assert read(tmp_path / "nn.txt") == ROWS


def test_texts_come_in_the_order_of_their_row_and_may_come_again():
    assert running(["a", "b"], "a", "a", "b", "a") == ["a", "b"]
    assert running(None, "b", "a", "b") == ["b", "a"]  # what `--update-texts` writes


@pytest.mark.parametrize(
    ("expected", "texts"),
    [([], ["a"]), (["a"], ["b"]), (["a"], []), (["a", "b"], ["a"]), (["a", "b"], ["b", "a"])],
)
def test_another_text_or_one_that_does_not_come_is_a_failure(expected, texts):
    with pytest.raises(pytest.fail.Exception, match="test_one"):
        running(expected, *texts)


def test_the_type_of_an_error_is_compared_too():
    test = RunningTest("nn/test_a.py::test_one", ["ValueError: no"])
    error_texts._running.append(test)
    try:
        with pytest.raises(pytest.fail.Exception, match="UnicodeError: no"):  # noqa: SIM117
            with error_texts.raises(ValueError):
                raise UnicodeError("no")
    finally:
        error_texts._running.remove(test)


def test_what_differs_from_run_to_run_is_no_part_of_a_text(tmp_path):
    assert normalised(f"{tmp_path}/run at 0x7f00abcd12") == "<tmp>/run at <address>"
    here = test_a_table_is_read_as_it_was_written.__code__.co_firstlineno
    line = "def test_a_table_is_read_as_it_was_written(tmp_path):"
    assert normalised(f"{__file__}:{here}: no") == f"tests/test_error_texts.py:`{line}`: no"


def test_each_row_is_of_a_test_that_there_is():
    assert error_texts.rows_without_function() == []
    for path in error_texts.TABLES.glob("*.txt"):
        rows = read(path)
        assert path.read_text() == written(rows), path
        assert {error_texts.path_of(name) for name in rows} == {path}
