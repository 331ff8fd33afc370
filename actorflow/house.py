"""Make sure that the wings are ours before anything is imported: their names are generic."""

from __future__ import annotations

import importlib.util
from pathlib import Path

WINGS = ("memory", "compiler", "actors")


def check_house() -> None:
    """Raise ImportError naming the foreign file when a wing resolves to another package."""
    home = Path(__file__).resolve().parents[1]
    for wing in WINGS:
        found = importlib.util.find_spec(wing)
        places = [] if found is None else list(found.submodule_search_locations or [])
        if any(Path(place).resolve() == home / wing for place in places[:1]):
            continue
        foreign = "nothing" if found is None else (found.origin or ", ".join(places))
        raise ImportError(
            f"actorflow needs its own package {wing!r} at {home / wing}, but Python finds"
            f" {foreign}. Rename or move that file, or put {home} before its folder on sys.path"
        )
