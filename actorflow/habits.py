"""What users of torch reach for and do not find here, and what they do instead."""

from __future__ import annotations

_DATA = "a tensor has data only while the plan runs: return it from the job, whose step gives it"
_GRADIENT = "a job with an optimizer computes gradients itself; af.grad(y, x) has them as tensors"
_PLACE = "say of the job where it runs: @af.job(device='cuda')"
_MODE = "say of the job whether it trains: @af.job(train=False) for one that does not"

OF_TENSORS = {
    **dict.fromkeys(("item", "tolist", "numpy", "data", "cpu"), _DATA),
    **dict.fromkeys(("backward", "grad", "requires_grad", "retain_grad"), _GRADIENT),
    **dict.fromkeys(("cuda", "device"), _PLACE),
}
OF_MODULES = {
    "parameters": "named_parameters() has them; an optimizer is given to the job, and takes none:"
    " @af.job(optimizer=af.optim.Adam(1e-3))",
    **dict.fromkeys(("train", "eval", "training"), _MODE),
    **dict.fromkeys(("to", "cuda", "cpu"), _PLACE),
    "state_dict": "state() returns the arrays by path",
    "load_state_dict": "load(arrays) takes the arrays by path",
    "zero_grad": "each step has its own gradients",
    "register_buffer": "write self.name = nn.Buffer(...)",
    "register_parameter": "write self.name = nn.Parameter(...)",
    "requires_grad_": "write freeze() or unfreeze()",
}
OF_THE_PACKAGE = {
    **dict.fromkeys(("no_grad", "inference_mode"), f"x.detach() stops gradients; {_MODE}"),
    "manual_seed": "write @af.job(seed=0)",
    "empty": "write af.zeros, which costs nothing until it is written over",
    **dict.fromkeys(("from_numpy", "as_tensor"), "numpy arrays are taken as they are"),
    **dict.fromkeys(("save", "load"), "fit(checkpoint=...), model.state() and model.load() do it"),
}


def missing(owner: str, name: str, instead: dict[str, str]) -> AttributeError:
    """Return the error of an attribute that is not there, with what there is in its place."""
    mend = instead.get(name, "")
    if instead is OF_TENSORS and name.endswith("_") and not name.startswith("_"):
        mend = f"tensors never change: write x = x.{name.rstrip('_')}(...)"
    return AttributeError(f"{owner} has no attribute {name!r}{mend and '; '}{mend}")
