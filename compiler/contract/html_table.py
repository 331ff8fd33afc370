"""A value as a small table for notebooks, which ask a value for `_repr_html_`."""

from __future__ import annotations

import html
from collections.abc import Mapping

_MOST_LETTERS = 400
"""Of a cell; a text of the user may have any length."""


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a table with a row for each fact, in the colours and letters of its page.

    All texts are shown as text, whatever they have in them.
    """
    cells = [f"<th>{_text(name)}</th><td>{_text(value)}</td>" for name, value in rows.items()]
    body = "".join([f"<tr>{row}</tr>" for row in cells])
    return f"<table><caption>{_text(title)}</caption>{body}</table>"


def _text(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    cut = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
    return html.escape(cut)
