"""`actorflow serve RUNS`: the pages of `actorflow report` live, from a server for this user alone.

It listens on 127.0.0.1, answers GET and HEAD, and reads: nothing is written or started. What it
answers is in `live_pages`; here is what keeps a client from doing harm: a connection that says or
reads nothing ends after some seconds, every connection after a minute, and there are few at a time.
"""

from __future__ import annotations

import argparse
import io
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from actorflow.cli.live_pages import POLICY, LivePages, PageReply, RunIndex
from actorflow.environment.settings import logger
from compiler.contract.errors import ActorflowError, CompileError

_ADDRESS = "127.0.0.1"
_PORT = 8431
_MOST_CONNECTIONS = 32
_MOST_HEAD_BYTES = 128 << 10
"""More than one line may have (64 KiB): the first line has an answer of its own."""
_SILENT_S = 10.0
_CONNECTION_S = 60.0
_HEADERS = (
    ("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow serve`."""
    parser.add_argument(
        "directory", nargs="?", default="runs", metavar="RUNS", help="folder of runs (default runs)"
    )
    text = f"port on {_ADDRESS} (default {_PORT}; 0: a free one)"
    parser.add_argument("--port", type=int, default=_PORT, metavar="P", help=text)


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C, which ends it at once; return the exit code.

    Raises CompileError for a port that means nothing, ActorflowError for one that cannot be had,
    and OSError without the folder.
    """
    if not 0 <= options.port < 1 << 16:
        raise CompileError(f"--port: expected a number from 0 to 65535, came {options.port}")
    count = len(RunIndex(options.directory).rows())
    try:
        with PageServer(options.directory, options.port) as server:
            noun = "run" if count == 1 else "runs"
            print(f"{count} {noun} in {options.directory}; open {server.address}", flush=True)
            print("Ctrl-C ends it", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        return 130
    return 0


class PageServer(ThreadingMixIn, TCPServer):
    """The server of one folder of runs, with a token of its own.

    Args:
        directory: of the runs.
        port: on 127.0.0.1; 0 for a free one.
        clock: seconds, monotonic.

    Raises:
        ActorflowError: the port cannot be had.
    """

    daemon_threads = True
    block_on_close = False  # Ctrl-C waits for nobody
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, directory: str, port: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._due_s: dict[Any, float] = {}
        try:
            super().__init__((_ADDRESS, port), PageHandler)
        except OSError as error:
            raise ActorflowError(
                f"--port {port}: {_ADDRESS}:{port} cannot be had ({error.strerror}); name another,"
                " or --port 0 for one that is free"
            ) from None
        self.port: int = self.server_address[1]
        self._token = secrets.token_urlsafe(32)
        self.pages = LivePages(directory, self._token, f"actorflow-{self.port}")

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{_ADDRESS}:{self.port}/?token={self._token}"

    @property
    def num_connections(self) -> int:
        """How many connections are open."""
        return len(self._due_s)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own; close at once where there are too many."""
        if self.num_connections >= _MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._due_s[request] = self._clock() + _CONNECTION_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._due_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what is open for too long, such as a client that sends a letter now and then."""
        super().service_actions()
        now_s = self._clock()
        for request, due_s in list(self._due_s.items()):
            if now_s > due_s:
                with suppress(OSError):  # its thread, which waits for it, wakes up and closes it
                    request.shutdown(socket.SHUT_RDWR)


class _Head(io.BufferedReader):
    """What a client sends; of a head http.server bounds each line and their number, not the sum."""

    num_bytes = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line. Raises LineTooLong, which is answered, past the bound."""
        line = super().readline(size)
        self.num_bytes += len(line)
        if self.num_bytes > _MOST_HEAD_BYTES:
            raise LineTooLong("header line")
        return line


class PageHandler(BaseHTTPRequestHandler):
    """One connection: it has one request."""

    server: PageServer
    timeout = _SILENT_S
    server_version, sys_version = "actorflow", ""
    # A line that is no request is answered as one: with headers.
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        """Bound what is read."""
        super().setup()
        self.rfile = _Head(self.rfile.detach())

    def handle(self) -> None:
        """Answer; a client that has gone or does not read is nobody's trouble."""
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """Send a page."""
        try:
            reply = self.server.pages.reply_to(self.path, self.headers)
        except Exception:  # a page that cannot be made must not end the server
            logger.exception("a page cannot be made; please report this")
            reply = PageReply(500, "500: the page cannot be made; the terminal says why\n")
        self._send(reply)

    do_HEAD = do_GET  # noqa: N815  # the same

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error that http.server found; nothing of what came is repeated."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else code
        allow = (("Allow", "GET, HEAD"),) if status != code else ()
        self._send(
            PageReply(status, f"{int(status)}: {HTTPStatus(status).phrase}\n", headers=allow)
        )

    def _send(self, reply: PageReply) -> None:
        body = reply.text.encode("utf-8", "backslashreplace")
        self.send_response(reply.status)
        length = ("Content-Length", str(len(body)))
        for header in (*_HEADERS, ("Content-Type", reply.content_type), length, *reply.headers):
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # http.server's name
        """Say nothing: what a client sends is not for a terminal."""
