"""`actorflow serve` over sockets: what clients get, and that none keeps it from serving others."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from browser import look_at, needs_chromium

from actorflow.cli.live_pages import PageReply
from actorflow.cli.main import main
from actorflow.cli.serve import PageServer
from actorflow.run.status import ActorStatus, Status


class FakeClock:
    """A clock that stands until it is set."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def server(tmp_path, clock):
    (tmp_path / "runs").mkdir()
    with PageServer(str(tmp_path / "runs"), 0, clock) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, method="GET", target=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    token = f"/?{urlsplit(server.address).query}"
    connection.request(method, target or token, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def cookie_of(server):
    reply, _ = ask(server)
    return reply.headers["Set-Cookie"].partition(";")[0]


def raw(server, content):
    """Send bytes, end the sending, and return all that comes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(content)
        client.shutdown(socket.SHUT_WR)
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_a_browser_gets_the_cookie_and_then_the_list_under_a_strict_policy(server):
    reply, body = ask(server, target="/", Cookie=cookie_of(server))
    assert (reply.status, b"No runs yet" in body) == (200, True)
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert reply.headers["Cache-Control"] == "no-store"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in reply.headers
    assert int(reply.headers["Content-Length"]) == len(body)


def test_a_head_is_that_of_the_page(server):
    cookie = cookie_of(server)
    _, body = ask(server, target="/", Cookie=cookie)
    head, nothing = ask(server, "HEAD", "/", Cookie=cookie)
    assert (head.status, nothing) == (200, b"")
    assert head.headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "x"])
def test_only_get_and_head_are_answered(server, method):
    reply, _ = ask(server, method, "/", Cookie=cookie_of(server))
    assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n", 400),  # TLS
        (b"<script>alert(1)</script>\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + (b"a: " + b"b" * 60_000 + b"\r\n") * 3, 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: \xff=\x80\r\n\r\n", 403),
    ],
)
def test_garbage_is_refused_and_not_repeated(server, sent, status):
    reply = raw(server, sent)
    assert re.match(rb"HTTP/1\.0 (\d+) ", reply).group(1) == str(status).encode()
    assert b"Content-Security-Policy" in reply
    assert b"script>" not in reply
    assert ask(server)[0].status == 200


def test_a_client_that_says_nothing_is_closed(server):
    assert raw(server, b"") == b""
    assert raw(server, b"\n" * 3) == b""


def test_a_client_that_stalls_is_ended_after_a_time_and_others_are_served_meanwhile(server, clock):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert ask(server)[0].status == 200  # so the one before was accepted
        clock.now_s = 61.0
        assert client.recv(1) == b""
    assert ask(server)[0].status == 200


class LargePage:
    """Pages of more bytes than the system holds for a reader."""

    def reply_to(self, target, headers):
        return PageReply(200, "x" * (64 << 20))


def test_a_client_that_never_reads_is_ended_after_a_time(server, clock):
    pages, server.pages = server.pages, LargePage()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        first = client.recv(1)  # so the page is being sent
        server.pages = pages
        assert ask(server)[0].status == 200
        clock.now_s = 61.0
        count = len(first)
        while part := client.recv(1 << 20):
            count += len(part)
            server.service_actions()
    assert count < 64 << 20
    assert ask(server)[0].status == 200


def test_of_too_many_connections_the_last_is_closed_at_once(server, clock):
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(32)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as another:
        assert another.recv(1) == b""
    assert server.num_connections == 32
    clock.now_s = 61.0
    for client in clients:
        assert client.recv(1) == b""
        client.close()


def test_a_port_that_is_taken_is_named(server, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "runs"), "--port", str(server.port)]) == 1
    error = capsys.readouterr().err
    assert f"127.0.0.1:{server.port} cannot be had" in error
    assert "--port 0" in error


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_means_nothing_is_refused(tmp_path, capsys, port):
    assert main(["serve", str(tmp_path), "--port", port]) == 1
    assert f"expected a number from 0 to 65535, came {port}" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "gone")]) == 1
    assert "gone: no such directory" in capsys.readouterr().err


def test_control_c_ends_it_at_once_with_a_client_that_waits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "actorflow", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        told = child.stdout.readline()
        address = urlsplit(re.search(r"http://\S+", told).group())
        assert told.startswith("0 runs in ")
        with socket.create_connection((address.hostname, address.port), timeout=30) as client:
            client.sendall(b"GET /")
            with socket.create_connection((address.hostname, address.port), timeout=30) as other:
                other.sendall(f"GET /?{address.query} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                assert other.recv(12) == b"HTTP/1.0 200"
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
        assert child.stderr.read() == ""


def test_a_browser_that_goes_away_is_nobodys_trouble(server, capfd):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET ")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert ask(server)[0].status == 200
    assert capfd.readouterr().err == ""


STATUS = Status(
    job="train", pid=1, host="elsewhere", state="finished", written_at_s=1e9, elapsed_s=1.0,
    step=3, total_steps=3, steps_per_s=None, loss=1e-5, arena_bytes=1024,
    actors=(ActorStatus("step", "compute", 3, 0.5, 1.0, {"self": 3}),), streams={"compute": 0.5},
)  # fmt: skip


class GrowingRuns:
    """Pages of runs that change after each reply; the script of a page has a second one behind."""

    def __init__(self, pages, folder, script):
        self.pages, self.folder, self.script = pages, folder, script
        self.write("a", "damaged")

    def write(self, name, content):
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "status.json").write_text(content)

    def reply_to(self, target, headers):
        reply = self.pages.reply_to(target, headers)
        if target == "/refresh.js":
            return replace(reply, text=reply.text + self.script)
        if "token" not in target:
            for name in ("<i>", "a", "b"):
                self.write(name, STATUS.to_json().decode())
        return reply


REFRESHED = """
const title = document.querySelector("h1"), facts = document.body.dataset;
facts.before = document.body.textContent.includes("finished");
(SETUP);
new MutationObserver(() => {
  if (!document.body.textContent.includes("finished")) return;
  facts.title = title === document.querySelector("h1");
  facts.open = [...document.querySelectorAll("details[open]")].map((fold) =>
    fold.firstChild.textContent);
  facts.chosen = [...document.querySelectorAll(":checked[name=run]")].map((box) => box.value);
  facts.boxes = document.querySelectorAll("[name=run]").length;
}).observe(document.body, { childList: true, subtree: true, characterData: true });
"""
CHOOSE = "document.querySelector('[value=a]').checked = true"
UNFOLD = """[...document.querySelectorAll("details")].find((fold) =>
  fold.textContent.startsWith("Checkpoints")).open = true"""


@needs_chromium
@pytest.mark.parametrize(
    ("query", "setup", "expected"),
    [
        ("", CHOOSE, {"chosen": "a", "boxes": "3", "open": ""}),
        ("&run=a", UNFOLD, {"chosen": "", "boxes": "0", "open": "Checkpoints"}),
    ],
    ids=["list", "run"],
)
def test_a_page_follows_its_runs_and_keeps_what_the_reader_did(
    server, tmp_path, query, setup, expected
):
    server.pages = GrowingRuns(server.pages, tmp_path / "runs", REFRESHED.replace("SETUP", setup))
    # Time in the browser is virtual: it goes on while nothing is loaded.
    seen = look_at(server.address + query, tmp_path, "--virtual-time-budget=12000", "--dump-dom")
    assert seen.console == ()
    assert seen.state == {"before": "false", "title": "true", **expected}
    assert "&lt;i&gt;" in seen.dom or query


GONE = """
const facts = document.body.dataset, news = document.getElementById("news");
window.fetch = FETCH;
new MutationObserver(() => { facts.news ??= news.textContent; }).observe(news, { childList: true });
"""


@needs_chromium
@pytest.mark.parametrize(
    ("fetch", "news"),
    [
        ("() => Promise.reject(new TypeError())", "No answer: the server has ended"),
        ("async () => new Response('403: <i>', { status: 403 })", "403: &lt;i&gt;"),
    ],
    ids=["ended", "another server"],
)
def test_a_page_without_its_server_says_so_and_stays(server, tmp_path, fetch, news):
    script = GONE.replace("FETCH", fetch)
    server.pages = GrowingRuns(server.pages, tmp_path / "runs", script)
    seen = look_at(server.address, tmp_path, "--virtual-time-budget=12000", "--dump-dom")
    assert seen.state["news"].startswith(news)
    assert ">unknown</td>" in seen.dom
