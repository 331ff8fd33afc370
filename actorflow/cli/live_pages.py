"""What `actorflow serve` answers: the list of runs, and pages of one or several, as they stand now.

Here is no socket: a request's target and headers go in, a reply comes out. A reply is given to
whoever has the token of this server, in the address that was printed or in a cookie. The `Host`
must be this machine by a local name, for a page from elsewhere can make its own name lead here.
Names of runs are looked up among those that are there, and are never made a path.
"""

from __future__ import annotations

import hmac
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qsl, quote, urlencode

from actorflow.cli.page import WITH_IMAGES, cells, file_text, static_page, table, text
from actorflow.cli.report_page import RunReader, body_of, progress_text, title_of
from actorflow.cli.runs import FileStamps, RunRow, run_folders, run_row, stamps_of, time_text
from actorflow.run.progress import number_text
from actorflow.run.run_record import RECORD_FILE
from actorflow.run.status import STATUS_FILE
from compiler.contract.errors import ActorflowError

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self';"
    f" form-action 'self'; base-uri 'none'; {WITH_IMAGES}"
)
"""Also in the page itself, where `frame-ancestors` is not allowed."""
_HTML, _SCRIPT, _PLAIN = [f"text/{kind}; charset=utf-8" for kind in ("html", "javascript", "plain")]
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
_MOST_FIELDS = 64
_MOST_SHOWN = 1_000
"""Runs of a list, the newest."""
_MOST_READERS = 16
"""Runs whose metrics are kept in memory."""
_SMOOTH_PERCENT = 2.0
_FOOT = (
    '<footer><label><input type="checkbox" id="refresh" checked> refresh every 5 s</label>'
    ' <span id="news" role="status"></span></footer><script src="/refresh.js"></script>\n'
)


@dataclass(frozen=True, slots=True)
class PageReply:
    """An answer to GET: status, text, its type, and further headers."""

    status: int
    text: str
    content_type: str = _PLAIN
    headers: tuple[tuple[str, str], ...] = ()


