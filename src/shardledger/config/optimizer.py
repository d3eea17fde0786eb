"""The ``optimizer`` section: which ``torch.optim`` class runs, and with which arguments.

The table below holds what the torch classes accept, because this room works without torch. A class that is not in it is
passed on unchecked; the runtime meets the class itself and checks there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from shardledger.config.section import Section
from shardledger.config.values import KINDS

_ANY_CLASS = "lr:nonnegative weight_decay:nonnegative maximize:bool foreach:bool? differentiable:bool"
_ADAM_LIKE = f"{_ANY_CLASS} betas:betas eps:nonnegative capturable:bool"


def _kinds(spec: str) -> dict[str, str]:
    return dict(entry.split(":") for entry in spec.split())


TORCH_PARAMS: Mapping[str, Mapping[str, str]] = {
    "Adadelta": _kinds(f"{_ANY_CLASS} rho:number eps:nonnegative capturable:bool"),
    "Adagrad": _kinds(
        f"{_ANY_CLASS} lr_decay:nonnegative initial_accumulator_value:nonnegative eps:nonnegative fused:bool?"
    ),
    "Adam": _kinds(f"{_ADAM_LIKE} amsgrad:bool fused:bool? decoupled_weight_decay:bool"),
    "AdamW": _kinds(f"{_ADAM_LIKE} amsgrad:bool fused:bool?"),
    "Adamax": _kinds(_ADAM_LIKE),
    "ASGD": _kinds(f"{_ANY_CLASS} lambd:number alpha:number t0:number capturable:bool"),
    "NAdam": _kinds(f"{_ADAM_LIKE} momentum_decay:nonnegative decoupled_weight_decay:bool"),
    "RAdam": _kinds(f"{_ADAM_LIKE} decoupled_weight_decay:bool"),
    "RMSprop": _kinds(
        f"{_ANY_CLASS} alpha:nonnegative eps:nonnegative momentum:nonnegative centered:bool capturable:bool"
    ),
    "Rprop": _kinds("lr:nonnegative etas:pair step_sizes:pair maximize:bool foreach:bool? differentiable:bool "
                    "capturable:bool"),
    "SGD": _kinds(f"{_ANY_CLASS} momentum:nonnegative dampening:number nesterov:bool fused:bool?"),
}  # fmt: skip
"""Arguments of the torch optimizers that work element by element, by class name, with the kind of each value."""

ADAM_SWITCHES: Mapping[str, str] = _kinds(
    "adam_w_mode:bool torch_adam:bool bias_correction:bool set_grad_none:bool fp32_optimizer_states:bool"
)
"""Arguments of DeepSpeed's own Adam that torch's classes do not know."""

DEEPSPEED_NAMES: Mapping[str, str] = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
"""DeepSpeed's own names for what is available here; they match in any case."""

_WHOLE_MATRIX = "it needs whole matrices, and a rank holds pieces of them; use AdamW"
_ONE_BIT = "compressed 1-bit communication is not available; use AdamW"
REFUSED_TYPES: Mapping[str, str] = {
    "lamb": "it needs the norm of whole layers, and a rank holds pieces of them; use AdamW",
    "fusedlamb": "it needs the norm of whole layers, and a rank holds pieces of them; use AdamW",
    "lion": "it is not available yet; use AdamW",
    "muon": _WHOLE_MATRIX,
    "musgd": _WHOLE_MATRIX,
    "muadam": "width-dependent learning rates are not available; use AdamW with your own parameter groups",
    "muadamw": "width-dependent learning rates are not available; use AdamW with your own parameter groups",
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "adafactor": _WHOLE_MATRIX,
    "lbfgs": "it evaluates the loss several times in a step, which a sharded step cannot do; use AdamW or SGD",
    "sparseadam": "sparse gradients are not available; use AdamW",
}
"""Optimizers refused by name (compared without regard to case), with the reason and what to use."""


class OptimizerSection(Section):
    """Which optimizer the engine builds."""

    type: str = Field(
        description="Adam (which is AdamW unless params.adam_w_mode is false), AdamW or Adagrad in any case, or the "
        "exact name of a class in torch.optim",
        json_schema_extra={"auto": "refuse"},
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the optimizer, such as lr, betas and weight_decay",
        json_schema_extra={"auto": "refuse"},
    )

    def torch_class(self) -> str:
        """Return the name of the ``torch.optim`` class that does what this section asks for."""
        name = DEEPSPEED_NAMES.get(self.type.lower(), self.type)
        if name == "Adam" and KINDS["bool"].validate_python(self.params.get("adam_w_mode", True)):
            return "AdamW"
        return name

    def resolved(self) -> tuple[str, dict[str, Any]]:
        """Return the ``torch.optim`` class name and its keyword arguments.

        DeepSpeed's Adam does not decay weights unless told to, torch's AdamW does by 0.01: where the former is meant,
        ``weight_decay`` is passed explicitly.
        """
        arguments = {key: value for key, value in self.params.items() if key not in ADAM_SWITCHES}
        if self.lacks_weight_decay():
            arguments["weight_decay"] = 0.0
        pairs = {key: tuple(value) for key, value in arguments.items() if isinstance(value, list)}
        return self.torch_class(), arguments | pairs

    def lacks_weight_decay(self) -> bool:
        """Tell whether DeepSpeed's default weight decay of 0 applies, which differs from torch's."""
        return (
            self.type.lower() in ("adam", "adamw")
            and "weight_decay" not in self.params
            and not self.params.get("torch_adam", False)
        )

    def kinds(self) -> Mapping[str, str] | None:
        """Return the arguments this type accepts, with their kinds; None when only the runtime can tell."""
        known = TORCH_PARAMS.get(DEEPSPEED_NAMES.get(self.type.lower(), self.type))
        if known is not None and self.type.lower() in ("adam", "adamw"):
            # Asking for AdamW by another argument would be a second switch beside adam_w_mode.
            plain = {key: kind for key, kind in known.items() if key != "decoupled_weight_decay"}
            return {**plain, **ADAM_SWITCHES}
        return known
