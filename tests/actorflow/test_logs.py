import logging
import sys

import pytest

from actorflow.logs import logger


class Broken(logging.Handler):
    def emit(self, record):
        raise OSError("the log's disk is full")


@pytest.fixture
def broken():
    handler = Broken()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_handler_that_raises_ends_nothing_and_is_told_on_stderr(broken, capsys):
    logger.warning("a warning")
    err = capsys.readouterr().err
    assert "the log's disk is full" in err
    assert "a warning" in err


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_nor_does_it_where_stderr_is_gone_too(broken, monkeypatch, tmp_path, stderr):
    stream = None
    if stderr == "closed":
        stream = (tmp_path / "err").open("w")
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    logger.warning("a warning")


def test_it_is_the_logger_that_a_program_asks_for_by_name():
    assert logging.getLogger("actorflow") is logger
