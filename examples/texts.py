"""Text for the examples, by character, and what a model makes of it."""

import os
import pathlib

import numpy as np

VOCAB = 128
"""Characters of ASCII."""


def read_text(path=None):
    """The ASCII bytes of a file, or of the standard library's top-level modules in sorted order."""
    if path is not None:
        files = [pathlib.Path(path)]
    else:
        files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8)


def parted(text, share=0.05):
    """Return the text without its last part, and that part, which a model does not learn from."""
    cut = round(len(text) * (1 - share))
    return text[:cut], text[cut:]


def continued(model, predict, prompt, *, seq, length, seed=0):
    """Continue `prompt` by `length` characters, each drawn from the model's distribution.

    `predict` is a job that returns the "probabilities" [1, seq, VOCAB] of the next character.
    """
    rng = np.random.default_rng(seed)
    codes = list(prompt.encode("ascii"))
    for _ in range(length):
        window = codes[-seq:]
        x = np.zeros((1, seq), np.int32)
        x[0, : len(window)] = window
        probabilities = predict.step(model, {"x": x})["probabilities"][0, len(window) - 1]
        codes.append(int(rng.choice(VOCAB, p=probabilities / probabilities.sum())))
    predict.close(model)
    return bytes(codes).decode("ascii")
