"""Blocks, chunks and buckets of a few bytes, so that small tensors are cut into many."""

from actors.kernels.common import attention_blocks, strides
from actors.kernels.library import launch
from compiler.budget import offload, search


def cut_small(monkeypatch, *, block_bytes, chunk_bytes):
    """Let numpy's kernels have blocks, and launches of C chunks, of so many bytes."""
    monkeypatch.setattr(strides, "BLOCK_BYTES", block_bytes)
    for name in ("CHUNK_BYTES", "RUN_BYTES", "CACHED_BYTES"):
        monkeypatch.setattr(launch, name, chunk_bytes)


def cut_attention(monkeypatch, **sizes):
    """Let attention cut rows and columns by other `STRIPS` and `CHUNKS`, heads by `GROUP_BYTES`."""
    for name, size in sizes.items():
        monkeypatch.setattr(attention_blocks, name, size)


def offload_small(monkeypatch, *, activation_bytes, bucket_bytes):
    """Let activations, and buckets of variables, of so many bytes be worth a copy to the host."""
    monkeypatch.setattr(search, "MIN_ACTIVATION_BYTES", activation_bytes)
    monkeypatch.setattr(offload, "MIN_BUCKET_BYTES", bucket_bytes)
