"""The site of docs/: every page has its place, every link its end, and all of it is local."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import actorflow as af
from actorflow.options.job_options import JobOptions
from actorflow.options.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
READ = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NAMED = {"www.w3.org"}
"""Hosts in the theme's scripts that are names of formats, and are not asked for anything."""


def without_code(text):
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return the ids that a page's headings get, on GitHub and on the site."""
    plain = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", plain, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_nav():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = re.findall(r"([\w/]+\.md)$", nav, flags=re.MULTILINE)
    assert len(pages) == len({*pages})
    made = {page for page in pages if page.startswith("api/")} | {"errors.md"}
    assert {*pages} - made == {path.name for path in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_on_a_page_lead_to_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        path, _, anchor = unquote(link).partition("#")
        target = page.parent / path if path else page
        if urlsplit(link).scheme:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.fixture(scope="module")
def error_texts():
    spec = importlib.util.spec_from_file_location("texts", DOCS / "site" / "error_texts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_has_each_remedy_once_and_can_be_read(error_texts):
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", error_texts.errors_page(), re.MULTILINE)
    rows = [row for row in rows if row[0] != "error"]
    assert 200 < len(rows) < 600
    table = (error_texts.TABLES / "actorflow-options.txt").read_text()
    for kind, text, remedy in error_texts.remedies(table):
        assert f"    {kind}: " in table
        assert f"; {remedy}" in " ".join(table.split())
        assert (kind, error_texts.shown(text), error_texts.shown(remedy)) in rows


def test_a_hostile_text_is_shown_as_text(error_texts):
    hostile = "a |b| <script>x</script> [l](u) *_` \\ {{ {: onclick=x }"
    shown = error_texts.shown(hostile)
    assert not set("|<>[]*_`\\{}") & set(shown)
    assert re.sub(r"&#(\d+);", lambda m: chr(int(m[1])), shown) == hostile
    assert len(error_texts.shown("x" * 10_000)) < 300


class Page(HTMLParser):
    """What a page loads, and where its links lead."""

    def __init__(self, path):
        super().__init__()
        self.loaded, self.links = [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif attrs.get(LOADED.get(tag)) and attrs.get("rel") not in ("next", "prev", "canonical"):
            self.loaded.append(attrs[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.extra("docs")
@pytest.mark.timeout(600)
def test_the_site_loads_nothing_from_elsewhere_and_its_links_end_in_it(site):
    for path in site.rglob("*.html"):
        page = Page(path)
        assert [url for url in page.loaded if urlsplit(url).netloc] == [], path
        local = [urlsplit(url) for url in (*page.links, *page.loaded)]
        named = [unquote(url.path) for url in local if url.path and not url.scheme]
        if path.name != "404.html":  # its paths are those of a server
            assert [name for name in named if not (path.parent / name).exists()] == [], path
    for path in site.rglob("*.css"):
        sheet = path.read_text()
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet), path
    for path in site.rglob("assets/javascripts/*.js"):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert {*re.findall(r"https?://([\w.-]+\.\w+)", code)} <= NAMED, path


@pytest.mark.extra("docs")
@pytest.mark.timeout(600)
def test_the_reference_has_every_public_name(site):
    pages = "".join([path.read_text() for path in (site / "api").glob("*.html")])
    shown = {*re.findall(r"<h[12] [^>]*>\s*(af\.[\w.]+)\s*<", pages)}
    assert [name for name in af.__all__ if f"af.{name}" not in shown] == []
    assert {f"af.nn.{n}" for n in ("Linear", "Module")} | {"af.optim.AdamW"} <= shown
    prose = re.sub(r"<(script|pre|code)\b.*?</\1>", "", pages, flags=re.DOTALL)
    assert re.findall(r".{20}\\[*\[<&].{20}", prose) == []
    for options in (RunSpec, JobOptions):  # of `fit` and of `job`, which code puts together
        assert [f.name for f in fields(options) if f.init and f">{f.name}<" not in pages] == []
