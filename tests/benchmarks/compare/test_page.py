"""The page of a comparison: one file, whatever names are in it and whatever was not measured."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import date
from pathlib import Path

from benchmarks.compare.disturbance import Disturbance
from benchmarks.compare.page import bench_page
from benchmarks.compare.report import Bench, MachineInfo, Measured, RowResult, as_json

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "cpu.json"
EVIL = "</td><script>alert(1)</script>"
OURS = Measured("actorflow", "", "as is", 10.0, 5, 300.0, 100.0, 0.5, low_ms=9.0, high_ms=12.0)
JAX = Measured("jax", "jit", "donated", 15.0, 5, 600.0, 300.0, 2.0, low_ms=14.0, high_ms=20.0)


def shown(*rows):
    bench = Bench(MachineInfo(f"a processor {EVIL}", 2, {"numpy": 100.0}, {}), rows)
    return bench_page(json.loads(json.dumps(as_json(bench))), date(2026, 11, 29))


def pictures(page):
    """The lines, dots and labels of a page, in their order."""
    svgs = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page)]
    paths = [[path.attrib["d"] for path in svg.iter("path")] for svg in svgs]
    numbers = [[float(v) for d in ds[1:] for v in re.findall(r"[\d.]+", d)] for ds in paths]
    return [(svg.attrib["aria-label"], *drawn) for svg, drawn in zip(svgs, numbers, strict=True)]


def test_dots_lie_between_their_fastest_and_slowest_round_on_one_scale():
    page = shown(RowResult("gpt", "fp32", 2048, "tokens", 1e9, OURS, (JAX,), ()))
    ours, jax = pictures(page)
    assert ours[0] == "10 ms (9 to 12)"
    assert jax[0] == "15 ms (14 to 20)"
    places = [place for _, low, _, high, dot, *_ in (ours, jax) for place in (low, dot, high)]
    scale = [(place - 4) / ms for place, ms in zip(places, [9, 10, 12, 14, 15, 20], strict=True)]
    assert max(scale) - min(scale) < 0.02
    assert "2026-11-29" in page
    assert "1.50 x as fast" in page


def test_the_page_is_alone_and_names_are_text():
    row = RowResult(EVIL, EVIL, 1, "x", 0.0, OURS, (), (f"torch: {EVIL}",))
    page = shown(row, RowResult("mlp", "bf16", 128, "samples", 0.0, None, (), ("not yet",)))
    assert not re.search(r"<script|\bsrc\s*=|\bhref\s*=|url\(|@import|https?://", page)
    assert page.count("&lt;script&gt;") == 4
    assert "not yet" in page


def test_stolen_turns_and_rows_that_were_not_measured_are_named():
    ours = replace(OURS, host=Disturbance(0.051, 0.4, 0.39), num_repeated=3, num_disturbed=1)
    row = RowResult("gpt", "fp32", 1, "x", 1e9, ours, (), ())
    machine = MachineInfo("a processor", 2, {}, {}, ("no pressure is known here",))
    bench = Bench(machine, (row,), ("mlp fp32", EVIL), "stopped by SIGTERM")
    page = bench_page(as_json(bench), date(2026, 11, 29))
    assert "actorflow ran 3 turns again" in page
    assert "other processes used 39% of the cores while actorflow ran" in page
    assert "<td>5.1%, 39.0%</td>" in page
    assert "no pressure is known here" in page
    assert "Not measured (stopped by SIGTERM): mlp fp32, &lt;/td&gt;" in page


def test_results_without_ranges_and_of_other_engines_alone_are_drawn():
    page = bench_page(json.loads(RESULTS.read_text()), date(2026, 11, 21))
    assert len(pictures(page)) > 20
    assert "75% " not in page.partition("<h2>")[0]
    alone = shown(RowResult("gpt", "fp32", 1, "x", 1e9, None, (JAX,), ("actorflow: no",)))
    assert [picture[0] for picture in pictures(alone)] == ["15 ms (14 to 20)"]
    assert "x as fast" not in alone
