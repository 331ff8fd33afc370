"""`actorflow plan --html`: the page, looked at in a browser, and what the command says."""

import html
import json
import re
from dataclasses import replace

import pytest
from browser import look, needs_chromium, probed

from actorflow.cli.main import main
from actorflow.cli.page import scripted_page
from actorflow.cli.plan_diff import compare
from actorflow.cli.plan_page import predict, render

DATA = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
EVIL = "</script><img src=x onerror=\"document.body.dataset.taken='yes'\">\u202e\x1b[2J\ud800"


@pytest.fixture(scope="module")
def prediction(training_plan):
    return predict(training_plan, False)


@pytest.fixture(scope="module")
def page(training_plan, prediction):
    return render(training_plan, prediction)


def data_of(page):
    return json.loads(DATA.search(page)[1])


def test_the_page_has_every_actor_register_and_launch(training_plan, page):
    shown = data_of(page)
    assert [actor["name"] for actor in shown["actors"]] == [a.name for a in training_plan.actors]
    assert len(shown["registers"]["name"]) == len(training_plan.registers)
    for column in ("label", "kernel", "line", "ns", "read", "inputs"):
        assert len(shown["launches"][column]) == sum(
            [len(a.launches) for a in training_plan.actors]
        )
    first = next(a for a in training_plan.actors if a.launches).launches[0]
    strings = shown["launches"]["strings"]
    assert strings[shown["launches"]["line"][0]] == str(training_plan.sources[first.source])
    read = [training_plan.views[view].type.size_bytes for view in first.inputs]
    assert shown["launches"]["read"][0] == sum(read)


def test_the_page_needs_nothing_beside_it_and_runs_its_own_script_alone(page):
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|https?://(?!www.w3.org/2000/svg)", page)
    assert "default-src 'none'" in page
    assert "script-src 'sha256-" in page


def test_firings_of_the_timeline_follow_the_simulation(training_plan, prediction):
    names = [actor.name for actor in training_plan.actors]
    step = [row for row in prediction.rows if names[row[0]] == "step"]
    assert [row[1] for row in step] == list(range(prediction.steps))
    assert all(end - start == round(prediction.firing_ns[names.index("step")])
               for _, _, start, end in step)  # fmt: skip
    ends = {}
    for actor, _, start, end in sorted(prediction.rows, key=lambda row: row[2]):
        stream = training_plan.actors[actor].stream
        assert start >= ends.get(stream, 0), "a stream executes one firing at a time"
        ends[stream] = end


SELECT = """
const bars = [];
const stroke = TimelineView.prototype.highlight;
TimelineView.prototype.highlight = function (...all) {
  bars.push(all[1]);
  stroke.apply(this, all);
};
const answer = {};
THEN
answer.bars = new Set(bars).size;
answer.marked = views[0].marked.size;
answer.selected = document.body.dataset.selected;
answer.actors = document.querySelectorAll(".actor.marked").length;
answer.row = document.querySelector(".launches .chosen")?.textContent || "";
answer.panel = panel.textContent;
Object.assign(document.body.dataset, answer);
"""

BY_ACTOR = """
const box = [...document.querySelectorAll(".actor")].find(a => a.textContent.startsWith("step"));
box.focus();
box.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
answer.open = document.querySelectorAll(".chain[open]").length;
"""
BY_LAUNCH = """
document.querySelector(".chain summary").click();
chains[0].fold.open = true;
chains[0].draw(9);
chains[0].rows[3].click();
"""
BY_TENSOR = """
views[0].address.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
views[0].address.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
"""
BY_BAR = """
const at = rows.findIndex(row => actors[row[0]].name === "step");
timeline.at = at - 1;
timeline.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
timeline.canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
"""


@needs_chromium
@pytest.mark.parametrize("by", [BY_ACTOR, BY_LAUNCH, BY_TENSOR, BY_BAR],
                         ids=["actor", "launch", "tensor", "bar"])  # fmt: skip
