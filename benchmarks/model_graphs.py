"""Training steps of known models as recomputation problems (`bench_memory.py models` plans them).

Nothing is run: sizes are those of the models in 16 bits, times follow a model of one accelerator,
max(flops / 400e12, bytes / 4e12) + 2 us. Each forward op has one backward op with twice its time
and scratch, which reads what it needs and the gradient of the output, adds to the gradients of the
inputs in place, and updates the weights at once: their gradient in 32 bits is scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memory.recompute.problem import Problem, ProblemOp

FLOPS_PER_S = 400e12
BYTES_PER_S = 4e12
LAUNCH_S = 2e-6


@dataclass
class Tape:
    """Records forward ops; `problem` appends their backward ops in reverse.

    Tensors are numbered; sizes are in bytes. A tensor without a maker is part of the batch and has
    neither bytes nor a gradient.
    """

    sizes: list[int] = field(default_factory=list)
    forward: list[ProblemOp] = field(default_factory=list)
    backward: list[tuple[tuple[int, ...], tuple[int, ...], int, int, float]] = field(
        default_factory=list
    )

    def op(
        self,
        inputs: tuple[int, ...],
        *elements: int,
        need: tuple[int, ...] = (),
        need_output: bool = False,
        flops: float = 0.0,
        weight: int = 0,
        temp: int = 0,
        width: int = 2,
        in_place: bool = False,
    ) -> int:
        """Record an op; return its first output.

        The first of `elements` is the output of `width` bytes per element; the others are small
        results that its backward op reads, in 32 bits.
        """
        outputs = tuple(range(len(self.sizes), len(self.sizes) + len(elements)))
        self.sizes.extend(n * (width if k == 0 else 4) for k, n in enumerate(elements))
        moved = sum([self.sizes[t] for t in (*inputs, *outputs)]) + 2 * weight
        duration = max(flops / FLOPS_PER_S, moved / BYTES_PER_S) + LAUNCH_S
        pairs = ((outputs[0], inputs[0]),) if in_place else ()
        self.forward.append(ProblemOp(inputs, outputs, temp, duration, pairs))
        needs = (*need, *(outputs if need_output else outputs[1:]))
        self.backward.append((needs, inputs, outputs[0], 2 * temp + 4 * weight, 2 * duration))
        return outputs[0]

    def problem(self) -> Problem:
        """Return the training step of what was recorded."""
        sizes, gradient, others = list(self.sizes), {}, []
        last = len(self.backward) - 1
        for i, (needs, inputs, output, temp, duration) in reversed(list(enumerate(self.backward))):
            flowing = () if i == last else (gradient[output],)
            added, writes = [], []
            for t in inputs:
                if t in gradient:
                    added.append(gradient[t])
                else:
                    gradient[t] = len(sizes)
                    sizes.append(sizes[t])
                writes.append(gradient[t])
            reads = tuple(dict.fromkeys((*needs, *flowing, *added)))
            others.append(ProblemOp(reads, tuple(writes), temp, duration))
        ops = (*self.forward, *others)
        return Problem(ops, tuple(sizes), len(self.forward))


def resnet50(batch: int = 32, image: int = 224) -> Problem:
    """Return ResNet-50: 175 forward ops, batch norm and relu separate."""
    tape = Tape()

    def conv(x: int, cin: int, cout: int, kernel: int, side: int, has_input: bool = True) -> int:
        elements = batch * cout * side * side
        inputs = (x,) if has_input else ()
        flops = 2.0 * elements * cin * kernel * kernel
        return tape.op(
            inputs, elements, need=inputs, flops=flops, weight=cin * cout * kernel * kernel
        )

    def norm(x: int, channels: int, side: int) -> int:
        elements = batch * channels * side * side
        return tape.op((x,), elements, channels, channels, need=(x,), weight=2 * channels)

    def relu(x: int, channels: int, side: int) -> int:
        return tape.op((x,), batch * channels * side * side, need_output=True, in_place=True)

    def conv_norm(x: int, cin: int, cout: int, kernel: int, side: int) -> int:
        return norm(conv(x, cin, cout, kernel, side), cout, side)

    side = image // 2
    x = relu(norm(conv(-1, 3, 64, 7, side, has_input=False), 64, side), 64, side)
    side //= 2
    x = tape.op((x,), batch * 64 * side * side, need=(x,), need_output=True)
    channels = 64
    for stage, (count, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for k in range(count):
            before, side = side, side // 2 if stage and k == 0 else side
            y = relu(conv_norm(x, channels, width, 1, before), width, before)
            y = relu(conv_norm(y, width, width, 3, side), width, side)
            y = conv_norm(y, width, 4 * width, 1, side)
            short = conv_norm(x, channels, 4 * width, 1, side) if k == 0 else x
            channels = 4 * width
            x = relu(
                tape.op((y, short), batch * channels * side * side, in_place=True), channels, side
            )
    x = tape.op((x,), batch * channels)
    x = tape.op(
        (x,), batch * 1000, need=(x,), flops=2.0 * batch * channels * 1000, weight=channels * 1000
    )
    tape.op((x,), 1, batch, need=(x,))
    return tape.problem()


def gpt(
    layers: int = 12,
    *,
    batch: int = 8,
    sequence: int = 1024,
    d: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    flash: bool = False,
    fused_loss: bool = False,
) -> Problem:
    """Return a GPT: 12 ops per layer, 10 with flash attention.

    fused_loss: head and loss are one op that works on an eighth of the rows at a time.
    """
    tape = Tape()
    tokens = batch * sequence
    x = tape.op((), tokens * d, weight=(vocab + sequence) * d)
    for _ in range(layers):
        x = _attention(tape, x, batch, sequence, d, heads, flash)
        x = _mlp(tape, x, tokens, d)
    x = tape.op((x,), tokens * d, tokens, tokens, need=(x,), weight=2 * d)
    flops = 2.0 * tokens * d * vocab
    if fused_loss:
        chunk = tokens // 8 * vocab * 2
        tape.op((x,), 1, need=(x,), flops=flops, weight=d * vocab, temp=chunk)
    else:
        logits = tape.op((x,), tokens * vocab, need=(x,), flops=flops, weight=d * vocab)
        tape.op((logits,), 1, tokens, need=(logits,))
    return tape.problem()


def _attention(
    tape: Tape, x: int, batch: int, sequence: int, d: int, heads: int, flash: bool
) -> int:
    tokens = batch * sequence
    y = tape.op((x,), tokens * d, tokens, tokens, need=(x,), weight=2 * d)
    qkv = tape.op((y,), tokens * 3 * d, need=(y,), flops=6.0 * tokens * d * d, weight=3 * d * d)
    flops = 2.0 * tokens * sequence * d
    if flash:
        y = tape.op(
            (qkv,), tokens * d, tokens * heads, need=(qkv,), need_output=True, flops=2 * flops
        )
    else:
        matrix = tokens * heads * sequence
        scores = tape.op((qkv,), matrix, need=(qkv,), flops=flops)
        p = tape.op((scores,), matrix, need_output=True, in_place=True)
        y = tape.op((p, qkv), tokens * d, need=(p, qkv), flops=flops)
    y = tape.op((y,), tokens * d, need=(y,), flops=2.0 * tokens * d * d, weight=d * d)
    return tape.op((y, x), tokens * d, in_place=True)


def _mlp(tape: Tape, x: int, tokens: int, d: int) -> int:
    flops = 8.0 * tokens * d * d
    y = tape.op((x,), tokens * d, tokens, tokens, need=(x,), weight=2 * d)
    h = tape.op((y,), tokens * 4 * d, need=(y,), flops=flops, weight=4 * d * d)
    g = tape.op((h,), tokens * 4 * d, need=(h,), in_place=True)
    y = tape.op((g,), tokens * d, need=(g,), flops=flops, weight=4 * d * d)
    return tape.op((y, x), tokens * d, in_place=True)


def unet(batch: int = 4, image: int = 256, base: int = 64, depth: int = 4) -> Problem:
    """Return a U-Net: the skips cross every cut between the two halves."""
    tape = Tape()

    def double_conv(x: int | None, cin: int, cout: int, side: int) -> int:
        for _ in range(2):
            elements = batch * cout * side * side
            inputs = () if x is None else (x,)
            flops = 2.0 * elements * cin * 9
            y = tape.op(inputs, elements, need=inputs, flops=flops, weight=9 * cin * cout)
            x, cin = tape.op((y,), elements, need_output=True, in_place=True), cout
        return x if x is not None else -1

    side, width, skips = image, base, []
    x: int | None = None
    cin = 3
    for _ in range(depth):
        x = double_conv(x, cin, width, side)
        skips.append((x, width, side))
        cin, width, side = width, 2 * width, side // 2
        x = tape.op((x,), batch * cin * side * side, need=(x,))
    x = double_conv(x, cin, width, side)
    for skip, channels, side in reversed(skips):
        elements = batch * channels * side * side
        up = tape.op((x,), elements, need=(x,), flops=2.0 * elements * 2 * channels * 4)
        both = tape.op((up, skip), 2 * elements)
        x = double_conv(both, 2 * channels, channels, side)
    tape.op((x,), 1, batch * image * image, need=(x,))
    return tape.problem()


def deep_gpt(layers: int) -> Problem:
    """Return a GPT with flash attention and so small a vocabulary that only the layers count."""
    return gpt(layers, flash=True, vocab=1024)


MODELS: dict[str, Callable[[], Problem]] = {
    "ResNet-50, b32 224": resnet50,
    "GPT-2 small, b8 1024": gpt,
    "the same, online-softmax attention": lambda: gpt(flash=True),
    "the same, and loss in chunks": lambda: gpt(flash=True, fused_loss=True),
    "U-Net, b4 256": unet,
}
