import logging
import subprocess
import sys

import pytest

from actorflow.environment.settings import logger


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


def test_a_program_that_has_a_class_of_its_own_for_loggers_keeps_it():
    code = """
import logging
class Own(logging.Logger):
    def makeRecord(self, *arguments, **options):
        record = super().makeRecord(*arguments, **options)
        record.msg = "own: " + record.msg
        return record
    def callHandlers(self, record):
        super().callHandlers(record)
        raise OSError("own handlers fail")
logging.setLoggerClass(Own)
logging.raiseExceptions = False
from actorflow.environment.settings import logger
logger.warning("text")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "own: text\n")
