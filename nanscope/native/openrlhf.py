"""OpenRLHF: `PolicyLoss` and `aggregate_loss(compute_approx_kl(…))`.

Notable: `openrlhf.models` imports flash_attn with its actors, which only installs with CUDA. Where that fails, the two files that hold the
losses are imported alone, unchanged, under an empty package that is gone afterwards. They still need deepspeed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from torch import Tensor

from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.options import Setting
from nanscope.native.adapter import Adapter, old_logprobs, per_token, present
from nanscope.objective import LossInputs

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
    """Return the first of what `PolicyLoss` returns, or the aggregated KL (`kl_loss`). through_actor: ℓ·m, as from `Actor.forward`."""
    losses, utils = load()
    mask_BT = inputs.mask.long()
    counts = {name: settings[name] for name in _COUNTS if name in settings}
    others = {name: value for name, value in settings.items() if name not in (*_COUNTS, "through_actor")}
    if kind == "kl_loss":
        level = {"token_level_loss": others.pop("token_level_loss")} if "token_level_loss" in others else {}
        reference_BT = present(inputs.ref_logprobs, "ref_logprobs")
        kl_BT = utils.compute_approx_kl(inputs.logprobs, reference_BT, old_logprobs(inputs), **others)
        kl_loss: Tensor = losses.aggregate_loss(kl_BT, mask_BT, **level, **counts)
        return kl_loss
    loss: Tensor = losses.PolicyLoss(policy_loss_type=kind, **others)(
        inputs.logprobs * mask_BT if settings.get("through_actor", False) else inputs.logprobs,
        old_logprobs(inputs),
        per_token(inputs.advantages, inputs.logprobs),
        mask_BT,
        None if inputs.rollout_logprobs is None else inputs.rollout_logprobs.detach(),
        **counts,
    )[0]
    return loss


ADAPTER = Adapter("openrlhf", "openrlhf", tuple(key for key in LOSSES if key.startswith("openrlhf.")), load, call)
