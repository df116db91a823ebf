"""The recorded batch under other objectives: would another framework's loss, or your own, have survived it?

    found = replay_under(snapshot, ["verl.vanilla", "trl.dapo:beta=0.04"], ["mymodule:my_loss"])
    found.outcomes[0].sentence      'verl.vanilla would have survived this batch: loss −0.09742, and a finite gradient at every token.'

Each objective runs forward and backward on the batch that the file holds (`inputs`). The gradient is that of the log-probs: one that is
not finite, at a token that counts or at one that does not, makes every weight non-finite in the model's backward.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError, one_line
from nanscope.frameworks.losses import LOSSES, framework_settings
from nanscope.frameworks.rows import Setting
from nanscope.given import refused, several, texts
from nanscope.objective.evaluate import objective
from nanscope.objective.settings import Anchor, LossInputs, LossSettings, on_leaf, with_token_values
from nanscope.plain import show
from nanscope.replay.batch import RecordedBatch, recorded_batch
from nanscope.replay.own_loss import Objective, on_batch, own_objective
from nanscope.shown import Shown
from nanscope.snapshot.anywhere import loaded
from nanscope.snapshot.observation import Row
from nanscope.snapshot.step import Snapshot
from nanscope.text import count, is_spared

if TYPE_CHECKING:
    import pandas

_WORDS: dict[str, Setting] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an objective made of the batch.

    loss: None if it could not be run; `note` says why. bad_counted, bad_masked: tokens whose gradient is not finite, of `counted` and
    `masked` ones. distortion: largest change of a counted token's gradient against the same objective in float64 with the mask applied
    to the log-probs first, relative to the largest there; 0 within rounding, None where it cannot be measured.
    """

    id: str
    label: str
    loss: float | None
    bad_counted: int
    counted: int
    bad_masked: int
    masked: int
    distortion: float | None
    note: str = ""

    @property
    def works(self) -> bool:
        """Are the loss and every gradient finite?"""
        return self.loss is not None and math.isfinite(self.loss) and not self.bad_counted and not self.bad_masked

    @property
    def proven(self) -> bool:
        """Does it work, and was it measured that the counted tokens have the gradient that they should?"""
        return self.works and is_spared(self.distortion)

    @property
    def row(self) -> Row:
        """The outcome as a row of a replay; what is counted is tokens."""
        bad, total = self.bad_counted + self.bad_masked, self.counted + self.masked
        name = self.id.partition(":")[0] if self.id.partition(":")[0] in LOSSES else self.id  # the label tells the settings
        return Row(name, self.label, "objective", self.loss, bad, total, self.distortion, self.works, self.note)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON data, with its sentence."""
        return {name: show(getattr(self, name)) for name in (*self.__slots__, "works", "sentence")}

    @property
    def sentence(self) -> str:
        """Would it have survived this batch?"""
        if self.loss is None:
            return f"{self.id} was not run: {self.note}."
        loss = f"{self.loss:.4g}".replace("-", "−").replace("nan", "NaN")
        name = f"{self.id} ({self.note})" if self.note else self.id
        if self.works and not self.proven and self.distortion is not None:
            return f"{name} would have survived this batch: loss {loss}, but the gradient of counted tokens is not what it should be."
        if self.works:
            return f"{name} would have survived this batch: loss {loss}, and a finite gradient at every token."
        where = " and ".join(words for words in (_tokens(self.bad_counted, "counted"), _tokens(self.bad_masked, "masked")) if words)
        if not where:
            return f"{name} would not have survived this batch: loss {loss}, though every gradient is finite."
        if math.isfinite(self.loss):
            return f"{name} would not have survived this batch: the loss looks fine ({loss}), the gradient is non-finite at {where}."
        return f"{name} would not have survived this batch: loss {loss}, and a non-finite gradient at {where}."


def _tokens(number: int, kind: str) -> str:
    return f"{number} {kind} token{'' if number == 1 else 's'}" if number else ""


@dataclass(frozen=True, slots=True, repr=False)
class Others(Shown):
    """The batch that was read from the file, and what every objective made of it, in the order asked."""

    batch: RecordedBatch
    outcomes: tuple[Outcome, ...]

    def __str__(self) -> str:
        return one_line(self.sentence)

    @property
    def sentence(self) -> str:
        """Which objectives would have survived the batch, in one line."""
        survived = [outcome.id for outcome in self.outcomes if outcome.works]
        of = f"{len(survived)} of {count(len(self.outcomes), 'objective')} would have survived this batch"
        return f"{of}: {', '.join(survived)}" if survived else of

    def frame(self) -> pandas.DataFrame:
        """Return the outcomes as a pandas frame, indexed by their ids: the fields of `Outcome`, with works, proven and sentence."""
        import pandas

        columns = [*Outcome.__slots__, "works", "proven", "sentence"]
        return pandas.DataFrame([[getattr(one, name) for name in columns] for one in self.outcomes], columns=columns).set_index("id")


Own = str | Callable[..., object]


def replay_under(snapshot: Snapshot | str | os.PathLike[str], asked: str | Sequence[str] = (), own: Own | Sequence[Own] = ()) -> Others:
    """Run a recorded batch under other objectives.

    snapshot: a saved step, its path or address.
    asked: keys of `framework_loss` with settings, "verl.vanilla:clip_ratio=0.3,loss_agg_mode=token-mean"; a framework alone, "verl",
    stands for all its losses. own: losses of your own, as functions or as "module:function", see `own_objective`.
    Of either, one may be given as it is. Raises NanscopeError for an unknown key or setting, for a function that cannot be used, and as
    `loss_inputs` does.
    """
    asked = texts("asked", asked, "keys of losses, as verl.vanilla:clip_ratio=0.3")
    mine = [own] if isinstance(own, str) or callable(own) else several("own", own, OWN)
    snapshot = loaded(snapshot, "replay_under(…)")
    objectives = [found for text in asked for found in parse_objective(text)] + [_own(one) for one in mine]
    batch = recorded_batch(snapshot)
    return Others(batch, tuple(evaluate(objective, batch.inputs) for objective in objectives))


OWN = "losses of your own: functions, or their names, as mymodule:my_loss"


def _own(given: Own) -> Objective:
    if isinstance(given, str):
        return own_objective(given)
    if not callable(given):
        raise refused("own", OWN, given)
    name = getattr(given, "__qualname__", type(given).__qualname__)
    return Objective(name, f"your own, {name}", on_batch(given, name))


def parse_objective(text: str) -> list[Objective]:
    """Return the objectives that a command line names: `verl.vanilla`, `verl.vanilla:clip_ratio=0.3`, or `verl` for all of them.

    Raises NanscopeError for an unknown key, and for a setting that a loss named in full does not have.
    """
    key, _, given = text.partition(":")
    settings = _settings(text, given)
    keys = [key] if key in LOSSES else [known for known in LOSSES if known.startswith(f"{key}.")]
    if not keys:
        framework_settings(key)  # raises, and says which keys there are
    if key in LOSSES:
        framework_settings(key, **settings)  # a wrong setting is wrong usage, not an outcome
    return [_framework(name, settings, text if name == key else text.replace(key, name, 1)) for name in keys]


def named_loss(text: str) -> tuple[str, dict[str, Setting]]:
    """Return key and settings of one loss that a command line names in full: `verl.vanilla:clip_ratio=0.3`.

    Raises NanscopeError as `parse_objective` does, and for what stands for several losses.
    """
    key, _, given = text.partition(":")
    settings = _settings(text, given)
    framework_settings(key, **settings)
    return key, settings


def _settings(text: str, given: str) -> dict[str, Setting]:
    return dict(_setting(part, text) for part in given.split(",") if part.strip())


def _framework(key: str, settings: Mapping[str, Setting], text: str) -> Objective:
    row = LOSSES[key]

    def loss(inputs: LossInputs) -> Tensor:
        how = framework_settings(key, **settings)
        return objective(inputs, replace(how, kl=None) if _lacks_reference(how, inputs) else how).loss

    def without(inputs: LossInputs) -> str:
        how = framework_settings(key, **settings)
        if _lacks_reference(how, inputs):
            return "without its KL term, since the batch has no reference log-probs"
        return "which has no KL term under these settings" if how.kl is None and inputs.ref_log_probs is not None else ""

    framework = key.split(".")[0]
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    label = f"the loss of {framework} {row.version}" + (f", {given}" if given else "")
    return Objective(text, label, loss, without)


def _lacks_reference(settings: LossSettings, inputs: LossInputs) -> bool:
    """Is there a KL to a reference that the batch does not have, beside a policy term that can be run without?"""
    kl = settings.kl
    return kl is not None and kl.against is Anchor.REF and inputs.ref_log_probs is None and settings.surrogate is not None


def _setting(part: str, text: str) -> tuple[str, Setting]:
    name, equals, value = (word.strip() for word in part.partition("="))
    if not equals or not name.isidentifier() or not value:
        raise NanscopeError(f"{text!r}: settings are written as name=value,name=value", slug="bad-setting")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
    return name, read if isinstance(read, bool | int | float) else value


def evaluate(asked: Objective, inputs: LossInputs) -> Outcome:
    """Run one objective on a batch, forward and backward. What a framework's loss lacks in the batch becomes a note.

    Raises NanscopeError if a function of the user's own fails.
    """
    counts = inputs.mask > 0
    counted, masked = int(counts.sum()), int((~counts).sum())
    try:
        loss, grad = _gradient(asked, on_leaf(inputs))
    except NanscopeError as error:
        if error.slug == "bad-loss":
            raise
        return Outcome(asked.id, asked.label, None, 0, counted, 0, masked, None, str(error).partition(": pass LossInputs")[0])
    bad = ~torch.isfinite(grad)
    return Outcome(
        id=asked.id,
        label=asked.label,
        loss=loss,
        bad_counted=int((bad & counts).sum()),
        counted=counted,
        bad_masked=int((bad & ~counts).sum()),
        masked=masked,
        distortion=distortion(grad, asked, inputs),
        note=asked.without(inputs),
    )


def own_gradient(asked: Objective, inputs: LossInputs) -> Tensor:
    """Return the gradient of the log-probs under an objective, [B, T]."""
    return _gradient(asked, on_leaf(inputs))[1]


def _gradient(asked: Objective, inputs: LossInputs) -> tuple[float, Tensor]:
    loss = asked.loss(inputs)
    try:
        (grad,) = torch.autograd.grad(loss, inputs.log_probs, allow_unused=True)
    except RuntimeError as error:
        raise NanscopeError(f"backward of {asked.id} failed: {error}", slug="bad-loss") from error
    return float(loss.detach()), torch.zeros_like(inputs.log_probs) if grad is None else grad


def distortion(grad: Tensor, reference: Objective, inputs: LossInputs, at: Tensor | None = None) -> float | None:
    """Return the largest change of a token's gradient against that of `reference` in float64 with the mask applied first, relative to the
    largest there; 0 within rounding, None if the reference is not finite.

    at: the tokens to compare, [B, T] bool; those that the loss counts by default.
    """
    where = inputs.mask > 0 if at is None else at
    try:
        mended = masked_first(inputs)
        _, wanted = _gradient(reference, on_leaf(mended, torch.float64))
        _, plain = _gradient(reference, on_leaf(mended))
    except NanscopeError:
        return None
    if not bool(where.any()) or not bool(torch.isfinite(wanted[where]).all()):
        return None
    scale = float(wanted[where].abs().max()) or 1.0
    relative, noise = (float((found.double() - wanted)[where].abs().max()) / scale for found in (grad, plain))
    return 0.0 if relative <= 2 * noise else relative if math.isfinite(relative) else None


def masked_first(inputs: LossInputs) -> LossInputs:
    """Return the batch with 0 for every log-prob and entropy of a masked token: nothing can overflow where nothing counts."""
    counts = inputs.mask > 0
    return with_token_values(inputs, lambda tensor: torch.where(counts, tensor.detach(), torch.zeros_like(tensor)))
