"""One step as its parts: the loss and the weight of every token, per micro-batch and rank, and what that makes of the whole.

Shapes: B rows, T response tokens. A part is one micro-batch of one rank. All sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanscope.audit.repeat import RecordedLoss, Repeatable, RuledLoss
from nanscope.audit.weights import (
    SAME,
    SCHEMES,
    Emptied,
    Pattern,
    Recognised,
    Scheme,
    emptied,
    is_constant,
    recognise,
    token_weights,
    weights_of,
)
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import framework_settings
from nanscope.locate.trace import Trace
from nanscope.objective.evaluate import objective
from nanscope.objective.reduction import Over, Reduction, reduce
from nanscope.objective.settings import LossInputs, LossSettings, with_token_values
from nanscope.program.run import Run
from nanscope.replay.batch import batch_of
from nanscope.snapshot.step import Snapshot

NEARLY = 1e-6  # of the mean |loss| of a token: less is rounding


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch of one rank.

    weights_BT: of the tokens in its own loss, None if unknown. share: what the trainer multiplies its loss by to get that of the step.
    drift: the largest |Δ| of a valid token in nat; None if there is none. loss: as recorded. per_row: the loss has one value per row.
    same: relative difference of two weights that is rounding. other_terms: the recorded loss holds more than these tokens' losses.
    left_out: valid tokens without a finite loss, which are 0 here. repeated: the loss itself, to be run again; None if it is not known.
    """

    source: str
    rank: int
    share: float
    inputs: LossInputs
    mask_BT: Tensor
    loss_BT: Tensor
    left_out: int
    drift: float | None
    weights_BT: Tensor | None = None
    recognised: Recognised | None = None
    same: float = SAME
    loss: float | None = None
    per_row: bool = False
    other_terms: bool = False
    repeated: Repeatable | None = None

    @property
    def tokens(self) -> int:
        return int(self.mask_BT.sum())

    @property
    def empty_rows(self) -> int:
        return empty_rows(self.mask_BT)

    def reduced(self, scheme: Scheme) -> float:
        """The loss of this part alone under a reduction."""
        return reduce(self.loss_BT, self.mask_BT, SCHEMES[scheme].reduction).item()

    def value(self) -> float | None:
        """The loss of this part alone under its own weights."""
        return None if self.weights_BT is None else masked(self.weights_BT * self.loss_BT, self.mask_BT).sum().item()


def part_of(inputs: LossInputs, how: LossSettings, *, source: str, rank: int, share: float, weigh: bool) -> Part:
    """Evaluate an objective on one batch, token by token. weigh: its reduction is the one that is judged."""
    clean, how = _clean(inputs), _as_mean(how)
    with torch.no_grad():
        loss = objective(clean, how).token_loss
    mask_BT = clean.mask
    loss_BT, left_out = _finite(loss, mask_BT)
    wide, repeated = loss.shape[-1], RuledLoss(inputs, how)
    part = Part(source, rank, share, clean, mask_BT, loss_BT, left_out, _drift(clean), per_row=wide < mask_BT.shape[-1], repeated=repeated)
    if not weigh:
        return part
    weights_BT = token_weights(mask_BT, how.reduction)
    return replace(part, weights_BT=weights_BT, recognised=recognise(weights_BT, mask_BT))


def recorded_part(snapshot: Snapshot, source: str, share: float) -> tuple[Part, Emptied]:
    """Read a part off a file: the loss of each token and its weight from the program.

    Where that is opaque they are those of the framework's loss that the file names, if they give the recorded loss, or else of PPO without
    weights.
    Raises NanscopeError with the slug "missing-role" if the file does not hold the batch.
    """
    program = snapshot.program
    trace = Trace(program, program.execute(snapshot.tensors) if program.calls else Run({}))
    batch = batch_of(trace)
    inputs = batch.inputs
    part = part_of(inputs, LossSettings(), source=source, rank=snapshot.rank, share=share, weigh=False)
    part = replace(part, drift=None if inputs.old_log_probs is None else part.drift)  # a loss without a ratio has no first step
    part = replace(part, repeated=RecordedLoss(trace, batch.pushed_by))
    part = replace(part, loss=None if snapshot.loss is None else snapshot.loss.double().sum().item())
    found = weights_of(trace, part.mask_BT)
    if found is None:
        return _by_rule(snapshot, inputs, part) or part, Emptied(None, None)
    loss_BT, left_out = _finite(found.token_loss_BT, part.mask_BT)
    steps, horizons = steps_of(snapshot.settings), _horizons(snapshot.settings)
    known = recognise(found.weights_BT, part.mask_BT, steps=steps, horizons=horizons, same=found.same)
    part = replace(part, loss_BT=loss_BT, left_out=left_out, weights_BT=found.weights_BT, recognised=known)
    part = replace(part, same=found.same, other_terms=not found.complete)
    return part, emptied(trace, part.mask_BT)


