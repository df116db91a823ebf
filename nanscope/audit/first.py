"""The first step after sampling, explained: every ratio is 1, so the loss is −Σ weight · advantage and says nothing about learning."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nanscope.audit.model import Effect, Finding
from nanscope.audit.step import NEARLY, AuditedStep, masked, stacked
from nanscope.audit.weights import SCHEMES, Scheme, token_weights
from nanscope.audit.words import use
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import framework_loss
from nanscope.frameworks.rows import Setting
from nanscope.objective.settings import LossInputs
from nanscope.program.perform import FAILURES
from nanscope.text import number

ROUNDING = 1e-4  # of a gradient's length: what float32 takes off, and far more than that
NOISE = 1e-4  # the variance that was proposed in https://github.com/huggingface/trl/pull/2869

# Losses that are 0 there and losses that are not. None stands for the width of the batch.
FIRST: tuple[tuple[str, tuple[tuple[str, Setting], ...]], ...] = (
    ("trl.grpo", ()),
    ("verl.vanilla", (("loss_agg_mode", "seq-mean-token-mean"),)),
    ("skyrl.regular", (("loss_reduction", "sequence_mean"),)),
    ("trl.dapo", ()),
    ("trl.dr_grpo", (("max_completion_length", None),)),
    ("trl.sapo", ()),
    ("trl.cispo", (("epsilon_high", 5.0),)),
)


def first_step(step: AuditedStep) -> Iterator[Finding]:
    """Yield the explanation if every log-ratio is exactly 0."""
    size = step.advantages().abs().mean().item()
    if any(part.drift != 0.0 for part in step.parts if part.tokens) or step.token_mean is None or not 0 < size < math.inf:
        return
    batch = _pooled(step)
    values = [(use(key, settings), _value(batch, key, settings)) for key, settings in FIRST]
    zero = [name for name, value in values if abs(value) <= NEARLY * size]
    other = [f"{number(value)} in {name}" for name, value in values if abs(value) > NEARLY * size]
    words = [f"exactly 0 in {', '.join(zero)}"] * bool(zero) + [", ".join(other)] * bool(other)
    expected, norm = _invariant(step)
    sentence = (
        "Every ratio is exactly 1: this is the first update after sampling, and its loss, −Σ weight · advantage, says nothing about "
        f"learning. {_why(step, size)} It would be {'; '.join(words)}. The gradient is not 0: its norm at the log-probs is "
        f"{number(norm)} under {'these weights' if step.known else 'the token mean'}. Test that every ratio is 1 and that the loss is "
        f"{number(expected if abs(expected) > NEARLY * size else 0.0)} = −Σ weight · advantage, not that it differs from 0."
    )
    if step.loss is not None and abs(step.loss - expected) > 1e-3 * max(abs(expected), NEARLY * size):
        sentence += f" It is {number(step.loss)} here: this loss is no ratio · advantage alone."
    yield Finding("first_step", Effect.NOTE, sentence, figures={"expected": expected, "gradient_norm": norm})
    yield from _once_more(step)


def _once_more(step: AuditedStep) -> Iterator[Finding]:
    """Yield what the same step gives in float64, and what noise on its advantages does: both are run."""
    plain = _repeated(step)
    exact = _repeated(step, torch.float64) if plain is not None else None
    if plain is None or exact is None or not exact[1].norm() > 0:
        return
    apart, cosine = _apart(plain[1], exact[1])
    figures = {"gradient": apart, "cosine": cosine, "loss": plain[0], "loss_float64": exact[0]}
    loss = f"The same step in float64, executed: loss {number(_rounded(exact[0], step))}, and a gradient that differs by {_percent(apart)}"
    end = (
        "What is learnt in this step owes nothing to calculation errors."
        if apart <= ROUNDING
        else "So much of this gradient is calculation error: `nanscope check --precision` says where it comes from."
    )
    yield Finding("first_step_exact", Effect.NOTE, f"{loss} of its length (cosine {cosine:.6f}). {end}", figures=figures)
    noisy = _repeated(step, variance=NOISE)
    if noisy is None:
        return
    apart, cosine = _apart(noisy[1], plain[1])
    figures = {"variance": NOISE, "gradient": apart, "cosine": cosine, "loss": noisy[0]}
    sentence = (
        f"Noise of variance {NOISE:g} on the advantages, proposed so that such a step has a loss to learn from, executed with a seed: the "
        f"loss is {number(noisy[0])} instead of {number(_rounded(plain[0], step))}, and the gradient another one by "
        f"{_percent(apart)} of its length (cosine {cosine:.6f}). It adds noise to the gradient, and nothing that was missing."
    )
    yield Finding("advantage_noise", Effect.NOTE, sentence, figures=figures)


def _repeated(step: AuditedStep, dtype: torch.dtype | None = None, variance: float = 0.0) -> tuple[float, Tensor] | None:
    """The loss and the gradient of the whole step, run again; None where a part cannot be, or is not finite."""
    parts = [part for part in step.parts if part.tokens]
    try:
        runs = [(part.share, *part.repeated.repeat(dtype, variance)) for part in parts if part.repeated is not None]
    except (NanscopeError, *FAILURES):
        return None
    if not runs or len(runs) < len(parts):
        return None
    loss, gradient = math.fsum(share * value for share, value, _ in runs), torch.cat([share * grad for share, _, grad in runs])
    return (loss, gradient) if math.isfinite(loss) and bool(torch.isfinite(gradient).all()) else None


def _apart(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How far a gradient is from another one, in lengths of that one, and the cosine between the two."""
    size = float(wanted.norm())
    return float((found - wanted).norm()) / size, float(found @ wanted) / (float(found.norm()) * size or 1.0)


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %".replace("-", "−")


