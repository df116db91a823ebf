"""The recorded batch under one correction between sampler and trainer after another: truncated, or left out, by token and by sequence.

    found = sweep_correction(snapshot)
    found.mismatch.k3              KL(rollout ‖ trainer) in nat
    found.worst[0]                 the token at which the two are furthest apart, with its neighbours
    found.trials[1]                how, at which threshold, what it leaves out, and what the gradient becomes

The loss is the one that the step ran under where the file says so (`nanscope replay --as` names another), with its correction exchanged:
TIS truncates the weight exp Δ at C, IcePop and MIS leave out what lies outside [1/C, C]. Δ = ℓ_old − ℓ_rollout of a sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Setting
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.evaluate import objective
from nanscope.objective.mismatch import Mismatch, effect, mismatch_sums
from nanscope.objective.reduction import Masking
from nanscope.objective.settings import Correction, Gate, Level, LossInputs, LossSettings
from nanscope.plain import show
from nanscope.replay.batch import recorded_batch
from nanscope.replay.own_loss import Objective
from nanscope.replay.under import evaluate, own_gradient
from nanscope.snapshot.step import Snapshot

THRESHOLDS = (1.5, 2.0, 3.0, 5.0, 10.0)  # of a weight; 2 and 3 are what frameworks begin with

WORST = 5  # tokens that are shown, each with `BESIDE` neighbours on either side
BESIDE = 3

DEFAULT = "trl.grpo"  # where the file does not say under which loss the step ran


@dataclass(frozen=True, slots=True)
class Outlier:
    """A token at which sampler and trainer are far apart. delta: nat. neighbours: (token, its Δ, does it count) from before to after it."""

    row: int
    token: int
    delta: float
    trainer: float
    rollout: float
    neighbours: tuple[tuple[int, float, bool], ...]


@dataclass(frozen=True, slots=True)
class CorrectionTrial:
    """One correction. id: its name. threshold: of the weight, None where there is none. dropped, cut: share of the counted tokens that it
    takes out, and whose weight it truncates. sample_size: effective, of the weights that are left, as a share of the tokens.

    change: of the gradient of the counted tokens against that without correction, relative; cosine: of the two. in_force: it is the one
    that the step ran under. note: why it was not run.
    """

    id: str
    label: str
    threshold: float | None
    dropped: float
    cut: float
    sample_size: float
    loss: float | None
    works: bool
    change: float | None
    cosine: float | None
    in_force: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class CorrectionSweep:
    """key: the loss. mismatch: of the batch. worst: tokens, the furthest first. tokens: the counted ones, as (row, token, Δ, probability by
    the trainer, and by the sampler)."""

    key: str
    mismatch: Mismatch
    worst: tuple[Outlier, ...]
    trials: tuple[CorrectionTrial, ...]
    tokens: tuple[tuple[int, int, float, float, float], ...]

    @property
    def sentence(self) -> str:
        """What to take from it."""
        found = self.mismatch
        if not found.tokens:
            return "The sampler has scored none of the counted tokens, so nothing can be said of its distance from the trainer."
        size = found.sample_size or 0.0
        lead = (
            f"At the sampled tokens trainer and sampler are {found.mean:.3g} nat apart on average, {found.largest:.3g} at most; "
            f"KL(rollout ‖ trainer) is about {found.k3:.2g} nat, and the weights are worth {size:.0%} of the tokens."
        )
        if found.largest < 1e-6:
            return f"{lead} There is nothing to correct."
        worst = self.worst[0] if self.worst else None
        at = "" if worst is None else f" The furthest is [{worst.row}, {worst.token}], Δ = {worst.delta:.3g}".replace("-", "−") + "."
        return lead + at

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as JSON data, without the single tokens."""
        own = {name: getattr(self.mismatch, name) for name in ("mean", "k1", "k3", "share_beyond", "share_far", "sample_size")}
        found: dict[str, Any] = show(
            {
                "loss": self.key,
                "mismatch": {**asdict(self.mismatch), **own},
                "worst": [asdict(one) for one in self.worst],
                "trials": [asdict(one) for one in self.trials],
                "sentence": self.sentence,
            }
        )
        return found


def sweep_correction(snapshot: Snapshot, key: str | None = None, **settings: Setting) -> CorrectionSweep:
    """Run a recorded batch under corrections between sampler and trainer.

    key, settings: of the loss, as `framework_loss` takes them; by default those that the step ran under.
    Raises NanscopeError with the slug "missing-role" if the batch has no log-probs of the sampler, and as `loss_inputs` does.
    """
    inputs = recorded_batch(snapshot).inputs
    if inputs.rollout_log_probs is None:
        message = (
            "the batch has no rollout_log_probs (the log-probs that the sampler reported), so there is nothing to correct against: "
            "let the trainer keep them, or name them with scope.tag(rollout_log_probs=…)"
        )
        raise NanscopeError(message, slug="missing-role")
    name, how = _loss_of(snapshot, key, settings)
    if how.kl is not None and inputs.ref_log_probs is None:
        how = replace(how, kl=None)
    counted = inputs.mask > 0
    own = (inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs).detach().float()
    rollout = inputs.rollout_log_probs.detach().float()
    found = Mismatch.of(mismatch_sums(own, rollout, counted, how.correction).tolist())
    free = own_gradient(_objective(name, replace(how, correction=None)), inputs)
    asked = [("none", "no correction", None, None), *_grid()]
    if how.correction is not None:
        asked.insert(1, ("in force", "as the step ran", how.correction.bounds.high, how.correction))
    trials = [_trial(name, how, inputs, free, row) for row in asked]
    return CorrectionSweep(name, found, _worst(own, rollout, counted), tuple(trials), _tokens(own, rollout, counted))