def _by_rule(snapshot: Snapshot, inputs: LossInputs, part: Part) -> Part | None:
    """The part under the framework's loss that the file names; None if it names none, or not the one that gave the recorded loss."""
    key, settings = snapshot.objective.get("key"), snapshot.objective.get("settings")
    if not isinstance(key, str) or not isinstance(settings, dict) or part.loss is None:
        return None
    try:
        ruled = part_of(inputs, framework_settings(key, **settings), source=part.source, rank=part.rank, share=part.share, weigh=True)
    except NanscopeError:
        return None  # settings of another release, or a tensor that the file lacks
    value = ruled.value()
    if value is None or not abs(value - part.loss) <= 1e-3 * abs(part.loss):
        return None
    return replace(ruled, loss=part.loss, drift=part.drift, repeated=part.repeated)


def _as_mean(how: LossSettings) -> LossSettings:
    """Return settings whose reduction says how much a token weighs: SkyRL has it in the advantages, a loss per row has none."""
    if how.scale_advantages is not None:
        how = replace(how, scale_advantages=None, reduction=how.scale_advantages)
    if how.reduction.over is Over.VALUES:
        how = replace(how, reduction=Reduction(Over.ROW_MEANS, factor=how.reduction.factor))
    return how


def _clean(inputs: LossInputs) -> LossInputs:
    """Return the batch in float64 with 0 at masked tokens: what the loss does not count cannot reach these figures."""
    valid_BT = inputs.mask > 0

    def kept(x_BT: Tensor) -> Tensor:
        return masked(x_BT.detach().to(torch.float64), valid_BT)

    return replace(
        with_token_values(inputs, kept), advantages=inputs.advantages.detach().to(torch.float64), mask=valid_BT.to(torch.float64)
    )


