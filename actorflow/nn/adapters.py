"""Low-rank adapters (LoRA) on the linear layers of a model: `nn.lora`.

The weight W of a layer stays as it is, and A [rank, in] and B [out, rank] are trained: the layer
computes x W' + b + alpha / rank * (x A') B'. B starts with zeros, so the model starts as it was.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Names of tensors and
files are those of Hugging Face's peft.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actorflow import functional
from actorflow.environment.option_values import Patterns, chosen, wrong_patterns
from actorflow.nn.layers import Linear, checked_extent
from actorflow.nn.lease import assign_values, leased, make_claim
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.tensor.literals import checked_number
from actorflow.tensor.tensor import Tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.codec import DecodeError, from_json
from compiler.contract.errors import CompileError
from compiler.contract.files import read_regular, replace_regular, user_path

if TYPE_CHECKING:
    from actorflow.nn.weights import LoadReport, Source

Array = np.ndarray[Any, Any]

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PREFIX = "base_model.model."
"""How names of peft begin: of its wrapper, and of that of the model's."""

_MAX_CONFIG_BYTES = 1 << 20


class AdaptedLinear(Linear):
    """A linear layer with an adapter; `nn.lora` makes it of a `Linear`, in place."""

    lora_A: Linear  # noqa: N815  # peft's name
    lora_B: Linear  # noqa: N815  # peft's name
    lora_scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features]."""
        y = functional.linear(x, self.weight, self.bias)
        return y + self.lora_B(self.lora_A(x)) * self.lora_scale


class LoRA:
    """The adapters of one model, as `nn.lora` made them: saved, loaded, merged or removed alone.

    `layers` are the adapted layers by path, `scale` is alpha / rank.
    """

    def __init__(
        self, model: Module, layers: Mapping[str, Linear], rank: int, alpha: float
    ) -> None:
        self.model = model
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self._frozen = [p for _, p in model.named_parameters() if not p.is_frozen]
        for parameter in self._frozen:
            parameter.freeze()
        self.layers = {path: _adapted(layer, rank, self.scale) for path, layer in layers.items()}

    def __repr__(self) -> str:
        name = type(self.model).__name__
        layers = ", ".join(self.layers) or "none, they are merged or removed"
        return f"LoRA of {name}(rank={self.rank}, alpha={self.alpha:g}, layers: {layers})"

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters of all adapters by their paths in the model."""
        return {
            f"{path}.{name}.weight": adapter.weight
            for path, layer in self.layers.items()
            for name, adapter in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        }

    def state(self) -> dict[str, Array]:
        """Return the newest values of the adapters by their paths in the model: read-only."""
        state = self.model.state()
        return {path: state[path] for path in self.parameters()}

    def save(self, path: str | os.PathLike[str], *, dtype: str | None = None) -> Path:
        """Write the adapters into a directory as peft does, and return it.

        It gets `adapter_model.safetensors`, with names such as
        `base_model.model.blocks.0.attn.qkv.lora_A.weight`, and `adapter_config.json`. Raises
        CheckpointError and OSError where they cannot be written.
        """
        from actorflow.checkpoint.weights import save

        directory = Path(os.path.abspath(user_path(path)))
        named = {_PREFIX + name: array for name, array in self.state().items()}
        save(named, directory / WEIGHTS_NAME, dtype)
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": [*self.layers],
        }
        replace_regular(directory / CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())
        return directory

    def load(self, source: Source) -> LoadReport:
        """Set the values of the adapters, all or none: of a directory as `save` writes, or arrays.

        Names may begin as peft's do, or be paths in the model. Raises CompileError where they are
        of other layers, or of another rank or alpha; CheckpointError for what cannot be read.
        """
        from actorflow.nn.weights import load_values  # 20 ms

        if isinstance(source, (str, os.PathLike)):
            source = Path(user_path(source))
            if source.is_dir():
                self._check_config(source / CONFIG_NAME)
                source = source / WEIGHTS_NAME
        return load_values(
            self.parameters(),
            source,
            owner="adapters",
            item_at=lambda path: None,
            strict=True,
            rename=lambda name: name.removeprefix(_PREFIX),
            dtype=None,
        )

    def merge(self) -> None:
        """Add the adapters to the weights of their layers, and remove them; no run may train them.

        The layers compute the same as before, to rounding. Raises CompileError where a weight is
        that of another layer, too, which would then change.
        """
        state = self.model.state()
        shared = _shared(self.model, self.layers)
        if shared:
            raise CompileError(
                f"{find_source()}: merge would change {shared[1]!r}, which has the weight of"
                f" {shared[0]!r}; leave that layer out of targets, or keep its adapter apart"
            )
        weights = {}
        for path, layer in self.layers.items():
            a, b = [state[f"{path}.{name}.weight"] for name in ("lora_A", "lora_B")]
            whole = state[f"{path}.weight"]
            # In doubles, so that the sum is rounded once.
            change = self.scale * (b.astype(np.float64) @ a.astype(np.float64))
            weights[layer.weight.cell] = (whole + change).astype(whole.dtype)
            weights[layer.weight.cell].flags.writeable = False
        cells = self.model.cells()
        with leased(cells, make_claim(cells, "merge of adapters")):
            assign_values(weights)
            self._detach()

    def remove(self) -> None:
        """Remove the adapters, whose values are lost: the model is what it was before `nn.lora`.

        No run may train them.
        """
        cells = self.model.cells()
        with leased(cells, make_claim(cells, "removal of adapters")):
            self._detach()

    def _detach(self) -> None:
        for layer in self.layers.values():
            layer.__class__ = Linear  # type: ignore[assignment]  # what it was before
            for name in ("lora_A", "lora_B", "lora_scale"):
                delattr(layer, name)
        for parameter in self._frozen:
            parameter.unfreeze()
        self.layers = {}

    def _check_config(self, path: Path) -> None:
        """Raise CompileError where adapters of a directory were made with another rank or alpha."""
        try:
            config: Any = from_json(read_regular(path, _MAX_CONFIG_BYTES, is_link_followed=True))
            saved = config["r"], float(config["lora_alpha"])
        except FileNotFoundError:
            return  # weights alone: their shapes tell the rank
        except (OSError, DecodeError, ValueError, TypeError, KeyError) as error:
            raise CompileError(
                f"{find_source()}: {path} is no configuration of adapters with r and lora_alpha:"
                f" {type(error).__name__}: {error}"
            ) from error
        if saved != (self.rank, self.alpha):
            raise CompileError(
                f"{find_source()}: the adapters of {path.parent} have rank {saved[0]} and alpha"
                f" {saved[1]:g}, and those of the model rank {self.rank} and alpha"
                f" {self.alpha:g}; write nn.lora(model, rank={saved[0]}, alpha={saved[1]:g})"
            )


