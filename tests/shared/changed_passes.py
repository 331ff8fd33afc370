"""Other passes in the pipeline, for one test."""

from dataclasses import replace

from compiler.lowering import step_program
from compiler.lowering.destinations import ConcatElision
from compiler.pipeline import pipeline
from compiler.pipeline.unfused import UNFUSED


def change_passes(monkeypatch, passes=None, **runs):
    """Let graphs go through these passes (default: as ever), some of which run something else."""
    passes = pipeline.PASSES if passes is None else passes
    changed = [replace(p, run=runs[p.name]) if p.name in runs else p for p in passes]
    monkeypatch.setattr(pipeline, "PASSES", tuple(changed))


def plan_without_fusion(monkeypatch):
    """Let plans compute each op by itself, in a launch of its own, into a dense tensor."""
    change_passes(monkeypatch, UNFUSED)
    monkeypatch.setattr(step_program, "elide_concats", _copied)


def _copied(graph, storage, drafts, chains, hardware):
    """Let launches copy what is joined: a product that writes elsewhere may be another kernel's."""
    return ConcatElision(graph, storage, drafts, tuple(chains))