def test_a_selection_in_one_picture_marks_the_others(training_plan, page, tmp_path, by):
    seen = look(probed(page, SELECT.replace("THEN", by)), tmp_path)
    state = seen.state
    assert seen.console == ()
    assert state["state"] == "drawn"
    step = next(a for a in training_plan.actors if a.name == "step")
    kind, index = state["selected"].split()
    assert int(state["bars"]) >= 1
    assert int(state["actors"]) >= 1
    if by is BY_LAUNCH:
        launch = step.launches[3]
        views = (*launch.inputs, *launch.outputs)
        registers = {training_plan.views[v].register for v in views} | (
            {training_plan.views[launch.workspace].register} if launch.workspace else set()
        )
        assert (kind, int(state["marked"])) == ("launch", len(registers))
        for text in (launch.label, str(training_plan.sources[launch.source])):
            assert text in html.unescape(state["row"])
            assert text in html.unescape(state["panel"])
    elif by is BY_TENSOR:
        name = training_plan.registers[int(index)].name
        assert (kind, state["marked"]) == ("register", "1")
        assert html.unescape(state["panel"]).startswith(name)
    else:
        assert (kind, int(index)) == ("actor", step.id)
        assert int(state["marked"]) > len(step.launches) / 2


NARROW = """
document.querySelectorAll("details").forEach(fold => { fold.open = true; });
select({ kind: "launch", index: 3 });
const page = document.documentElement;
const facts = { width: innerWidth, shown: page.clientWidth, needed: page.scrollWidth };
parent.postMessage({ ...facts, ...document.body.dataset }, "*");
"""


@needs_chromium
def test_a_page_of_hostile_names_is_text_and_fits_a_narrow_screen(
    training_plan, prediction, tmp_path
):
    actors = [
        replace(a, name=EVIL + a.name, launches=tuple(
            [replace(x, scope=EVIL * 9, kernel=EVIL, op=EVIL) for x in a.launches]))
        for a in training_plan.actors
    ]  # fmt: skip
    registers = [replace(r, name=EVIL + r.name, reason=EVIL) for r in training_plan.registers]
    plan = replace(
        training_plan,
        name=EVIL,
        actors=tuple(actors),
        registers=tuple(registers),
        sources=tuple([replace(line, file=EVIL) for line in training_plan.sources]),
        streams=tuple([replace(stream, name=EVIL) for stream in training_plan.streams]),
    )
    hostile = render(plan, prediction, diff=compare(training_plan, plan, (1.0, 2.0)))
    assert hostile.count("<script") == 2
    seen = look(probed(hostile, NARROW), tmp_path, width=420)
    assert seen.console == ()
    assert "taken" not in seen.state
    assert seen.state["state"] == "drawn"
    assert seen.state["width"] == "420"
    assert seen.state["needed"] == seen.state["shown"], "nothing lies beyond the right edge"


LABELS = """
const isShown = text => getComputedStyle(text).display !== "none";
const labels = [...document.querySelectorAll(".edge")].map(edge =>
  [...edge.querySelectorAll("text")].filter(isShown).map(text => text.getBBox()));
const rects = [...document.querySelectorAll(".actor rect")].map(rect => [rect.getBBox()]);
const hit = (a, b) => a.x + 2 < b.x + b.width && b.x + 2 < a.x + a.width
  && a.y + 2 < b.y + b.height && b.y + 2 < a.y + a.height;
const meets = (some, others) => some.some(a => others.some(b => hit(a, b)));
Object.assign(document.body.dataset, {
  edges: labels.length,
  labels: labels.filter(texts => texts.length).length,
  hidden: labels.filter((texts, i) =>
    [...labels.slice(i + 1), ...rects].some(others => meets(texts, others))).length,
});
"""


