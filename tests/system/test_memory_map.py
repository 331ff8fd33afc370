"""The memory map, looked at in a real browser."""

import html
import os
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from jobs import GPT

import actorflow as af
from actorflow.cli.memory_map import COLOURS, BoxKind, map_memory, render_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to look at it with"),
    pytest.mark.host("the counts are those of one arena"),
]

SCREEN = (1400, 1000)
EVIL = "</script><script>document.body.dataset.taken='yes'</script><b>&"

PROBE = """
<script>
for (const view of views) {
  const box = view.map.boxes[INDEX], area = view.address.getBoundingClientRect();
  const [x, y, w, h] = view.rectangle(box);
  const at = { clientX: area.left + x + w / 2, clientY: area.top + y + h / 2 };
  view.address.dispatchEvent(new MouseEvent("mousemove", at));
}
</script></body>
"""


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


def compiled(**options):
    job = af.job(loss, optimizer=af.optim.AdamW(1e-3), **options)
    model = GPT(64, seq=32, width=32, layers=2, heads=4)
    return job.compile(model, af.data.Tokens(np.arange(5000) % 64, seq=32, batch=8), every="5s")


@pytest.fixture
def browse(tmp_path):
    """Open a page in the browser and return what it answers to `options`."""

    def run(page, *options):
        path = tmp_path / "map.html"
        path.write_text(page, encoding="utf-8")
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={SCREEN[0]},{SCREEN[1]}", *options, f"file://{path}",
            ],
            env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def state_of(dom):
    return dict(re.findall(r'data-(\w+)="([^"]*)"', re.search(r"<body[^>]*>", dom)[0]))


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
    page = render_html(plan).replace("</body>", PROBE.replace("INDEX", str(index)))
    dom = browse(page, "--dump-dom")
    assert state_of(dom) == {"state": "drawn", "boxes": str(len(shown.boxes))}
    box = shown.boxes[index]
    (told,) = details_of(dom)
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
    dom = browse(render_html(replace(plan, name=EVIL, registers=tuple(registers))), "--dump-dom")
    assert state_of(dom)["state"] == "drawn"
    assert "taken" not in state_of(dom)
    assert f"Memory map of plan {EVIL}" in html.unescape(re.search(r"<h1>(.*?)</h1>", dom)[1])


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
    dom = browse(render_html(many), "--dump-dom")
    assert state_of(dom)["state"] == "drawn"
    assert int(state_of(dom)["boxes"]) > 10_000
