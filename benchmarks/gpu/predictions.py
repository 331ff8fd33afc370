"""What is expected of each number on an H200, written down before there was any.

A number's name is its section and its metric. Ranges come from what was read of an H200 elsewhere,
from arithmetic, or from our own simulator; the reason says which. A miss is no failure: it is what
there is to learn.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """A number by section and metric, the least and the most expected, and why."""

    name: str
    low: float
    high: float
    why: str


def _of(section: str, *rows: tuple[str, float, float, str]) -> tuple[Prediction, ...]:
    return tuple([Prediction(f"{section}/{name}", *rest) for name, *rest in rows])


PREDICTIONS: tuple[Prediction, ...] = (
    *_of(
        "texts",
        ("compile_s", 3, 30, "90 texts, one to two seconds each on a busy core, in 16 threads"),
        ("most_registers", 64, 168, "128 by NVRTC 13.0"),
        ("spilled_bytes", 0, 0, "nothing spills"),
    ),
    *_of(
        "rates",
        ("narrow_rates 16", 0.84, 1.02, "as a copy: 16 bytes of a thread at once"),
        ("narrow_rates 2", 0.35, 0.81, "plans took it for half, which was a guess"),
    ),
    *_of(
        "ceilings",
        ("product_tflops", 760, 800, "769 to 798 were read for 8192^3 in bf16 on random data"),
        ("copy_tb_s", 4.1, 4.4, "4.3 TB/s were read, bytes read and written counted"),
        ("launch_us", 2.5, 6, "2.5 to 4 for a bare launch, and our call of Python around it"),
        ("record_us", 0.5, 1.5, "a call of cupy's low level, 20 ns beside CUDA's own microsecond"),
        ("wait_us", 0.5, 1.5, "as a record"),
        ("graph_1000_launch_us", 5, 60, "nodes are not looked at by the host when a graph is put"),
        ("graph_node_us", 0.8, 1.8, "1.2 to 1.6 for kernels that do nothing"),
        ("graph_1500_make_ms", 3, 80, "capture of 2 us a call, then tens of ms"),
        ("event_gap_us", 2, 8, "between graphs on two streams that an event joins"),
    ),
    *_of(
        "copies",
        ("in_gb_s", 45, 58, "PCIe 5 x16 gives 63, less its packets"),
        ("out_gb_s", 45, 58, "as in"),
        ("both_gb_s", 70, 110, "two engines; the host's memory may be less than twice one"),
        ("beside_compute", 0.99, 1.03, "copies take 0.1 of 4.8 TB/s of the GPU's memory"),
    ),
    *_of(
        "products",
        ("gpt2-b64_best_tflops", 640, 790, "the wide ones of 65,536 rows come near the ceiling"),
        ("gpt2-b64_worst_tflops", 150, 600, "768 x 768 moves 300 MB for 77 GFLOP"),
        ("gpt2-b64_product_ms", 80, 140, "planned 83, 49 TFLOP at the ceiling"),
        ("gpt2-b64_attention_ms", 9, 180, "planned 9 by cuDNN; composed 75, 8,000 kernels"),
        ("gpt2-b64_all_ms", 105, 330, "planned 106; 171 without cuDNN"),
        ("gpt2-b64_of_plan", 0.95, 1.8, "launches measured alone, by what the plan takes them for"),
    ),
    *_of(
        "ours",
        ("tiny_steps_s", 500, 1500, "1.1 ms simulated: 505 kernels, 1.4 us each and their work"),
        ("gpt2-b1_tokens_s", 90e3, 200e3, "5.1 ms simulated, 1,500 kernels"),
        ("gpt2-b8_tokens_s", 170e3, 350e3, "23.3 ms simulated, all products at the ceiling"),
        ("gpt2-b64_tokens_s", 200e3, 620e3, "106 ms simulated; 171 without cuDNN"),
        ("bert-base_texts_s", 2000, 4800, "13.8 ms simulated, all products at the ceiling"),
        ("gpt2-b64_of_simulated", 0.95, 1.9, "as the launches, one by one"),
        ("gpt2-b64_of_planned_bytes", 0.98, 1.15, "the arena, and graphs of 9,000 nodes beside it"),
        ("gpt2-b64_host_us", 20, 300, "a dozen calls of ten microseconds a step, no waits in it"),
        ("gpt2-b64_calls", 8, 16, "14 calls of the dispatcher on the emulated driver"),
        ("loader", 0.98, 1.03, "copies in run beside steps"),
    ),
    *_of(
        "rivals",
        ("tiny_steps_s", 40, 200, "1,200 kernels at 5 to 10 us of the host"),
        ("gpt2-b1_tokens_s", 25e3, 90e3, "1,500 kernels at 5 to 10 us of the host"),
        ("gpt2-b8_tokens_s", 180e3, 330e3, "about to be bound by the GPU"),
        ("gpt2-b64_tokens_s", 280e3, 450e3, "375,000 to 475,000 were published for an H100"),
        ("tiny_default_steps_s", 150, 700, "few kernels, but a launch each"),
        ("tiny_reduce-overhead_steps_s", 400, 2500, "a graph, and the optimizer outside of it"),
        ("gpt2-b1_reduce-overhead_tokens_s", 80e3, 220e3, "a graph, the optimizer outside of it"),
        ("gpt2-b64_default_tokens_s", 420e3, 560e3, "480,000 to 540,000 expected of it"),
    ),
)  # fmt: skip