def _rounded(loss: float, step: AuditedStep) -> float:
    """A loss without what is nothing but rounding beside the losses that it is made of."""
    return loss if abs(loss) > NEARLY * step.size else 0.0


def _why(step: AuditedStep, size: float) -> str:
    advantages_BT = masked(step.advantages().expand(step.mask_BT.shape), step.mask_BT)
    mean = (advantages_BT.sum(-1) / step.mask_BT.sum(-1).clamp(min=1)).mean().item()
    if abs(mean) > NEARLY * size:
        return f"The advantages have the mean {number(mean)} over the rows, so not even a mean over rows is 0."
    short, long = (int(step.mask_BT[row].sum()) for row in step.extremes())
    lengths = (
        "all rows have one length, so a token mean is 0, too"
        if short == long
        else f"rows have {short} to {long} tokens, so a token mean is not"
    )
    return f"The advantages sum to 0 over the rows, so a mean of row means is 0; {lengths}."


def _pooled(step: AuditedStep) -> LossInputs:
    """The step as one batch on which every ratio is 1."""
    log_probs_BT = stacked([part.inputs.log_probs for part in step.parts])
    return LossInputs(log_probs_BT, log_probs_BT.clone(), None, None, step.advantages(), step.mask_BT)


def _value(batch: LossInputs, key: str, settings: tuple[tuple[str, Setting], ...]) -> float:
    filled = {name: batch.mask.shape[1] if value is None else value for name, value in settings}
    return framework_loss(key, batch, **filled).loss.item()


def _invariant(step: AuditedStep) -> tuple[float, float]:
    """Return −Σ weight · A, and the norm of weight · A, which is the gradient of a PPO loss at the log-probs."""
    weights_BT = step.weights_BT
    if weights_BT is None:
        weights_BT = token_weights(step.mask_BT, SCHEMES[Scheme.TOKEN_MEAN].reduction)
    pushed_BT = torch.where(step.mask_BT > 0, weights_BT * step.advantages(), 0.0)
    return -pushed_BT.sum().item(), pushed_BT.norm().item()
