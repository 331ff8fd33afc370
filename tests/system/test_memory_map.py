"""The memory map, looked at in a real browser."""

import html
import re
from dataclasses import replace

import numpy as np
import pytest
from browser import SCREEN, look, needs_chromium, probed
from jobs import GPT

import actorflow as af
from actorflow.cli.memory_map import COLOURS, BoxKind, map_memory, render_html

pytestmark = [
    needs_chromium,
    pytest.mark.host("the counts are those of one arena"),
]

EVIL = "</script><script>document.body.dataset.taken='yes'</script><b>&"

PROBE = """
for (const view of views) {
  const box = view.map.boxes[INDEX], area = view.address.getBoundingClientRect();
  const [x, y, w, h] = view.rectangle(box);
  const at = { clientX: area.left + x + w / 2, clientY: area.top + y + h / 2 };
  view.address.dispatchEvent(new MouseEvent("mousemove", at));
}
"""


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


def compiled(**options):
    job = af.job(loss, optimizer=af.optim.AdamW(1e-3), **options)
    model = GPT(64, seq=32, width=32, layers=2, heads=4)
    return job.compile(model, af.data.Tokens(np.arange(5000) % 64, seq=32, batch=8), every="5s")


@pytest.fixture
def browse(tmp_path):
    """Open a page in the browser and return what it is then."""
    return lambda page, *options: look(page, tmp_path, *options)


def details_of(dom):
    panels = re.findall(r'<div class="details">(.*?)</div></div>', dom, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", " ", panel)) for panel in panels]


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "streams": 2}])
def test_the_scripts_of_the_page_run_and_pointing_at_a_box_tells_who_it_is(browse, options):
    plan = compiled(**options)
    shown = map_memory(plan)
    index = max(
        [i for i, box in enumerate(shown.boxes) if box.writer is not None],
        key=lambda i: shown.boxes[i].size_bytes * (shown.boxes[i].end - shown.boxes[i].begin),
    )
    seen = browse(probed(render_html(plan), PROBE.replace("INDEX", str(index))))
    assert seen.console == ()
    assert seen.state == {"state": "drawn", "boxes": str(len(shown.boxes))}
    box = shown.boxes[index]
    (told,) = details_of(seen.dom)
    for word in (
        box.name,
        box.kind.value[0],
        f"({box.size_bytes:,} B)",
        f"offset {box.offset_bytes:,} B",
        f"[{box.begin}, {box.end})",
        f"launch {box.writer}",
        "jobs.py:",
    ):
        assert word in told


def test_the_browser_shows_names_of_the_user_as_text(browse):
    plan = compiled()
    registers = [r if r.name != "staging" else replace(r, name=EVIL) for r in plan.registers]
    seen = browse(render_html(replace(plan, name=EVIL, registers=tuple(registers))))
    assert seen.state["state"] == "drawn"
    assert "taken" not in seen.state
    heading = re.search(r"<h1>(.*?)</h1>", seen.dom)[1]
    assert f"Memory map of plan {EVIL}" in html.unescape(heading)


def test_what_the_browser_draws_has_the_colours_of_what_is_in_the_plan(browse, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: extra cli")
    browse(render_html(compiled()), f"--screenshot={tmp_path / 'map.png'}")
    pixels = np.asarray(image.open(tmp_path / "map.png").convert("RGB"))
    assert pixels.shape == (SCREEN[1], SCREEN[0], 3)
    # Left of the list, below the legend of the phases: the map itself.
    seen, counts = np.unique(pixels[140:760, 90:1000].reshape(-1, 3), axis=0, return_counts=True)
    area = {tuple(colour): count for colour, count in zip(seen.tolist(), counts, strict=True)}
    for kind in (BoxKind.PARAMETER, BoxKind.OPTIMIZER, BoxKind.STAGING, BoxKind.ACTIVATION):
        colour = tuple(int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
        assert area.get(colour, 0) > 1000, kind


def test_a_page_of_over_ten_thousand_boxes_is_drawn(browse):
    plan = compiled()
    times = 1 + 10_000 // len(plan.registers)
    many = replace(plan, registers=plan.registers * times)
    state = browse(render_html(many)).state
    assert state["state"] == "drawn"
    assert int(state["boxes"]) > 10_000