Asked = tuple[str, str, float | None, Correction | None]


def _grid() -> list[Asked]:
    by_token, by_row = Correction(clamp=SAFE), Correction(level=Level.SEQUENCE_SUM, mask_log_weight=Masking.MULTIPLY, clamp=SAFE)
    rows: list[Asked] = []
    for limit in THRESHOLDS:
        band = Bounds(1 / limit, limit)
        geometric = Gate(band, level=Level.SEQUENCE_MEAN, clamp=SAFE)
        rows += [
            (f"tis:{limit:g}", "token weights, truncated", limit, replace(by_token, bounds=Bounds(high=limit))),
            (f"icepop:{limit:g}", "token weights, left out outside", limit, replace(by_token, bounds=band, drop=True)),
            (f"seq-tis:{limit:g}", "sequence weights, truncated", limit, replace(by_row, bounds=Bounds(high=limit))),
            (f"seq-mask:{limit:g}", "sequence weights, left out above", limit, replace(by_row, bounds=Bounds(high=limit), drop=True)),
            (
                f"geo-mask:{limit:g}",
                "token weights where the sequence's mean is inside",
                limit,
                replace(by_token, gates=(geometric,)),
            ),
        ]
    kinds = [row[0].partition(":")[0] for row in rows]
    return sorted(rows, key=lambda row: kinds.index(row[0].partition(":")[0]))


def _loss_of(snapshot: Snapshot, key: str | None, settings: dict[str, Setting]) -> tuple[str, LossSettings]:
    if key is not None:
        return key, framework_settings(key, **settings)
    recorded = snapshot.objective
    if recorded.get("key") in LOSSES:
        try:
            return recorded["key"], framework_settings(recorded["key"], **recorded.get("settings", {}))
        except NanscopeError:  # settings of another release, or of a hostile file
            return recorded["key"], framework_settings(recorded["key"])
    return DEFAULT, framework_settings(DEFAULT)


def _objective(key: str, how: LossSettings) -> Objective:
    return Objective(key, key, lambda inputs: objective(inputs, how).loss)


def _trial(key: str, how: LossSettings, inputs: LossInputs, free: Tensor, asked: Asked) -> CorrectionTrial:
    name, label, threshold, correction = asked
    own = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
    counted = inputs.mask > 0
    weight, cut, dropped = torch.ones_like(own), 0.0, 0.0
    if correction is not None and inputs.rollout_log_probs is not None:
        sums = Mismatch.of(mismatch_sums(own, inputs.rollout_log_probs, counted, correction).tolist())
        cut, dropped = sums.share_cut or 0.0, sums.share_dropped or 0.0
        weight, kept = effect(correction, own.detach(), inputs.rollout_log_probs.detach(), counted)
        weight = weight * (kept > 0)
    left = torch.nan_to_num(weight.detach()[counted].double())
    size = float(left.sum().square() / (max(1, left.numel()) * left.square().sum())) if bool(left.any()) else 0.0
    asked_for = _objective(key, replace(how, correction=correction))
    outcome = evaluate(asked_for, inputs)
    change = cosine = None
    if outcome.loss is not None and outcome.works:
        grad = own_gradient(asked_for, inputs)[counted].double()
        base = free[counted].double()
        norms = float(grad.norm()), float(base.norm())
        change = float((grad - base).norm()) / norms[1] if norms[1] else None
        cosine = float(grad @ base) / (norms[0] * norms[1]) if all(norms) else None
    return CorrectionTrial(
        name, label, threshold, dropped, cut, size, outcome.loss, outcome.works, change, cosine, name == "in force", outcome.note
    )


def _worst(own: Tensor, rollout: Tensor, counted: Tensor) -> tuple[Outlier, ...]:
    """The tokens that are furthest apart, one that the sampler has not scored left out; of neighbours the further one."""
    delta = own - rollout
    apart = torch.where(counted & torch.isfinite(delta), delta.abs(), -math.inf)
    found: list[Outlier] = []
    for flat in apart.flatten().argsort(descending=True)[: 4 * WORST].tolist():
        row, token = divmod(flat, delta.shape[1])
        near = any(one.row == row and abs(one.token - token) <= BESIDE for one in found)
        if len(found) == WORST or not math.isfinite(float(apart[row, token])) or not float(apart[row, token]):
            break
        if near:
            continue
        columns = range(max(0, token - BESIDE), min(delta.shape[1], token + BESIDE + 1))
        neighbours = tuple((column, float(delta[row, column]), bool(counted[row, column])) for column in columns if column != token)
        found.append(Outlier(row, token, float(delta[row, token]), float(own[row, token]), float(rollout[row, token]), neighbours))
    return tuple(found)


MOST = 4096  # tokens that are drawn


def _tokens(own: Tensor, rollout: Tensor, counted: Tensor) -> tuple[tuple[int, int, float, float, float], ...]:
    spots: Sequence[list[int]] = counted.nonzero().tolist()
    spots = spots[:: max(1, len(spots) // MOST)]
    return tuple(
        (row, token, float(own[row, token] - rollout[row, token]), float(own[row, token].exp()), float(rollout[row, token].exp()))
        for row, token in spots
    )
