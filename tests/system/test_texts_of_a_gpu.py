"""The programs of a small GPT in float32: each compiles for three architectures, without spills.

Those of GPT-2 in bfloat16, and what they use: tests/benchmarks/gpu/test_usage_gpt2.py.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
from program_texts import texts_of

import actorflow as af
from actorflow import nn
from actors.kernels.cuda import nvrtc
from compiler.contract.types import DType, TensorType


class SmallGpt(nn.Module):
    """A GPT-2 in small: a text serves every shape."""

    def __init__(self, width=64, seq=32, vocab=50_304):
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = [nn.TransformerBlock(width, heads=2, causal=True) for _ in range(2)]
        self.norm = nn.LayerNorm(width)

    def __call__(self, ids):
        x = self.emb(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.emb.weight.T


def programs_of():
    """Return every program of a training step, and those of its regions."""

    @af.job(device="cuda", gpu="h200", optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    ids = TensorType(DType.INT64, (8, 32))
    found = {}
    for actor in train.compile(SmallGpt(), {"x": ids, "y": ids}).actors:
        for launch in actor.launches:
            attrs = dict(launch.attrs)
            region = attrs.get("region")
            steps = () if region is None else region.steps
            for program in (attrs.get("program"), *[step.program for step in steps]):
                if program is not None:
                    found[program] = None
    return tuple(found)


@pytest.mark.cuda
def test_programs_of_a_gpt_compile_for_three_architectures_without_spills():
    if not nvrtc.is_here():
        pytest.skip("NVRTC is not installed: it comes with actorflow[cuda]")
    programs = programs_of()
    assert 8 <= len(programs) <= 30
    texts = [text for program in programs for text in texts_of(program, is_cut=False)]
    with ThreadPoolExecutor(4) as pool:
        for arch in ("sm_80", "sm_90a", "sm_100"):
            used = pool.map(functools.partial(nvrtc.usage, arch=arch), texts)
            for text, kernels in zip(texts, used, strict=True):
                assert sorted(kernels) == sorted(text.kernels)
                for kernel in kernels.values():
                    assert (kernel.spilled_bytes, kernel.registers <= 128) == (0, True), text.about
