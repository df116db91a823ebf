"""OpenRLHF: `PolicyLoss` and `aggregate_loss(compute_approx_kl(…))`.

Notable: `openrlhf.models` imports flash_attn with its actors, which only installs with CUDA. Where that fails, the two files that hold the
losses are imported alone, unchanged, under an empty package that is gone afterwards. They still need deepspeed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Mapping
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter, old_log_probs, only, per_token, present
from nanscope.objective.settings import LossInputs

_PACKAGE = "openrlhf.models"
_COUNTS = ("dp_size", "batch_num_tokens", "global_batch_size")


def load() -> tuple[ModuleType, ModuleType]:
    """Import `loss` and `utils` of openrlhf.models, without its actors if these do not import."""
    try:
        importlib.import_module(_PACKAGE)
    except ImportError:
        return _load_alone()
    return importlib.import_module(f"{_PACKAGE}.loss"), importlib.import_module(f"{_PACKAGE}.utils")


def _load_alone() -> tuple[ModuleType, ModuleType]:
    names = (f"{_PACKAGE}.loss", f"{_PACKAGE}.utils")
    if not all(name in sys.modules for name in names):
        root = importlib.util.find_spec(_PACKAGE.partition(".")[0])
        if root is None or root.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'openrlhf'")
        shell = ModuleType(_PACKAGE)
        shell.__path__ = [str(Path(place) / "models") for place in root.submodule_search_locations]
        sys.modules[_PACKAGE] = shell
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            del sys.modules[_PACKAGE]
    return sys.modules[names[0]], sys.modules[names[1]]


def call(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return the first of what `PolicyLoss` returns, or the aggregated KL (`kl_loss`)."""
    return _kl_loss(inputs, settings) if kind == "kl_loss" else _policy(kind, inputs, settings)


def _policy(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """through_actor: ℓ·m, which is what `Actor.forward` returns."""
    losses, _ = load()
    mask_BT = inputs.mask.long()
    own, counts, around = _apart(settings, signature(losses.PolicyLoss).parameters, ("through_actor",))
    loss: Tensor = losses.PolicyLoss(policy_loss_type=kind, **own)(
        inputs.log_probs * mask_BT if around.get("through_actor") else inputs.log_probs,
        old_log_probs(inputs),
        per_token(inputs.advantages, inputs.log_probs),
        mask_BT,
        None if inputs.rollout_log_probs is None else inputs.rollout_log_probs.detach(),
        **counts,
    )[0]
    return loss


def _kl_loss(inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    losses, utils = load()
    own, counts, around = _apart(settings, signature(utils.compute_approx_kl).parameters, ("token_level_loss",))
    kl_BT = utils.compute_approx_kl(inputs.log_probs, present(inputs.ref_log_probs, "ref_log_probs"), old_log_probs(inputs), **own)
    loss: Tensor = losses.aggregate_loss(kl_BT, inputs.mask.long(), **around, **counts)
    return loss


def _apart(settings: Mapping[str, Setting], own: Collection[str], around: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Return the settings of the function itself, the counts of the whole step, and those of what stands around the function."""
    said = only(settings, {*own, *_COUNTS, *around})
    names = ({*own} - {*around}, _COUNTS, around)
    return tuple({name: value for name, value in said.items() if name in group} for group in names)


ADAPTER = Adapter("openrlhf", load, call)
