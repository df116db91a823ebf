"""What losses do with nothing valid: tried, not looked up. A row without a token, and a batch without one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nanscope.audit.model import Denominator
from nanscope.audit.weights import Emptied
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Setting
from nanscope.objective.evaluate import objective
from nanscope.objective.settings import LossInputs, LossSettings

ROWS, TOKENS = 3, 4  # enough to see a denominator become 0


def denominators() -> tuple[Denominator, ...]:
    """Return what every framework's policy loss does, with its default settings; a loss that has no defaults is left out."""
    return tuple(found for key in LOSSES if (found := _denominator(key)) is not None)


def _denominator(key: str) -> Denominator | None:
    try:
        how = framework_settings(key)
    except NanscopeError:
        return None  # it has a setting without a default
    if how.surrogate is None:
        return None
    reduction = how.scale_advantages or how.reduction
    nothing = emptied_under(how)
    return Denominator(key, reduction.guard, reduction.row_guard, bool(nothing.row), bool(nothing.batch))


def emptied_key(key: str, settings: Mapping[str, Setting]) -> Emptied:
    """Return the same for one loss under given settings; errors as in `framework_loss`."""
    return emptied_under(framework_settings(key, **settings))


def emptied_under(how: LossSettings) -> Emptied:
    """Evaluate a loss on log-probs of 0 with one row masked, and with all."""
    one_BT = torch.ones(ROWS, TOKENS)
    one_BT[0] = 0
    return Emptied(_survives(how, one_BT), _survives(how, torch.zeros(ROWS, TOKENS)))


def _survives(how: LossSettings, mask_BT: Tensor) -> bool:
    log_probs_BT, zeros_BT = torch.zeros(mask_BT.shape, requires_grad=True), torch.zeros(mask_BT.shape)
    advantages_B = torch.linspace(-1.0, 1.0, len(mask_BT))
    batch = LossInputs(log_probs_BT, zeros_BT, zeros_BT, zeros_BT, advantages_B, mask_BT, zeros_BT)
    with torch.enable_grad():
        loss = objective(batch, how).loss
    (gradient,) = torch.autograd.grad(loss, log_probs_BT, allow_unused=True)
    return bool(torch.isfinite(loss)) and (gradient is None or bool(torch.isfinite(gradient).all()))
