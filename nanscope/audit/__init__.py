"""The audit of normalisation: what a step's loss is a mean of, which tokens weigh more than others, and what would change it.

    audit([first, second])                                       # two micro-batches of one step
    audit([first, second], "trl.grpo", ranks=[0, 1])             # of two ranks, under a framework's own loss
    audit_snapshots([load(file) for file in files])              # as recorded: weights are read off the trainer's program

    Finding(slug='micro_batches_unequal', effect=CHANGES, sentence='The token means of 2 micro-batches (100 and 900 tokens), averaged, …')

Notable: nothing here is a matter of taste. A finding compares numbers of this batch: the loss with what the same tokens give when every
one of them weighs the same, or when a row, a micro-batch or a rank is empty.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from nanscope.audit.denominators import denominators, emptied_key
from nanscope.audit.findings import RULES
from nanscope.audit.model import Audit, Denominator, Effect, Finding, PartFigures, Reduced, Sure
from nanscope.audit.step import AuditedStep, Part, empty_rows, part_of, recorded_part
from nanscope.audit.weights import SCHEMES, Emptied, Pattern, Scheme, is_constant
from nanscope.audit.words import use
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import framework_settings
from nanscope.frameworks.rows import Setting
from nanscope.given import an, several, whole
from nanscope.objective.settings import LossInputs, LossSettings
from nanscope.snapshot.anywhere import loaded
from nanscope.snapshot.step import Snapshot, place
from nanscope.text import count, number

BARE = ("no_tokens", "row_without_floor", "batch_without_floor")  # findings of a denominator that becomes 0

__all__ = ["Audit", "Denominator", "Effect", "Finding", "PartFigures", "Reduced", "Sure", "audit", "audit_snapshots"]


def audit(
    batches: Sequence[LossInputs],
    key: str | None = None,
    *,
    ranks: Sequence[int] | None = None,
    group_size: int | None = None,
    trainer: Mapping[str, Any] | None = None,
    **settings: Setting,
) -> Audit:
    """Audit the micro-batches of one step.

    batches:    in the order of the step. ranks: the rank of each, None if all are of one.
    key:        a loss of `framework_loss`, with its `settings`: its own reduction is judged. None: the PPO loss, under every reduction.
                Micro-batches are averaged, or summed where the settings divide by counts of the whole step; ranks are averaged.
    group_size: completions of one prompt, which stand together; None tries all. trainer: settings by name, where advantages are decided.
    Raises NanscopeError for no batch, for ranks that do not fit, and as `framework_loss` does.
    """
    batches = [an("audit(…)", one, LossInputs, BATCHES) for one in several("audit(…)", batches, BATCHES)]
    if not batches:
        raise NanscopeError("an audit needs at least one batch", slug="empty-audit")
    of_rank = [0] * len(batches) if ranks is None else [whole("ranks", rank, RANKS) for rank in several("ranks", ranks, RANKS)]
    _check_group(group_size)
    if len(of_rank) != len(batches):
        raise NanscopeError(
            f"there are {count(len(batches), 'batch')} and {count(len(of_rank), 'rank')}: give one for each", slug="shape-mismatch"
        )
    how = LossSettings() if key is None else framework_settings(key, **settings)
    summed = key is not None and (how.reduction.count is not None or how.reduction.factor != 1.0)
    shares = [1.0 / len(set(of_rank)) / (1 if summed else of_rank.count(rank)) for rank in of_rank]
    parts = [
        part_of(batch, how, source=f"batch {n}", rank=rank, share=share, weigh=key is not None)
        for n, (batch, rank, share) in enumerate(zip(batches, of_rank, shares, strict=True), start=1)
    ]
    nothing = None if key is None else emptied_key(key, settings)
    return _audit(None, AuditedStep.of(parts, {**dict(trainer or {}), **settings}, group_size, nothing, key))


def audit_snapshots(
    snapshots: Sequence[Snapshot | str | os.PathLike[str]], sources: Sequence[str] = (), *, group_size: int | None = None
) -> Audit:
    """Audit one step from its snapshots: one per rank, or several micro-batches, whose losses the trainer adds up.

    snapshots: saved steps, their paths or addresses. sources: what to call them, usually their paths. group_size: as in `audit`.
    Raises NanscopeError if they are of different steps, and with the slug "missing-role" if a file does not hold its batch.
    """
    given = several("audit_snapshots(…)", snapshots, "snapshots of one step, or their paths")
    if not given:
        raise NanscopeError("an audit needs at least one snapshot", slug="empty-audit")
    _check_group(group_size)
    loaded_ones = [loaded(one, "audit_snapshots(…)") for one in given]
    sources = list(sources) or [one.file_name if isinstance(one, Snapshot) else os.fspath(one) for one in given]
    return _audit_loaded(loaded_ones, sources, group_size)


BATCHES = "the batches (LossInputs) of one step, in order"
RANKS = "the rank of each batch"


def _check_group(size: int | None) -> None:
    if size is not None:
        whole("group_size", size, "a number of completions, at least one, or None", 1)


def _audit_loaded(snapshots: Sequence[Snapshot], names: Sequence[str], group_size: int | None) -> Audit:
    parts = [(snapshot.step, snapshot.rank, snapshot.part, snapshot.update) for snapshot in snapshots]
    if len(set(parts)) < len(parts):
        twice = next(known for known in parts if parts.count(known) > 1)
        message = "two files are of step {}, rank {}, backward pass {}: the same one twice, or of two runs".format(*twice)
        raise NanscopeError(message, slug="same-part")
    steps = [place(step, update).removeprefix("step ") for step, update in sorted({(one.step, one.update) for one in snapshots})]
    if len(steps) > 1:
        message = f"these files are of the steps {', '.join(steps)}: an audit is of one step, with all its micro-batches and ranks"
        raise NanscopeError(message, slug="different-steps")
    share = 1.0 / len({snapshot.rank for snapshot in snapshots})
    read = [_read(snapshot, name, share) for snapshot, name in zip(snapshots, names, strict=True)]
    named = snapshots[0].objective.get("settings")
    settings = {**snapshots[0].settings, **(named if isinstance(named, dict) else {})}
    step = AuditedStep.of([part for part, _ in read], settings, group_size, read[0][1], None)
    return _audit(snapshots[0].step, step)


def _read(snapshot: Snapshot, name: str, share: float) -> tuple[Part, Emptied]:
    try:
        return recorded_part(snapshot, name, share)
    except NanscopeError as error:
        raise NanscopeError(f"{name}: {error}", slug=error.slug) from None


def _audit(number_of_step: int | None, step: AuditedStep) -> Audit:
    findings = [finding for rule in RULES for finding in rule(step)]
    return Audit(
        step=number_of_step,
        ranks=len(step.ranks),
        rows=len(step.mask_BT),
        empty_rows=empty_rows(step.mask_BT),
        tokens=int(step.mask_BT.sum()),
        left_out=sum(part.left_out for part in step.parts),
        token_mean=step.token_mean,
        reduction=_in_words(step),
        used=step.used,
        loss=step.loss,
        recorded=step.parts[0].loss if len(step.parts) == 1 else None,
        parts=tuple(_figures(part) for part in step.parts),
        reductions=tuple(_reduced(step, scheme) for scheme in Scheme) if step.token_mean is not None else (),
        denominators=denominators() if any(finding.slug in BARE for finding in findings) else (),
        findings=tuple(sorted(findings, key=lambda finding: list(Effect).index(finding.effect))),
    )


def _figures(part: Part) -> PartFigures:
    mean = part.loss_BT.sum().item() / part.tokens if part.tokens else None
    loss = part.value() if part.loss is None else part.loss
    return PartFigures(part.source, part.rank, len(part.mask_BT), part.empty_rows, part.tokens, mean, loss)


def _reduced(step: AuditedStep, scheme: Scheme) -> Reduced:
    info = SCHEMES[scheme]
    averaged = step.averaged(lambda part: part.reduced(scheme))
    short, long = step.extremes()
    weights_BT = step.split(scheme)
    return Reduced(
        scheme=scheme,
        title=info.title,
        averaged=averaged,
        whole=step.whole(scheme),
        factor=step.times(averaged, step.token_mean),
        row_weight=(weights_BT[short].max() / weights_BT[long].max()).item(),
        adds_up=step.adds_up(scheme),
        adds_up_if=info.adds_up,
        count=info.count,
        uses=tuple(use(key, settings) for key, settings in info.uses),
    )


def _in_words(step: AuditedStep) -> str | None:
    """What the loss is, as one reads it aloud."""
    if not step.recognised:
        return _by_value(step)
    first = step.recognised[0]
    if step.used:
        times = "" if first.factor == 1.0 else f", divided by {number(1 / first.factor)}, as for that many micro-batches"
        titles = [SCHEMES[s].title for s in step.used if s is not Scheme.FILLED_ROW_MEAN or step.drops_empty_rows]
        same = f" (here also the {', '.join(titles[1:])})" if len(titles) > 1 else ""
        return f"the {titles[0]}{same}{times}"
    return _divided(step) or "none of the known reductions: its tokens have weights of their own"


def _divided(step: AuditedStep) -> str | None:
    """A sum over a count that is not the file's own."""
    weights_BT = step.weights_BT
    assert weights_BT is not None
    weights_N = weights_BT[step.mask_BT > 0]
    tokens = len(weights_N)
    if step.pattern is Pattern.EQUAL and is_constant(weights_N, step.same):
        over = 1.0 / weights_N[0].item()
        if math.isclose(over, tokens, rel_tol=1e-3):
            return "the token mean over the whole step"
        return f"a sum over tokens, divided by {number(over)} (there are {count(tokens, 'token')} here)"
    if step.pattern is Pattern.BY_ROW:
        over = math.fsum(known.divisors[Pattern.BY_ROW] for known in step.recognised) / len(step.recognised)
        return f"a sum of row means, divided by {number(over)} (there are {count(len(step.mask_BT), 'row')} here)"
    return None


def _by_value(step: AuditedStep) -> str | None:
    """Where the program does not show the weights: which reductions of the PPO loss give the recorded loss?"""
    part = step.parts[0]
    if len(step.parts) > 1 or part.loss is None or not math.isfinite(part.loss):
        return None
    found = [SCHEMES[s].title for s in Scheme if abs(part.reduced(s) - part.loss) <= 1e-5 * (step.size + abs(part.loss))]
    told = bool(found) and len(found) < len(Scheme)  # where all give the same, as 0, the value tells nothing
    return f"the {' or the '.join(found)} of the PPO loss, by its value" if told else None
