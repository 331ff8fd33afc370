import json
import re
from dataclasses import replace

from actorflow.cli.memory_map import map_memory, render_html

DATA = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)


def data_of(page):
    return json.loads(DATA.search(page)[1])


def test_the_page_carries_every_box_and_every_name(training_plan):
    (shown,) = data_of(render_html(training_plan))["maps"]
    expected = map_memory(training_plan)
    assert len(shown["boxes"]) == len(expected.boxes)
    assert [shown["strings"][row[5]] for row in shown["boxes"]] == [b.name for b in expected.boxes]
    assert sum(size for _, size in shown["parts"]) == shown["arena"]


def test_the_page_needs_nothing_beside_it(training_plan):
    page = render_html(training_plan)
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|https?://|fetch\(|import\(", page)


def test_a_name_cannot_become_markup(training_plan):
    evil = "</script><script>document.title='taken'</script>"
    registers = (replace(training_plan.registers[0], name=evil), *training_plan.registers[1:])
    plan = replace(training_plan, name=evil, registers=registers)
    page = render_html(plan)
    assert evil not in page
    assert page.count("<script") == render_html(training_plan).count("<script")
    assert data_of(page)["maps"][0]["title"] == evil


def test_two_plans_stand_side_by_side_with_captions(training_plan):
    maps = data_of(render_html(training_plan, training_plan))["maps"]
    assert [m["caption"] for m in maps] == ["with recomputation", "without recomputation"]


def test_equal_plans_give_equal_pages(training_plan):
    assert render_html(training_plan) == render_html(training_plan)
