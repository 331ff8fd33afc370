"""The names inside a run directory. Only names that match in full are ever touched.

A final name `step-<10 digits>` means: complete and durable. Everything in the making or on its way
out has a hidden name with a unique attempt in it, so that two lives of a run never meet in one
directory.
"""

from __future__ import annotations

import re
import uuid

MAX_STEP = 10**10 - 1
LOCK_NAME = ".lock"
MANIFEST_NAME = "manifest.json"

_STEP = re.compile(r"step-([0-9]{10})\Z")
_ASIDE = re.compile(r"\.aside-step-([0-9]{10})-[0-9a-f]{32}\Z")
_LEFTOVER = re.compile(r"\.(tmp|trash-step)-[0-9]{10}-[0-9a-f]{32}\Z")


def new_attempt() -> str:
    """Return a fresh 32-digit hexadecimal id for one attempt at saving."""
    return uuid.uuid4().hex


def step_name(step: int) -> str:
    """Return the final name of a checkpoint; sorts like the step."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """Return the step of a final name, None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def aside_step_of(name: str) -> int | None:
    """Return the step of a version set aside, None for any other name."""
    match = _ASIDE.match(name)
    return int(match[1]) if match else None


def any_step_of(name: str) -> int:
    """Return the step of a final name or of a version set aside, -1 for any other name."""
    match = _STEP.match(name) or _ASIDE.match(name)
    return int(match[1]) if match else -1


def is_leftover(name: str) -> bool:
    """Whether `name` is unfinished or discarded work, which a lock holder may delete."""
    return _LEFTOVER.match(name) is not None


def tmp_name(step: int, attempt: str) -> str:
    """Return the name under which a checkpoint is written."""
    return f".tmp-{step:010d}-{attempt}"


def aside_name(step: int, attempt: str) -> str:
    """Return the name of a version that is about to be replaced."""
    return f".aside-{step_name(step)}-{attempt}"


def trash_name(step: int, attempt: str) -> str:
    """Return the name of a version that is about to be deleted."""
    return f".trash-{step_name(step)}-{attempt}"
