"""Other passes in the pipeline, for one test."""

from dataclasses import replace

from compiler.pipeline import pipeline


def change_passes(monkeypatch, passes=None, **runs):
    """Let graphs go through these passes (default: as ever), some of which run something else."""
    passes = pipeline.PASSES if passes is None else passes
    changed = [replace(p, run=runs[p.name]) if p.name in runs else p for p in passes]
    monkeypatch.setattr(pipeline, "PASSES", tuple(changed))
