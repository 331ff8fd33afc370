"""Text from GPT-2 124M: tokens a second, beside torch with a cache of its own in plain torch.

    python benchmarks/bench_generate.py [--torch PYTHON] [--prompt 32] [--new 128] [--rounds 3]
        [--compile] [--layers 12]

Each engine has a process of its own, in turns, with the same weights and as many threads as there
are cores; greedy, in float32. Of a process the first text is not timed; of the further ones it
shows the tokens a second after the prompt, the median of texts and the best, and the processor time
of a token, all threads together: under `taskset -c 0` that is a comparison also on a machine that
others use, where threads that wait for each other decide what a clock shows. The tokens, and the
scores of the last one, are compared before anything is said of times. `--torch` is the Python that
has torch. `--compile` adds torch.compile of the step of one token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
VOCAB, CONTEXT, WIDTH, HEADS = 50257, 1024, 768, 12
TEXTS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default=sys.executable)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(ENGINES[args.engine](args)))
        return
    pythons = {"actorflow": sys.executable, "torch": args.torch}
    if args.compile:
        pythons["torch.compile"] = args.torch
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.npz")
        np.savez(weights, **made_weights(args.layers))
        results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in pythons}
        for _ in range(args.rounds):
            for engine, python in pythons.items():
                results[engine].append(run(engine, python, weights))
    check(results)
    for engine, each in results.items():
        rates = [rate for one in each for rate in one["rates"]]
        print(
            f"{engine:14} {statistics.median(rates):6.1f} tokens/s, best {max(rates):6.1f};"
            f" processor {min(min(one['busy_ms']) for one in each):5.1f} ms a token;"
            f" prompt {1e3 * min(one['prompt_s'] for one in each):5.0f} ms"
        )


def run(engine: str, python: str, weights: str) -> dict[str, Any]:
    """Return what an engine says of itself, from a process of its own."""
    options = [*sys.argv[1:], "--engine", engine, "--weights", weights]
    done = subprocess.run(
        [python, __file__, *options], stdout=subprocess.PIPE, check=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check(results: dict[str, list[dict[str, Any]]]) -> None:
    """End the program where engines do not write the same."""
    first = results["actorflow"][0]
    for engine, each in results.items():
        for one in each:
            if one["tokens"] != first["tokens"]:
                sys.exit(f"{engine} writes other tokens: {one['tokens']} and {first['tokens']}")
            far = max(abs(np.subtract(one["scores"], first["scores"])))
            print(f"{engine}: scores of the last token differ by {far:.1e}")


def made_weights(layers: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights by the names of the published checkpoints, drawn so that tokens vary."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int, std: float = 0.05) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, np.float32) * np.float32(std)

    made = {"wte.weight": drawn(VOCAB, WIDTH), "wpe.weight": drawn(CONTEXT, WIDTH)}
    shapes = {
        "attn.c_attn": (WIDTH, 3 * WIDTH),
        "attn.c_proj": (WIDTH, WIDTH),
        "mlp.c_fc": (WIDTH, 4 * WIDTH),
        "mlp.c_proj": (4 * WIDTH, WIDTH),
    }
    for layer in range(layers):
        for name, (inputs, outputs) in shapes.items():
            made[f"h.{layer}.{name}.weight"] = drawn(inputs, outputs)
            made[f"h.{layer}.{name}.bias"] = drawn(outputs)
        for name in ("ln_1", "ln_2"):
            made |= norm(f"h.{layer}.{name}")
    return made | norm("ln_f")


def norm(name: str) -> dict[str, np.ndarray[Any, Any]]:
    return {f"{name}.weight": np.ones(WIDTH, "f"), f"{name}.bias": np.zeros(WIDTH, "f")}


def prompt_of(args: argparse.Namespace) -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, args.prompt)]


def timed(args: argparse.Namespace, write: Any) -> dict[str, Any]:
    """Return tokens and times of texts; `write` yields tokens one by one."""
    rates: list[float] = []
    busy_ms: list[float] = []
    prompts: list[float] = []
    tokens: list[int] = []
    for _ in range(TEXTS + 1):
        begin, stamps, busy, tokens = time.perf_counter(), [], [], []
        for token in write():
            stamps.append(time.perf_counter())
            busy.append(time.process_time())
            tokens.append(int(token))
        prompts.append(stamps[0] - begin)
        # The second token may wait for what the first one of a text opens.
        count = len(stamps) - 2
        rates.append(count / (stamps[-1] - stamps[1]))
        busy_ms.append(1e3 * (busy[-1] - busy[1]) / count)
    return {
        "tokens": tokens, "rates": rates[1:], "busy_ms": busy_ms[1:], "prompt_s": min(prompts),
    }  # fmt: skip


def of_actorflow(args: argparse.Namespace) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    from models.gpt2 import GPT2

    import actorflow as af

    model = GPT2(layers=args.layers, dropout=0.0)
    model.load(dict(np.load(args.weights)))
    prompt = prompt_of(args)
    result = timed(args, lambda: (row[0] for row in model.stream([prompt], args.new)))

    @af.job(train=False)
    def scores(model: Any, batch: Any) -> Any:
        return {"scores": model.head(model.features(batch.x)[:, -1])}

    text = np.array([[*prompt, *result["tokens"][:-1]]])
    return result | {"scores": scores.step(model, {"x": text})["scores"][0].tolist()}


def of_torch(args: argparse.Namespace, *, compiled: bool = False) -> dict[str, Any]:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_grad_enabled(False)
    w = {name: torch.from_numpy(array) for name, array in np.load(args.weights).items()}
    size, layers = WIDTH // HEADS, args.layers
    room = args.prompt + args.new
    kept = [[torch.zeros(1, HEADS, room, size) for _ in "kv"] for _ in range(layers)]
    functional: Any = torch.nn.functional

    def normed(name: str, x: Any) -> Any:
        return functional.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"])

    def projected(name: str, x: Any) -> Any:
        return torch.addmm(w[f"{name}.bias"], x.view(-1, x.shape[-1]), w[f"{name}.weight"])

    def step(tokens: Any, first: int) -> Any:
        length = len(tokens)
        x = w["wte.weight"][tokens] + w["wpe.weight"][first : first + length]
        for layer in range(layers):
            h = f"h.{layer}"
            parts = projected(f"{h}.attn.c_attn", normed(f"{h}.ln_1", x))
            q, k, v = parts.view(1, length, 3, HEADS, size).permute(2, 0, 3, 1, 4)
            for cache, new in zip(kept[layer], (k, v), strict=True):
                cache[:, :, first : first + length] = new
            keys, values = [cache[:, :, : first + length] for cache in kept[layer]]
            mixed = functional.scaled_dot_product_attention(q, keys, values, is_causal=length > 1)
            x = x + projected(f"{h}.attn.c_proj", mixed.transpose(1, 2).reshape(length, WIDTH))
            inner = functional.gelu(
                projected(f"{h}.mlp.c_fc", normed(f"{h}.ln_2", x)), approximate="tanh"
            )
            x = x + projected(f"{h}.mlp.c_proj", inner)
        return functional.linear(normed("ln_f", x)[-1:], w["wte.weight"])[0]

    prompt, last = prompt_of(args), []
    one = torch.compile(step, dynamic=True) if compiled else step

    def write() -> Any:
        scores = step(torch.tensor(prompt), 0)
        for place in range(len(prompt), len(prompt) + args.new):
            last[:] = [scores]
            token = scores.argmax()
            yield token
            if place + 1 < len(prompt) + args.new:
                scores = one(token.view(1), place)

    result = timed(args, write)
    return result | {"scores": last[0].tolist()}


ENGINES = {
    "actorflow": of_actorflow,
    "torch": of_torch,
    "torch.compile": lambda args: of_torch(args, compiled=True),
}


if __name__ == "__main__":
    main()
