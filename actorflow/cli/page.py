"""The frame of a page: one file with its style, scripts and data, for any browser, without network.

All pages are page.html with the style of page.css. The security policy of a page with scripts has
their hash, so a browser runs these and no others. What a user named goes in as JSON, in which every
`<` is an escape, and the scripts set text only: a name is never markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources

from compiler.contract.codec import MOST_SHOWN, printable

NO_SCRIPTS = "default-src 'none'; style-src 'unsafe-inline'"
"""The policy of a page that loads nothing."""
WITH_IMAGES = "img-src data:"
"""What a policy has besides, of a page whose images are in it."""
MOST_OF_LINE = 10_000
"""Characters of a line about a plan, which may name many registers."""


def text(value: object, most: int = MOST_SHOWN) -> str:
    """Return any text as it may stand on a page: nothing of it is markup, nothing invisible.

    Of more than `most` characters the rest is cut.
    """
    return html.escape(printable(str(value), most))


def table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """Return a table that can be scrolled, of heads, which are any text, and rows as markup."""
    # A head without words would be read out as one.
    head = "".join(
        [f'<th scope="col">{text(cell)}</th>' if cell else "<td></td>" for cell in heads]
    )
    body = "".join(rows)
    return (
        '<div class="wide" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def cells(values: Iterable[object]) -> str:
    """Return the cells of a row, of which each is any text."""
    return "".join([f"<td>{text(value)}</td>" for value in values])


def static_page(title: str, body: str, policy: str = NO_SCRIPTS, foot: str = "") -> str:
    """Return a page around its main part, which is markup; `title` is any text."""
    return _framed(title, policy, f"<body>\n<main>\n{body}\n</main>\n{foot}</body>")


def scripted_page(data: Mapping[str, object], *scripts: str) -> str:
    """Return a page whose scripts, files beside this one, draw some data in the order given."""
    script = "\n" + "".join([file_text(name) for name in scripts])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    body = (
        '<body class="picture">\n'
        "<noscript>This page draws its picture with a script of its own; please allow it."
        f'</noscript>\n<script type="application/json" id="data">{encoded}</script>\n'
        f"<script>{script}</script>\n</body>"
    )
    return _framed("actorflow", f"{NO_SCRIPTS}; script-src 'sha256-{digest}'", body)


def _framed(title: str, policy: str, body: str) -> str:
    frame = file_text("page.html").replace("__STYLE__", file_text("page.css"))
    # The parts of others come last: what they say is not looked into again.
    head, middle, tail = re.split("__TITLE__|__BODY__", frame.replace("__POLICY__", policy))
    return "".join([head, text(title), middle, body, tail])


def numbered_strings() -> tuple[dict[str, int], Callable[[str], int]]:
    """Return a table of strings for a page's data, and what gives a string its number in it."""
    strings: dict[str, int] = {}
    return strings, lambda item: strings.setdefault(printable(item), len(strings))


def file_text(name: str) -> str:
    """Return the text of a file beside this one."""
    return resources.files("actorflow.cli").joinpath(name).read_text(encoding="utf-8")
