"""Replies of `actorflow serve`: who gets one, and what of a folder of runs can be seen."""

import json
import os
import re
import shutil
from email.message import Message
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.cli.live_pages import LivePages, RunIndex
from compiler.contract.errors import CompileError

TOKEN = "a-token"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three steps, to be copied."""

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x).mean()

    data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)
    folder = tmp_path_factory.mktemp("run") / "finished"
    train.fit(nn.Linear(2, 1), data, steps=3, every=1, checkpoint=folder, progress=False)
    return folder


@pytest.fixture
def runs(finished, tmp_path):
    """A folder of two runs, and of things that are none."""
    for name in ("a", "b"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "link").symlink_to(finished)
    shutil.copytree(finished, tmp_path / "secret")
    return tmp_path / "runs"


@pytest.fixture
def pages(runs):
    return LivePages(str(runs), TOKEN, "actorflow-1")


def headers(**named):
    message = Message()
    for name, value in {
        "Host": "127.0.0.1:8431",
        "Cookie": f"actorflow-1={TOKEN}",
        **named,
    }.items():
        if value is not None:
            message[name] = value
    return message


def get(pages, target="/", **named):
    return pages.reply_to(target, headers(**named))


def names_of(reply):
    """The names of runs that a list links to, as bytes."""
    return [unquote_to_bytes(link) for link in re.findall(r'href="/\?run=([^"&]+)"', reply.text)]


def test_the_list_names_the_runs_and_each_has_a_page(pages):
    listing = get(pages)
    assert (listing.status, sorted(names_of(listing))) == (200, [b"a", b"b"])
    assert "3 of 3" in listing.text
    one, both = get(pages, "/?run=a"), get(pages, "/?run=a&run=b&run=a")
    assert one.text.count("<figure>") == both.text.count("<figure>") > 0
    assert "<h1>a</h1>" in one.text
    assert "<h1>a, b</h1>" in both.text
    for page in (listing, one):
        assert page.text.count("<script") == page.text.count('<script src="/refresh.js"></script>')
    assert "fetch(location.href" in get(pages, "/refresh.js").text


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "127.0.0.1.evil.example:8431", "127.0.0.1@evil", "localhost:x"],
)
def test_a_name_that_is_not_this_machines_is_refused_whatever_the_token(pages, host):
    assert get(pages, f"/?token={TOKEN}", Host=host).status == 403
    both = headers()
    both["Host"] = "evil.example"
    assert pages.reply_to("/", both).status == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1"])
def test_a_forwarded_port_has_another_number(pages, host):
    assert get(pages, Host=host).status == 200


@pytest.mark.parametrize(
    "cookie",
    [None, "", "actorflow-1=", "actorflow-2=a-token", "a-token", "actorflow-1=a-tokeN", ";;=;"],
)
@pytest.mark.parametrize(
    "target", ["/", "/refresh.js", "/nothing", "/?run=a", "/?token=", "/?token=x"]
)
def test_without_the_token_there_is_nothing_to_see(pages, cookie, target):
    reply = get(pages, target, Cookie=cookie)
    assert (reply.status, reply.headers) == (403, ())
    assert "runs" not in reply.text


def test_a_wrong_token_in_the_address_is_not_saved_by_a_cookie(pages):
    assert get(pages, "/?token=%ff%00é").status == 403
    assert get(pages, f"/?token=x&token={TOKEN}").status == 200


def test_the_token_in_the_address_becomes_a_cookie_and_the_page_goes_on_without_it(pages):
    reply = get(pages, f'/?run=a%26"<&token={TOKEN}', Cookie=None)
    assert reply.headers == (
        ("Set-Cookie", f"actorflow-1={TOKEN}; Path=/; HttpOnly; SameSite=Strict"),
    )
    assert re.findall(r'url=([^"]+)"', reply.text) == ["/?run=a%26%22%3C"]
    assert TOKEN not in reply.text


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "..%2fsecret",
        "%2e%2e/secret",
        "/etc",
        "link",
        "notes",
        "a/",
        "a/.",
        ".",
        "",
        "A",
    ],
)
def test_names_are_those_of_the_list_and_never_paths(pages, name):
    reply = get(pages, f"/?run=a&run={name}")
    assert reply.status == 404
    assert "<figure>" not in reply.text


@pytest.mark.parametrize(
    "target", ["/a", "/..", "/a/job.plan", "//", "http://x/", "*", "/../secret"]
)
def test_there_are_no_other_addresses(pages, target):
    assert get(pages, target).status == 404
    assert get(pages, "/?" + "run=a&" * 99).status == 400


HOSTILE = [
    b"<img src=x onerror=alert(1)>", b'" onload="x', b"a&run=b", b"%2e%2e", b"\xff\xfe",
    b"two\nlines", "\u202ereversed".encode(), b"a b+c", b"#", b"__BODY__",
]  # fmt: skip


def test_any_name_of_a_folder_is_text_and_has_its_page(finished, tmp_path):
    for number, name in enumerate(HOSTILE):
        shutil.copytree(finished, tmp_path / "runs" / os.fsdecode(name))
        status = tmp_path / "runs" / os.fsdecode(name) / "status.json"
        status.write_text(json.dumps(json.loads(status.read_text()) | {"step": 100 + number}))
    pages = LivePages(str(tmp_path / "runs"), TOKEN, "actorflow-1")
    listing = get(pages)
    assert sorted(names_of(listing)) == sorted(HOSTILE)
    assert "\u202e" not in listing.text
    for link in re.findall(r'href="(/\?run=[^"]+)"', listing.text):
        page = get(pages, link)
        number = HOSTILE.index(unquote_to_bytes(link.removeprefix("/?run=")))
        assert f"step {100 + number} of 3" in page.text
        for text in (page.text, listing.text):
            assert text.count("<script") == 1
            assert "<img" not in text
            assert text.count("onload=") == text.count("&quot; onload=")


def test_only_what_has_changed_is_read_again(runs):
    index = RunIndex(str(runs))
    first = {name: row for name, (_, row) in index.rows().items()}
    (runs / "a" / "status.json").write_text("{")
    second = {name: row for name, (_, row) in index.rows().items()}
    assert second["b"] is first["b"]
    assert "damaged" in second["a"].problem
    shutil.rmtree(runs / "b")
    assert list(index.rows()) == ["a"]


def test_a_page_follows_a_run_that_is_written(pages, runs):
    before = get(pages, "/?run=a").text
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "fresh": 1.5}\n')
    status = json.loads((runs / "a" / "status.json").read_text()) | {"step": 4, "state": "running"}
    (runs / "a" / "status.json").write_text(json.dumps(status))
    after = get(pages, "/?run=a").text
    assert ("last fresh" in before, "last fresh" in after) == (False, True)
    assert "step 4 of 3" in get(pages).text + after


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl", "job.plan"])
@pytest.mark.parametrize("way", ["gone", "damaged", "link", "pipe"])
def test_a_run_that_is_damaged_is_shown_as_far_as_it_goes(pages, runs, name, way):
    path = runs / "a" / name
    path.unlink()
    if way == "damaged":
        path.write_bytes(b"\x00{")
    elif way == "link":
        path.symlink_to("/etc/passwd")
    elif way == "pipe":
        os.mkfifo(path)
    assert sorted(names_of(get(pages))) == [b"a", b"b"]
    assert get(pages, "/?run=a&run=b").status == 200


def test_a_folder_that_goes_and_comes_is_named_and_then_shown(pages, runs):
    aside = runs.rename(runs.with_name("aside"))
    reply = get(pages)
    assert (reply.status, "no such directory" in reply.text) == (503, True)
    runs.mkdir()
    assert "No runs yet" in get(pages).text
    (runs / "c").mkdir()
    shutil.copytree(aside / "a", runs / "d")
    assert names_of(get(pages)) == [b"d"]


def test_a_folder_that_is_a_run_has_one(runs, monkeypatch):
    monkeypatch.chdir(runs / "a")
    assert list(RunIndex(".").rows()) == ["a"]
    assert get(LivePages(".", TOKEN, "actorflow-1"), "/?run=a").status == 200


def test_a_folder_of_too_many_things_is_refused(tmp_path):
    for number in range(10_001):
        Path(tmp_path, str(number)).touch()
    with pytest.raises(CompileError, match="more than 10,000"):
        RunIndex(str(tmp_path)).rows()
