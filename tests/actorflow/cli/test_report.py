"""`actorflow report`: runs as one page without scripts, whatever is in their folders."""

import base64
import io
import json
import math
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from browser import look, needs_chromium, probed
from hypothesis import given
from hypothesis import strategies as st

import actorflow as af
from actorflow import nn
from actorflow.callbacks.samples import SAMPLES_FILE
from actorflow.cli.charts import Curve, chart, condensed, labelled, smoothed, ticks
from actorflow.cli.main import main
from actorflow.cli.report_page import RunReader, page_of
from actorflow.cli.runs import run_row
from actorflow.cli.samples_page import png_of
from compiler.contract.plan import Plan
from memory.report import format_bytes

STYLE = resources.files("actorflow.cli").joinpath("page.css").read_text()
VOID = {"meta", "br"}


@pytest.fixture
def run(tmp_path):
    """The folder of a run of three steps."""

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x).mean()

    data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)
    folder = tmp_path / "first"
    train.fit(nn.Linear(2, 1), data, steps=3, every=1, checkpoint=folder, progress=False)
    return folder


class Outline(HTMLParser):
    """The tags of a page, which have to be closed in order, and its text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def written(folder, rows):
    (folder / "metrics.jsonl").write_text("".join([json.dumps(row) + "\n" for row in rows]))


def page(*runs, smooth=2.0):
    return page_of([RunReader(folder).read() for folder in runs], smooth)


def test_a_page_shows_curves_results_starts_and_checkpoints(run, tmp_path, capsys):
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    outline = Outline((tmp_path / "page.html").read_text())
    text = " ".join(outline.texts)
    for expected in ("first", "finished", "step 3 of 3", "loss", "last loss", "train", "Starts"):
        assert expected in text
    labels = [attrs.get("aria-label") for tag, attrs in outline.tags if tag == "svg"]
    assert "loss over steps" in labels
    steps = [data for data in outline.texts if data in ("1", "2", "3")]
    assert steps, "checkpoints are listed"
    arena = Plan.load(run / "job.plan").arenas[0]
    assert f"arena host:0: {format_bytes(arena.size_bytes)}" in text
    for name in ("steps/s", "range of loss", "waited for last", "Streams"):
        assert name in text
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0  # a report: again


def test_a_file_that_is_no_report_is_not_replaced(run, tmp_path, capsys):
    other = tmp_path / "notes.html"
    other.write_text("mine")
    assert main(["report", str(run), "--out", str(other)]) == 1
    assert "is there and is no report" in capsys.readouterr().err
    assert other.read_text() == "mine"
    assert main(["report", str(run), "--smooth", "900"]) == 1
    assert main(["report", str(tmp_path / "gone")]) == 1


def test_a_page_needs_nothing_beside_it_and_runs_nothing(run):
    shown = page(run, run)
    assert not re.search(r"<script|\bsrc\s*=|\bhref\s*=|url\(|@import|https?://|\son\w+\s*=", shown)
    assert "default-src 'none'" in shown


EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[2J"


def test_names_from_a_hostile_run_are_text(run, tmp_path):
    values = json.loads((run / "run.json").read_text())
    values |= {"job": EVIL, "options": {EVIL: EVIL}, "data": EVIL}
    values["starts"][0] |= {"command": ["x", EVIL], "host": EVIL, "git_commit": EVIL}
    (run / "run.json").write_text(json.dumps(values))
    written(run, [{"step": n, EVIL: float(n)} for n in range(5)])
    hostile = run.rename(tmp_path / "<b>bold")
    shown = page(hostile)
    tags = {tag for tag, _ in Outline(shown).tags}
    assert tags.isdisjoint({"script", "img", "b"})
    assert "\x1b" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize(
    "text", ["", "{", "[1]\n{}\n", '{"step": "x", "loss": 1}\n' * 3, "\0" * 99]
)
def test_a_run_that_is_empty_damaged_or_still_running_is_shown_as_far_as_it_goes(run, text):
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running", "pid": 2**22 - 3}))
    (run / "metrics.jsonl").write_text(text)
    shown = " ".join(Outline(page(run)).texts)
    assert "killed" in shown
    assert "No metrics." in shown
    for name in ("metrics.jsonl", "run.json", "status.json"):
        (run / name).unlink()
        shown = " ".join(Outline(page(run)).texts)
        assert "first" in shown
    assert "it has no metrics yet" in shown


def test_values_that_are_not_finite_are_left_out(run):
    losses = [1.0, math.nan, 2.0, math.inf]
    written(run, [{"step": n, "loss": str(v) if v != v else v} for n, v in enumerate(losses)])
    assert page(run)
    assert [s.mean for s in condensed(list(enumerate(losses)), 10)] == [1.0, 2.0]
    assert chart("x", [Curve("a", 0, ())], 0) == "<p>x: no finite value</p>"


@pytest.mark.parametrize(
    "losses",
    [[0.0, 5e-324], [-1.7e308, 1.7e308], [1e300, -1e300], [10**400, 1.0], [1e17, 1e17 + 16]],
    ids=["tiny", "huge", "largest", "integer", "equal"],
)
def test_extreme_values_are_shown_or_left_out(run, losses):
    written(run, [{"step": n, "loss": v} for n, v in enumerate(losses)])
    assert "loss" in page(run)
    written(run, [{"step": v, "loss": 1.0} for v in losses])
    assert "loss" in page(run)


@given(st.lists(st.tuples(*[st.floats(allow_nan=False)] * 2), min_size=1, max_size=9))
def test_a_chart_has_no_number_that_is_not_finite(points):
    drawn = chart("x", [Curve("a", 0, condensed(sorted(points), 400))], 2)
    assert not re.search(r"\b(nan|inf)\b", drawn)


def test_ranks_are_shown_with_their_hosts_and_the_one_that_is_behind(run):
    status = json.loads((run / "status.json").read_text())
    ranks = [{"host": "<nodeA>", "waiting_share": 0.4}, {"host": "nodeB", "waiting_share": 0.0}]
    (run / "status.json").write_text(json.dumps(status | {"by_rank": ranks, "rank_behind": 1}))
    texts = Outline(page(run)).texts
    place = texts.index("<nodeA>")
    assert texts[place - 1 : place + 5] == ["0", "<nodeA>", "40%", "1", "nodeB", "0%"]
    assert texts[place + 5] == "the others wait for it"


@pytest.mark.parametrize("content", [b"", b"\x00" * 99, None])
def test_a_plan_that_cannot_be_read_is_named(run, content):
    (run / "job.plan").unlink()
    if content is not None:
        (run / "job.plan").write_bytes(content)
    assert "job.plan cannot be read" in " ".join(Outline(page(run)).texts)


def test_a_run_that_says_nothing_of_itself_differs_in_nothing(run, tmp_path):
    others = [Path(shutil.copytree(run, tmp_path / name)) for name in ("second", "third")]
    values = json.loads((run / "run.json").read_text())
    (others[0] / "run.json").write_text(json.dumps(values | {"starts": []}))
    (others[1] / "run.json").write_text(json.dumps(values | {"data_fingerprint": "another"}))

    def differing(*runs):
        shown = page(*runs).partition("<h2>What differs</h2>")[2].partition("<details>")[0]
        return [data for data in Outline(shown).texts if data in ("job", "data fingerprint")]

    assert differing(run, others[0]) == []
    assert differing(run, *others) == ["data fingerprint"]
    assert "last loss" in page(others[0])


def test_the_folder_of_the_shell_has_a_name(run, monkeypatch):
    monkeypatch.chdir(run)
    assert run_row(Path(".")).name == run.name


def test_the_size_of_a_page_has_a_bound_whatever_the_length_of_the_run(run):
    rng = np.random.default_rng(0)
    for count in (3_000, 12_000):
        rows = [
            {"step": n} | {f"m{k}": v for k, v in enumerate(rng.normal(size=20).tolist())}
            for n in range(count)
        ]
        written(run, rows)
        size = len(page(run))
        assert size < 2_000_000
    assert size == pytest.approx(len(page(run, smooth=0)), rel=0.05)


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200),
    st.integers(1, 50),
)
def test_a_condensed_curve_keeps_extremes_mean_and_the_last_step(values, most):
    stretches = condensed(list(enumerate(values)), most)
    assert len(stretches) <= most
    assert min(s.low for s in stretches) == min(values)
    assert max(s.high for s in stretches) == max(values)
    assert stretches[-1].step == len(values) - 1
    if len(stretches) == 1:
        assert stretches[0].mean == pytest.approx(math.fsum(values) / len(values), abs=1e-3)


@given(st.integers(1, 60), st.integers(0, 80), st.floats(-5, 5), st.floats(-5, 5))
def test_smoothing_leaves_straight_lines_and_both_ends_where_they_are(count, reach, base, slope):
    line = [base + slope * n for n in range(count)]
    assert smoothed(line, reach) == pytest.approx(line, abs=1e-9)
    rng = np.random.default_rng(count)
    values = rng.normal(size=count).tolist()
    smooth = smoothed(values, reach)
    assert (smooth[0], smooth[-1]) == pytest.approx((values[0], values[-1]))
    expected = [
        np.mean(values[i - w : i + w + 1])
        for i, w in enumerate([min(reach, i, count - 1 - i) for i in range(count)])
    ]
    assert smooth == pytest.approx(expected, abs=1e-12)


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_round_numbers_between_the_bounds(low, gap):
    high = low + gap
    if high <= low:
        return
    found = ticks(low, high)
    assert len(found) <= 20
    assert all(low - 1e-6 * gap <= tick <= high + 1e-6 * gap for tick in found)


def said(label):
    factor = {"G": 1e9, "M": 1e6, "k": 1e3}.get(label[-1])
    return float(label) if factor is None else float(label[:-1]) * factor


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_labels_of_ticks_say_which_tick_each_is(low, gap):
    shown = labelled(ticks(low, low + gap)) if gap > 1e-12 * abs(low) else []
    for value, label in shown:
        assert abs(said(label) - value) < 0.1 * gap
        assert len(label) <= 22
    if gap > 1e-11 * abs(low):
        assert len({label for _, label in shown}) == len(shown)


def test_a_step_is_a_whole_number_on_the_axis():
    root = ET.fromstring(chart("one", [Curve("x", 0, condensed([(120, 1.0)], 9))], 3))
    labels = [text.text for text in root.iter("text") if text.attrib["class"] == "x"]
    assert labels == ["115", "120", "125", "step"]


def test_the_last_values_have_no_chart_beside_their_means(run):
    rows = [{"step": n, "loss": 1.0, "loss_last": 2.0, "lr_last": 3.0} for n in range(3)]
    written(run, rows)
    outline = Outline(page(run))
    labels = [attrs["aria-label"] for tag, attrs in outline.tags if tag == "svg"]
    assert labels == ["loss over steps", "lr_last over steps"]
    texts = outline.texts
    assert texts[texts.index("last loss") + 1] == "2", "as in lists of runs, which have no mean"
    assert texts[texts.index("range of loss") + 1] == "1 to 1"
    assert "last loss_last" not in texts


def test_a_long_line_of_the_plan_is_shown_whole(run):
    plan = Plan.load(run / "job.plan")
    step = next(actor for actor in plan.actors if actor.name == "step")
    longer = [replace(step, name="x" * 190) if actor is step else actor for actor in plan.actors]
    replace(plan, actors=tuple(longer)).save(run / "job.plan")
    text = " ".join(Outline(page(run)).texts)
    assert "x" * 190 + " batch -> " in text
    assert f"stream {plan.streams[step.stream].name}, {len(step.launches)} launch" in text


def test_a_chart_is_well_formed_and_its_points_lie_inside():
    points = tuple(condensed([(n, math.sin(n / 9)) for n in range(300)], 100))
    root = ET.fromstring(chart('a & "b" <c>', [Curve("x", 0, points), Curve("y", 9, points)], 3))
    width, height = [float(v) for v in root.attrib["viewBox"].split()[2:]]
    paths = [path.attrib["d"] for path in root.iter("path")]
    numbers = [[float(v) for v in re.findall(r"-?[\d.]+", path)] for path in paths]
    for values in numbers:
        assert all(0 <= v <= max(width, height) for v in values)
    assert sum("band" in path.attrib["class"] for path in root.iter("path")) == 2
    one = ET.fromstring(chart("one", [Curve("x", 0, points[:1])], 3))
    assert [p.attrib["d"] for p in one.iter("path")][-1].endswith("h0")


def luminance(colour):
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join([d * 2 for d in digits])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Return the contrast of two colours (WCAG 2.2)."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("place", [0, 1], ids=["light", "dark"])
def test_text_and_lines_can_be_seen_on_the_paper(place):
    colours = dict(
        re.findall(r"--(\w+): (#\w+);", re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[place])
    )
    for ground in ("paper", "wash", "mark"):
        for name in ("ink", "soft", "peak"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for number in range(8):
        assert contrast(colours[f"c{number}"], colours["paper"]) >= 4.5
    assert contrast(colours["c1"], colours["wash"]) >= 4.5, "the word that marks what changed"


def test_what_is_drawn_is_told_as_json(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(page)
    (row,) = told["runs"]
    assert (row["run"], row["state"], row["problems"]) == ("first", "finished", [])
    assert "loss" in row["metrics"]
    assert row["checkpoints"] == 3


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_the_png_that_another_library_reads(channels):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: extra cli")
    pixels = np.random.default_rng(0).integers(0, 256, (9, 5, channels), np.uint8)
    read = np.asarray(image.open(io.BytesIO(png_of(pixels)))).reshape(pixels.shape)
    assert (read == pixels).all()


@pytest.fixture
def trained(tmp_path):
    """The folder of a run with samples."""

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return model(batch.x).mean()

    data = af.data.ArraySource({"x": np.ones((8, 2), np.float32)}, batch=4)
    photos = np.random.default_rng(0).integers(0, 256, (9, 6, 4, 3), np.uint8)
    batch = {"photo": photos, EVIL: photos, "words": [EVIL] * 9}
    callbacks = [af.callbacks.ReportSamples(batch, count=4)]
    train.fit(
        nn.Linear(2, 1), data, steps=3, checkpoint=tmp_path / "run", callbacks=callbacks,
        progress=False,
    )  # fmt: skip
    return tmp_path / "run"


def test_the_page_of_a_run_has_its_samples_and_nothing_of_them_is_markup(trained):
    shown = page(trained)
    outline = Outline(shown)
    assert "Samples after step 0" in outline.texts
    images = [attrs for tag, attrs in outline.tags if tag == "img"]
    assert len(images) == 4 * 2
    assert images[0]["alt"] == "photo of row 0"
    assert all(one["src"].startswith("data:image/png;base64,") for one in images)
    assert all(set(one) == {"alt", "src"} for one in images)
    assert "script" not in {tag for tag, _ in outline.tags}
    assert "default-src 'none'" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sets": 1}', '{"sets": [{"step": -1}]}'])
def test_a_damaged_file_is_a_line_of_the_page(trained, text):
    (trained / SAMPLES_FILE).write_text(text)
    shown = " ".join(Outline(page(trained)).texts)
    assert f"{SAMPLES_FILE} cannot be read: it is damaged or of another version" in shown
    assert "Samples after" not in shown


@pytest.mark.parametrize("change", [
    {"pixels": "<script>"}, {"pixels": base64.b64encode(b"abc").decode()}, {"shape": []},
    {"shape": [6, 4, 2]}, {"shape": [6, 4]}, {"name": EVIL, "pixels": EVIL},
])  # fmt: skip
def test_pixels_that_are_not_as_they_say_are_left_out(trained, change):
    content = json.loads((trained / SAMPLES_FILE).read_text())
    content["sets"][0]["rows"] = [[content["sets"][0]["rows"][0][0] | change]]
    (trained / SAMPLES_FILE).write_text(json.dumps(content))
    tags = {tag for tag, _ in Outline(page(trained)).tags}
    assert tags.isdisjoint({"img", "script"})


NARROW = """
const root = document.documentElement, image = document.querySelector("img");
parent.postMessage({ shown: root.clientWidth, needed: root.scrollWidth,
  drawn: image.complete && image.naturalWidth }, "*");
"""


@needs_chromium
def test_a_narrow_page_shows_the_images_and_does_not_scroll_sideways(trained, tmp_path):
    looked_at = page(trained).replace("img-src data:", "img-src data:; script-src ", 1)
    seen = look(probed(looked_at, NARROW), tmp_path, width=420)
    assert seen.state["shown"] == seen.state["needed"] == "420"
    assert seen.state["drawn"] == "4"
    assert not seen.console