class RunIndex:
    """The runs of a folder; of each, only what has changed is read again."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._rows: dict[Path, tuple[FileStamps, RunRow]] = {}

    def rows(self) -> dict[str, tuple[Path, RunRow]]:
        """Return folders and rows by the folder's own name, the newest start first.

        Raises OSError where there is no folder, CompileError where it has too many entries.
        """
        rows: dict[Path, tuple[FileStamps, RunRow]] = {}
        for folder in run_folders(self._directory):
            stamps = stamps_of(folder, RECORD_FILE, STATUS_FILE)
            before = self._rows.get(folder)
            is_same = before is not None and before[0] == stamps
            rows[folder] = before if before and is_same else (stamps, run_row(folder))
        self._rows = rows
        ordered = sorted(rows.items(), key=lambda item: -item[1][1].started_at_s)
        return {
            os.path.basename(os.path.abspath(folder)): (folder, row) for folder, (_, row) in ordered
        }


class LivePages:
    """Answers requests for the pages of one folder of runs. Any thread may ask.

    Args:
        directory: of the runs.
        token: what a reader has to show.
        cookie: the name of the cookie that holds it; cookies of all ports of a host are one.
    """

    def __init__(self, directory: str, token: str, cookie: str) -> None:
        self._directory, self._token, self._cookie = directory, token, cookie
        self._index = RunIndex(directory)
        self._readers: OrderedDict[Path, RunReader] = OrderedDict()
        self._lock = Lock()

    def reply_to(self, target: str, headers: Message) -> PageReply:
        """Answer a GET of this target, such as `/?run=a&run=b`."""
        hosts = headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return PageReply(403, "403: this server answers to 127.0.0.1 and localhost alone\n")
        path, _, query = target.partition("?")
        try:
            fields = parse_qsl(
                query, keep_blank_values=True, errors="surrogateescape", max_num_fields=_MOST_FIELDS
            )
        except ValueError:
            return PageReply(400, f"400: expected at most {_MOST_FIELDS} fields in the address\n")
        tokens = [value for name, value in fields if name == "token"]
        if not any([self._is_token(word) for word in tokens or self._cookies(headers)]):
            return PageReply(403, "403: open the address that 'actorflow serve' has printed\n")
        if tokens:
            return self._welcome([field for field in fields if field[0] != "token"])
        if path == "/refresh.js":
            return PageReply(200, file_text("refresh.js"), _SCRIPT)
        if path != "/":
            return PageReply(404, "404: there is no such page; '/' lists the runs\n")
        return self._page([value for name, value in fields if name == "run"])

    def _is_token(self, word: str) -> bool:
        return hmac.compare_digest(word.encode(errors="replace"), self._token.encode())

    def _cookies(self, headers: Message) -> list[str]:
        pairs = [
            pair.strip().partition("=")
            for line in headers.get_all("Cookie", [])
            for pair in str(line).split(";")
        ]
        return [value for name, _, value in pairs if name == self._cookie]

    def _welcome(self, fields: Sequence[tuple[str, str]]) -> PageReply:
        """Hand over the cookie, and go on to the page without the token in its address.

        A page and no redirect: after a redirect from a click elsewhere, as in a terminal that is
        itself a page, the browser would keep back a cookie that is SameSite=Strict.
        """
        place = f"/?{urlencode(fields, errors='surrogateescape')}" if fields else "/"
        link = f'<p><a href="{text(place)}">Runs</a></p>'
        go = f'<meta http-equiv="refresh" content="0; url={text(place)}">'
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        page = static_page("Runs", link, POLICY, go)
        return PageReply(200, page, _HTML, (("Set-Cookie", cookie),))

    def _page(self, names: Sequence[str]) -> PageReply:
        title, status = f"Runs in {self._directory}", 200
        with self._lock:
            try:
                rows = self._index.rows()
                unknown = [name for name in dict.fromkeys(names) if name not in rows]
                if unknown:
                    title, status = "No such run", 404
                    body = _problem(title, f"no run here is called {', '.join(unknown)}")
                elif names:
                    readers = [self._reader(rows[name][0]) for name in dict.fromkeys(names)]
                    runs = [reader.read() for reader in readers]
                    title, body = title_of(runs), _HOME + body_of(runs, _SMOOTH_PERCENT)
                else:
                    body = _listing(title, rows)
            except (ActorflowError, OSError) as error:
                why = getattr(error, "strerror", None) or str(error)
                status, body = 503, _problem(title, why)
        return PageReply(status, static_page(title, body, POLICY, _FOOT), _HTML)

    def _reader(self, folder: Path) -> RunReader:
        reader = self._readers.pop(folder, None) or RunReader(folder)
        self._readers[folder] = reader
        while len(self._readers) > _MOST_READERS:
            self._readers.popitem(last=False)
        return reader


_HOME = '<nav><a href="/">All runs</a></nav>'


def _problem(title: str, why: str) -> str:
    return f"{_HOME}<h1>{text(title)}</h1><p>{text(why)}</p>"


def _listing(title: str, rows: Mapping[str, tuple[Path, RunRow]]) -> str:
    """Return a table of runs, of which some can be chosen."""
    if not rows:
        return f"<h1>{text(title)}</h1><p>No runs yet: fit(checkpoint=...) makes one.</p>"
    names = ("compare", "run", "state", "step", "loss", "started", "job")
    lines = [_line(name, row) for name, (_, row) in [*rows.items()][:_MOST_SHOWN]]
    hidden = len(rows) - len(lines)
    more = f"<p>{hidden:,} older ones are not shown.</p>" if hidden else ""
    return (
        f'<h1>{text(title)}</h1><form action="/">{table(names, lines)}{more}'
        "<p><button>Compare the chosen runs</button></p></form>"
    )


def _line(name: str, row: RunRow) -> str:
    status, record = row.status, row.record
    facts = [
        row.state,
        progress_text(status) if status else "-",
        number_text(status.loss) if status and status.loss is not None else "-",
        time_text(row.started_at_s),
        row.problem or (record.job if record else "-"),
    ]
    label = text(row.name)
    # A form sends text alone, with its lines' ends changed: other names have their link.
    box = f'<input type="checkbox" name="run" value="{text(name)}" aria-label="compare {label}">'
    link = f'<a href="/?run={quote(os.fsencode(name), safe="")}">{label}</a>'
    is_sent = name.isprintable() and row.name == name
    return f'<tr><td>{box * is_sent}</td><th scope="row">{link}</th>{cells(facts)}</tr>'
