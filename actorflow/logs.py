"""The library's own log: one logger, quiet below warnings unless ACTORFLOW_LOG says otherwise."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress


class _Unfailing(logging.Logger):
    """A logger whose handlers, which are others', may fail; that never ends a run."""

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        try:
            super().callHandlers(record)
        except Exception:
            with suppress(Exception):  # stderr may be what failed
                logging.Handler().handleError(record)


logger = logging.getLogger("actorflow")
"""Warnings reach stderr even where a program never set up logging; that is logging's own rule."""

# The program may have asked for this logger before us, or have a class of its own for loggers.
logger.__class__ = type("UnfailingLogger", (_Unfailing, type(logger)), {})


_SHOWN = 10


def is_worth_a_line(count: int) -> bool:
    """Whether the count-th of equal events is told: the first ones, then every tenfold number."""
    return count <= _SHOWN or math.log10(count).is_integer()


def once(tell: Callable[[str], object]) -> Callable[[str], None]:
    """Return a function that tells the first text it is given, and no other."""
    told: list[str] = []

    def tell_once(text: str) -> None:
        if not told:
            told.append(text)
            tell(text)

    return tell_once


def configure(level: str) -> None:
    """Set the least level that is logged; below warnings make sure that there is a handler."""
    logger.setLevel(level)
    if logger.level < logging.WARNING and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("actorflow: %(message)s"))
        logger.addHandler(handler)