def masked(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return x where the loss counts it, and 0 elsewhere."""
    return torch.where(mask_BT > 0, x_BT, 0.0)


def _finite(token_loss: Tensor, mask_BT: Tensor) -> tuple[Tensor, int]:
    loss_BT = token_loss.detach().to(torch.float64).expand(mask_BT.shape)
    bad_BT = ~torch.isfinite(loss_BT)
    return masked(torch.where(bad_BT, 0.0, loss_BT), mask_BT), int((bad_BT & (mask_BT > 0)).sum())


def _drift(inputs: LossInputs) -> float | None:
    delta_N = (inputs.log_probs - (inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs))[inputs.mask > 0]
    return delta_N.abs().max().item() if len(delta_N) else None


def steps_of(settings: Mapping[str, Any]) -> int:
    """Return the micro-batches of a step and rank that a trainer's settings tell, 1 if they tell none."""
    value = settings.get("gradient_accumulation_steps")
    return value if isinstance(value, int) and value > 0 else 1


def _horizons(settings: Mapping[str, Any]) -> tuple[float, ...]:
    found = (settings.get(name) for name in ("max_completion_length", "loss_scale_factor", "max_seq_len"))
    return tuple(float(value) for value in found if isinstance(value, (int, float)) and value > 0)


@dataclass(frozen=True, slots=True)
class AuditedStep:
    """All parts of one step.

    loss_BT, mask_BT: rows of all parts under each other. settings: of the trainer, by name. key: the loss that is judged, if one was named.
    nothing: what the loss does without tokens; None if that is not known.
    """

    parts: tuple[Part, ...]
    loss_BT: Tensor
    mask_BT: Tensor
    settings: Mapping[str, Any]
    group_size: int | None
    nothing: Emptied | None
    key: str | None

    @classmethod
    def of(
        cls, parts: list[Part], settings: Mapping[str, Any], group_size: int | None, nothing: Emptied | None, key: str | None
    ) -> AuditedStep:
        """Put parts together."""
        loss_BT, mask_BT = stacked([part.loss_BT for part in parts]), stacked([part.mask_BT for part in parts])
        return cls(tuple(parts), loss_BT, mask_BT, settings, group_size, nothing, key)

    @property
    def known(self) -> bool:
        """Are the weights of all parts known?"""
        return all(part.weights_BT is not None for part in self.parts)

    @property
    def hidden(self) -> bool:
        """Does a file not show how its loss was reduced?"""
        return not self.known and any(part.loss is not None for part in self.parts)

    @property
    def recognised(self) -> tuple[Recognised, ...]:
        """What the weights of the parts that have tokens turned out to be."""
        return tuple(part.recognised for part in self.parts if part.recognised is not None and part.tokens) if self.known else ()

    @property
    def pattern(self) -> Pattern | None:
        """What decides the weight of a token within every part; None if unknown."""
        shared = [pattern for pattern in Pattern if self.recognised and all(pattern in known.divisors for known in self.recognised)]
        return next(iter(shared), Pattern.OTHER if self.recognised else None)

    @property
    def used(self) -> tuple[Scheme, ...]:
        """The schemes that all parts agree on."""
        named = [known.schemes for known in self.recognised]
        return tuple(scheme for scheme in named[0] if all(scheme in other for other in named)) if named else ()

    @property
    def drops_empty_rows(self) -> bool:
        """Is it a row mean that does not count rows without a token?"""
        return Scheme.FILLED_ROW_MEAN in self.used and Scheme.ROW_MEAN not in self.used

    @property
    def token_mean(self) -> float | None:
        """The loss with one weight for every valid token of the step; None if there is none."""
        count = self.mask_BT.sum().item()
        return self.loss_BT.sum().item() / count if count else None

    @property
    def loss(self) -> float | None:
        """The loss of the step as it was reduced."""
        values = [value * part.share for part in self.parts if (value := part.value()) is not None]
        return math.fsum(values) if self.known and all(map(math.isfinite, values)) else None

    @property
    def weights_BT(self) -> Tensor | None:
        """The weight of every token in the loss of the step, 0 where masked."""
        weights = [masked(part.weights_BT, part.mask_BT) * part.share for part in self.parts if part.weights_BT is not None]
        return stacked(weights) if self.known else None

    @property
    def size(self) -> float:
        """Mean |loss| of a token."""
        return self.loss_BT.abs().sum().item() / max(self.mask_BT.sum().item(), 1.0)

    @property
    def ranks(self) -> tuple[tuple[Part, ...], ...]:
        """The parts, rank by rank."""
        return tuple(tuple(part for part in self.parts if part.rank == rank) for rank in dict.fromkeys(part.rank for part in self.parts))

    def averaged(self, of: Callable[[Part], float]) -> float:
        """Return the mean over the micro-batches of each rank, then over ranks."""
        return math.fsum(math.fsum(map(of, parts)) / len(parts) for parts in self.ranks) / len(self.ranks)

    def share_of(self, part: Part) -> float:
        """Return what such a mean multiplies a part by."""
        return 1.0 / len(self.ranks) / sum(other.rank == part.rank for other in self.parts)

    def whole(self, scheme: Scheme) -> float:
        """Return the loss of the step in one piece under a reduction."""
        return reduce(self.loss_BT, self.mask_BT, SCHEMES[scheme].reduction).item()

    def times(self, value: float, base: float | None) -> float | None:
        """Return value / base, None where one is nothing but rounding beside the losses that it is made of."""
        return value / base if base is not None and min(abs(base), abs(value)) > 10 * NEARLY * self.size else None

    @property
    def same(self) -> float:
        """The relative difference of two weights that is rounding."""
        return max(part.same for part in self.parts)

    def split(self, scheme: Scheme) -> Tensor:
        """Return the weight of every token if a reduction is taken of each part and averaged, [B, T]."""
        how = SCHEMES[scheme].reduction
        return stacked([token_weights(part.mask_BT, how) * self.share_of(part) for part in self.parts])

    def adds_up(self, scheme: Scheme) -> bool:
        """Does averaging parts give every token the weight that it has in the whole step? A sum may come out smaller by a constant."""
        whole_N = token_weights(self.mask_BT, SCHEMES[scheme].reduction)[self.mask_BT > 0]
        split_N = self.split(scheme)[self.mask_BT > 0]
        return is_constant(split_N / whole_N) and (scheme is Scheme.TOTAL or torch.allclose(split_N.sum(), whole_N.sum(), rtol=1e-4))

    def extremes(self) -> tuple[int, int]:
        """Return the shortest and the longest row that have a token."""
        tokens_B = self.mask_BT.sum(-1)
        return int(torch.where(tokens_B > 0, tokens_B, math.inf).argmin()), int(tokens_B.argmax())

    def advantages(self) -> Tensor:
        """Return those of all parts, [B, T], or [B, 1] where every part has one per row."""
        given = [a.unsqueeze(1) if (a := part.inputs.advantages).dim() == 1 else a for part in self.parts]
        if all(advantages.shape[1] == 1 for advantages in given):
            return torch.cat(given)
        return stacked([a.expand(part.mask_BT.shape) for a, part in zip(given, self.parts, strict=True)])


def stacked(tensors: list[Tensor]) -> Tensor:
    """Return rows under each other, padded with 0 on the right to one width."""
    wide = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([torch.nn.functional.pad(tensor, (0, wide - tensor.shape[1])) for tensor in tensors])


def empty_rows(mask_BT: Tensor) -> int:
    """Return how many rows have no valid token."""
    return int((mask_BT.sum(-1) == 0).sum())
