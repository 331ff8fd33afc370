"""The memory map as one HTML file that needs nothing beside it: no network, no fonts, no server.

The numbers go into the page as JSON, names once each; the page's own script draws them. A name of
the user's cannot become markup: in the JSON every `<` is an escape, and the script sets text only.
"""

from __future__ import annotations

import json
from importlib import resources

from actorflow.memory_map.layout import PHASE_COLOURS, Box, BoxKind, MemoryMap, map_memory
from compiler.plan import Plan

_KINDS = tuple(BoxKind)
_PHASES = tuple(PHASE_COLOURS)


def render_html(plan: Plan, without: Plan | None = None) -> str:
    """Return the page of a plan's memory, beside that of the plan `without` recomputation."""
    plans = [plan] if without is None else [plan, without]
    captions = [""] if without is None else ["with recomputation", "without recomputation"]
    maps = [
        _as_json(map_memory(each, arena), caption)
        for each, caption in zip(plans, captions, strict=True)
        for arena in range(len(each.arenas))
    ]
    data = {
        "kinds": [[*kind.value] for kind in _KINDS],
        "phases": [[phase.value, colour] for phase, colour in PHASE_COLOURS.items()],
        "maps": maps,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    here = resources.files("actorflow.memory_map")
    page, script = [
        here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js")
    ]
    return page.replace("__SCRIPT__", script).replace("__DATA__", text)


def _as_json(shown: MemoryMap, caption: str) -> dict[str, object]:
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    account = shown.account
    boxes = [_row(box, number(box.name)) for box in shown.boxes]
    steps = [
        [
            *(number(" + ".join(x.made_of)), number(x.scope)),
            *(number(str(shown.plan.sources[x.source])), number(actor.name)),
            _PHASES.index(x.phase),
        ]
        for actor, x in shown.steps
    ]
    return {
        "title": shown.plan.name,
        "caption": caption,
        "device": shown.device,
        "arena": account.peak_bytes,
        "bound": account.lower_bound_bytes,
        "peak": account.peak_launch,
        "live": account.peak_live_bytes,
        "text": account.text,
        "parts": [[name, size] for name, size in account.parts if size],
        "horizon": shown.horizon,
        "boxes": boxes,
        "steps": steps,
        "curve": shown.curve,
        "strings": list(strings),
    }


def _row(box: Box, name: int) -> list[int]:
    writer = -1 if box.writer is None else box.writer
    kind = _KINDS.index(box.kind)
    return [kind, box.offset_bytes, box.size_bytes, box.begin, box.end, name, writer]
