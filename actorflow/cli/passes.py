"""`actorflow passes`: every rewrite of the compiler in order, those of plugins among them."""

from __future__ import annotations

import argparse

from actorflow.compile.plugins import load_plugins


def run(options: argparse.Namespace) -> int:
    """Print the table of passes and return the exit code."""
    from compiler.added_passes import registered, with_added
    from compiler.pipeline import PASSES

    load_plugins()
    files = {added.step.name: ", ".join(added.files) for added in registered()}
    print("| pass | needs | provides | from |")
    print("|---|---|---|---|")
    for step in with_added(PASSES):
        where = files.get(step.name, "actorflow")
        needs, provides = ", ".join(step.needs) or "-", ", ".join(step.provides) or "-"
        print(f"| {step.name} | {needs} | {provides} | {where} |")
    return 0