def lora(model: Module, *, rank: int, alpha: float | None = None, targets: Patterns = "*") -> LoRA:
    """Give linear layers of a model adapters of a rank, in place, and freeze all other parameters.

    Paths and values of the model stay as they are; each chosen layer gets `lora_A` and `lora_B`,
    linear layers without a bias. Jobs of the model train the adapters from then on.

    Args:
        model: some of its layers are `nn.Linear`.
        rank: of each adapter, 1 or more.
        alpha: the adapter's result is multiplied by alpha / rank; the rank by default.
        targets: patterns over paths of linear layers, such as ["*.qkv", "!blocks.0.*"]; all of them
            by default.

    Raises CompileError for other arguments, and for a pattern that matches no linear layer.
    """
    if not isinstance(model, Module):
        raise CompileError(f"{find_source()}: lora expected a module, got {type(model).__name__}")
    rank = checked_extent("lora", "rank", rank)
    alpha = float(rank) if alpha is None else checked_number(alpha, "alpha of lora")
    if wrong := wrong_patterns(targets):
        raise CompileError(f"{find_source()}: targets of lora must be {wrong}")
    # By type: a class of the user's that is a Linear may compute something else.
    linear = {path: m for path, m in model.named_modules() if type(m) is Linear}
    what = f"{find_source()}: targets of lora"
    paths = chosen(targets, [*linear], what, "linear layer")
    if not paths:
        raise CompileError(f"{what}: {type(model).__name__} has no nn.Linear that they choose")
    return LoRA(model, {path: linear[path] for path in paths}, rank, alpha)


def _adapted(layer: Linear, rank: int, scale: float) -> AdaptedLinear:
    out_features, in_features = layer.weight.shape
    dtype = layer.weight.dtype
    down, up = Linear(in_features, rank, bias=False), Linear(rank, out_features, bias=False)
    # Of a layer that a load made float64, say.
    down.weight = Parameter((rank, in_features), down.weight.init, dtype)
    up.weight = Parameter((out_features, rank), "zeros", dtype)
    layer.__class__ = AdaptedLinear
    adapted = cast("AdaptedLinear", layer)
    adapted.lora_A, adapted.lora_B, adapted.lora_scale = down, up, scale
    return adapted


def _shared(model: Module, layers: Mapping[str, Linear]) -> tuple[str, str] | None:
    """Return the path of a layer and of another module that has its weight, if there is one."""
    owners = {id(layer.weight): (path, layer) for path, layer in layers.items()}
    for where, module in model.named_modules():
        for name, child in vars(module).items():
            path, layer = owners.get(id(child), ("", None))
            if layer is not None and module is not layer:
                return path, f"{where}.{name}" if where else name
    return None
