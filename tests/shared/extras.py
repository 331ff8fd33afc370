"""Extras of the package, by what is installed of them."""

import re
from importlib.metadata import PackageNotFoundError, requires, version


def missing(extra):
    """Return the packages of an extra that are not installed. Raises LookupError for no extra."""
    named = [
        line.partition(";")[0] for line in requires("actorflow") if f'extra == "{extra}"' in line
    ]
    if not named:
        raise LookupError(f"pyproject.toml has no extra {extra!r}")
    return [name for name in map(_name, named) if not _is_installed(name)]


def _name(requirement):
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0]


def _is_installed(name):
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
