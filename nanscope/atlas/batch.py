"""The batch of the atlas: without a fault, with one, and the one whose loss the faulty one should have."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from nanscope.atlas.faults import CONSTANT, LOG_RATIO, STANDS_IN, Fault, Where
from nanscope.objective.settings import LossInputs

FAULTY = 0  # the row that the fault is put into
_SPOT = {Where.MASKED: (FAULTY, 3), Where.VALID: (FAULTY, 1)}


def healthy(advantage: int = 1) -> LossInputs:
    """Return the batch of the atlas without a fault: [3, 4], float32; the last token of row 0 and half of row 1 are masked.

    advantage: A of row 0, where faults are put. Ratios are near 1, inside every clip and band. Masked tokens have log-probs of their own,
    as tokens of a tool have. A row is short, so that its mean of a log-ratio of 200 is 67, which exp survives in float32.
    """
    policy = torch.tensor([[-1.00, -0.50, -2.00, -0.70], [-0.30, -1.20, -0.90, -0.40], [-0.80, -0.60, -1.50, -1.10]])
    old = policy - torch.tensor([[0.06, -0.04, -0.05, 0.03], [0.05, -0.06, 0.02, 0.04], [-0.03, 0.05, 0.04, -0.02]])
    ref = policy + torch.tensor([[0.08, -0.09, -0.12, 0.05], [-0.07, 0.11, 0.04, -0.05], [0.06, -0.04, 0.09, 0.10]])
    rollout = old - torch.tensor([[0.02, 0.01, 0.03, -0.02], [0.01, 0.03, -0.01, 0.02], [0.02, -0.01, 0.02, 0.01]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    advantages = torch.tensor([float(advantage), -0.5, 0.7])
    return LossInputs(policy.requires_grad_(), old, ref, rollout, advantages, mask, entropy=torch.ones_like(mask))


def faulty(fault: Fault) -> LossInputs:
    """Return the batch with the fault in it."""
    batch = healthy(fault.advantage)
    if fault.where is Where.BATCH:
        return replace(batch, mask=torch.zeros_like(batch.mask))
    changed = _tensor(batch, fault.tensor).detach().clone()
    if fault.where is Where.ROW:
        changed[FAULTY] = 0.0
    elif fault.kind in CONSTANT:
        changed[_SPOT[fault.where]] = CONSTANT[fault.kind]
    else:
        base, sign, _ = STANDS_IN[fault.tensor]
        changed[_SPOT[fault.where]] = _tensor(batch, base).detach()[_SPOT[fault.where]] + sign * LOG_RATIO[fault.kind]
    return replace(batch, **{fault.tensor: changed.requires_grad_(fault.tensor == "log_probs")})


def reference(fault: Fault) -> LossInputs:
    """Return the batch whose loss the faulty one should have: a row without a valid token should count for nothing."""
    batch = healthy(fault.advantage)
    if fault.where is not Where.ROW:
        return batch
    others = slice(FAULTY + 1, None)
    cut = {part.name: _tensor(batch, part.name).detach()[others] for part in fields(batch)}
    return LossInputs(**cut | {"log_probs": cut["log_probs"].requires_grad_()})


def _tensor(inputs: LossInputs, name: str) -> Tensor:
    tensor: Tensor = getattr(inputs, name)
    return tensor