@needs_chromium
def test_labels_of_crowded_edges_hide_neither_one_another_nor_actors(page, tmp_path):
    data = data_of(page)
    actors = data["actors"] = data["actors"][:4]
    pairs = [(i, j) for j in range(len(actors)) for i in range(j)]
    for number, actor in enumerate(actors):
        actor["stream"] = 0
        actor["outputs"] = [[r, 1] for r, (i, _) in enumerate(pairs) if i == number]
        actor["inputs"] = [[r, 1] for r, (_, j) in enumerate(pairs) if j == number]
    scripts = "page.js", "plan_graph.js", "plan_timeline.js", "plan_page.js"
    crowded = scripted_page(data | {"rows": []}, *scripts)
    seen = look(probed(crowded, LABELS), tmp_path)
    assert seen.console == ()
    assert (seen.state["edges"], seen.state["hidden"]) == (str(len(pairs)), "0")
    assert int(seen.state["labels"]) >= len(actors) - 1, "edges between neighbours have theirs"


@needs_chromium
def test_of_a_large_plan_the_rows_near_a_selection_are_drawn(training_plan, prediction, tmp_path):
    step = next(a for a in training_plan.actors if a.name == "step")
    times = 1 + 10_000 // len(step.launches)
    actors = [replace(a, launches=a.launches * times) if a is step else a
              for a in training_plan.actors]  # fmt: skip
    plan = replace(training_plan, actors=tuple(actors))
    script = "document.body.dataset.folded = document.querySelectorAll('.launches > div').length;"
    script += "select({ kind: 'launch', index: 9000 });" + (
        "document.body.dataset.rows = document.querySelectorAll('.launches > div').length;"
        "document.body.dataset.chosen = document.querySelectorAll('.launches .chosen').length;"
    )
    seen = look(probed(render(plan, predict(plan, False)), script), tmp_path)
    assert seen.console == ()
    assert seen.state["folded"] == "0"
    assert seen.state["rows"] == "500"
    assert seen.state["chosen"] == "1"


@pytest.fixture(scope="module")
def files(training_plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    training_plan.save(folder / "a.plan")
    replace(training_plan, name="other").save(folder / "b.plan")
    return folder


def test_the_command_writes_a_page_and_says_so(files, tmp_path, capsys):
    out = tmp_path / "seite\udcff.html"
    assert main(["plan", str(files / "a.plan"), "--no-calibrate", "--html", str(out)]) == 0
    assert "page of the plan in " in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")


def test_two_plans_of_different_jobs_are_compared_on_a_page(files, tmp_path, capsys):
    out = tmp_path / "page.html"
    plans = [str(files / "a.plan"), str(files / "b.plan"), "--no-calibrate"]
    assert main(["plan", *plans, "--html", str(out)]) == 0
    assert "job ~ name: name train -> other" in capsys.readouterr().out
    assert data_of(out.read_text())["changes"] == [
        ["changed", "job", "name", "name train -> other", -1]
    ]
    assert main(["plan", *plans, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["is_equal"]
    assert found["changes"][0]["after"] == {"name": "other"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["a.plan", "--html", "nowhere/page.html"], "nowhere: no such directory"),
        (["a.plan", "--html", "page.txt"], "expected a file that ends in .html, came .txt"),
        (["a.plan", "--html", "folder.html"], "folder.html: is a directory"),
        (["a.plan", "none.plan"], "none.plan: No such file"),
        (["a.plan", "notes.txt"], "notes.txt is not"),
        (["a.plan", "train.py"], "came the script train.py"),
        (["a.plan", "b.plan", "--save", "c.plan"], "--save is for one plan"),
        (["a.plan", "b.plan", "--rank", "0"], "--rank is for one plan"),
        (["empty.py", "--html", "page.html"], "ended without calling fit"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(files, monkeypatch, capsys, words, error):
    monkeypatch.chdir(files)
    monkeypatch.setattr("sys.argv", ["actorflow"])
    (files / "folder.html").mkdir(exist_ok=True)
    (files / "notes.txt").write_text("no plan")
    (files / "empty.py").write_text("")
    assert main(["plan", *words, "--no-calibrate"]) == 1
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1
    assert not (files / "page.html").exists()
