"""The rules of the audit: each looks at one step and says what it found, in a sentence with the numbers of that step.

Notable: a rule judges the reduction that was used, where that is known. Where it is not, it says what would be under the usual one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nanscope.audit.first import first_step
from nanscope.audit.model import Effect, Finding, Sure
from nanscope.audit.normalisation import Normalised, Twice, normalised
from nanscope.audit.step import AuditedStep, Part, empty_rows, masked
from nanscope.audit.weights import MOST_STEPS, SAME, SCHEMES, Pattern, Scheme, is_constant
from nanscope.audit.words import sizes
from nanscope.objective.advantages import group_size
from nanscope.text import count, number

COUNTS = {
    Pattern.EQUAL: "num_items_in_batch in TRL, batch_num_tokens in verl and OpenRLHF, global_valid_toks in NeMo-RL",
    Pattern.BY_ROW: "global_batch_size in verl and OpenRLHF, global_valid_seqs in NeMo-RL",
}
MEANS = {Scheme.TOKEN_MEAN, Scheme.ROW_MEAN, Scheme.FILLED_ROW_MEAN}
UNIT = {Pattern.EQUAL: "token", Pattern.BY_ROW: "row"}


def _rows(step: AuditedStep) -> Iterator[Finding]:
    """A mean of row means: the tokens of short rows weigh more."""
    judged = step.pattern is Pattern.BY_ROW or not step.known
    if not judged or step.token_mean is None or any(part.per_row for part in step.parts):
        return
    short, long = (int(step.mask_BT[row].sum()) for row in step.extremes())
    if short == long:
        return
    value = step.whole(_row_scheme(step))
    told = "The loss is a mean of row means," if step.known else "A mean of row means would be"
    sentence = (
        f"{told} {number(value)}; the mean over all tokens is {number(step.token_mean)}{_as_factor(step, value, step.token_mean)}. A token "
        f"of the shortest row ({count(short, 'token')}) weighs {number(long / short)} times one of the longest ({count(long, 'token')})."
    )
    figures = {"value": value, "token_mean": step.token_mean, "shortest": float(short), "longest": float(long), "weight": long / short}
    yield Finding("rows_unequal", _if_shown(step), sentence, figures=figures)


def _if_shown(step: AuditedStep) -> Effect:
    return Effect.RISK if step.hidden else Effect.CHANGES


def _row_scheme(step: AuditedStep) -> Scheme:
    return Scheme.FILLED_ROW_MEAN if step.drops_empty_rows else Scheme.ROW_MEAN


def _as_factor(step: AuditedStep, value: float, base: float) -> str:
    times = step.times(value, base)
    return f" ({number(times)} times that)" if times is not None else ""


def _empty_rows(step: AuditedStep) -> Iterator[Finding]:
    """Fully masked rows: a row mean counts them or drops them."""
    empty, rows = empty_rows(step.mask_BT), len(step.mask_BT)
    if not empty or empty == rows:
        return
    counted, dropped = step.whole(Scheme.ROW_MEAN), step.whole(Scheme.FILLED_ROW_MEAN)
    own, effect = _own_way(step)
    sentence = (
        f"{empty} of {count(rows, 'row')} {'has' if empty == 1 else 'have'} no valid token. {own}A row mean that counts them with 0 (TRL, "
        f"Liger, SkyRL, unsloth) is {number(counted)}, one that drops them (OpenRLHF, and verl without global_batch_size) is "
        f"{number(dropped)}, {number(rows / (rows - empty))} times that."
    )
    figures = {"empty": float(empty), "rows": float(rows), "counted": counted, "dropped": dropped}
    yield Finding("empty_rows", effect, sentence, figures=figures)


def _own_way(step: AuditedStep) -> tuple[str, Effect]:
    """How this loss takes rows without a token."""
    used = set(step.used)
    by_row = used & {Scheme.ROW_MEAN, Scheme.ROW_SUM, Scheme.HORIZON}
    if step.known and not by_row and (step.pattern is Pattern.EQUAL or Scheme.FILLED_ROW_MEAN in used):
        return ("They change nothing in this loss. ", Effect.NOTE)
    return ("This loss counts them as rows, so it is that much smaller. " if by_row else "", Effect.CHANGES)


def _micro_batches(step: AuditedStep) -> Iterator[Finding]:
    """Gradient accumulation: a mean of the means of micro-batches."""
    for parts in step.ranks:
        yield from _unequal(step, [(part,) for part in parts], "micro_batches_unequal", "micro-batch", len(step.ranks) > 1)


def _ranks(step: AuditedStep) -> Iterator[Finding]:
    """DDP: a mean of the means of ranks."""
    yield from _unequal(step, list(step.ranks), "ranks_unequal", "rank", False)


def _unequal(step: AuditedStep, groups: list[tuple[Part, ...]], slug: str, one: str, of_one_rank: bool) -> Iterator[Finding]:
    """Compare the weight that a token, or a row, has in each group of parts."""
    groups = [group for group in groups if any(part.tokens for part in group)]
    pattern = step.pattern if step.known else Pattern.EQUAL
    if len(groups) < 2 or pattern not in UNIT:
        return
    counts = [sum(_units(step, part) for part in group) for group in groups]
    weights = torch.tensor([sum(_mass(step, part) for part in group) for group in groups], dtype=torch.float64) / torch.tensor(counts)
    if is_constant(weights, step.same):
        return
    unit, total = UNIT[pattern], sum(_units(step, part) for part in step.parts)
    value, fair = _averaged(step), _fair(step)
    most = (weights.max() / weights.min()).item()
    means = f"{unit} means" if not step.known or MEANS & set(step.used) else "losses"
    where = f" of rank {groups[0][0].rank}" if of_one_rank else ""
    sentence = (
        f"The {means} of {count(len(groups), one)}{where} ({sizes(counts, unit)}), averaged, {'are' if step.known else 'would be'} "
        f"{number(value)}; with one weight for each of the {count(total, unit)} of the step it is {number(fair)}"
        f"{_as_factor(step, value, fair)}. A {unit} of one {one} weighs up to {number(most)} times one of another. "
        f"{_mended(step, pattern, total)}"
    )
    yield Finding(slug, _if_shown(step), sentence, figures={"value": value, "whole": fair, "weight": most, "count": float(total)})


def _mended(step: AuditedStep, pattern: Pattern, total: int) -> str:
    if step.used and step.used[0] in (Scheme.ROW_SUM, Scheme.HORIZON):
        return f"Divide the sum of every micro-batch by the same number: {SCHEMES[step.used[0]].count}."
    undo = "; then multiply by the number of ranks, since DDP averages" if len(step.ranks) > 1 else ""
    return f"Divide the sum of every micro-batch by {total}, the count of the whole step ({COUNTS[pattern]}), and add them up{undo}."


def _units(step: AuditedStep, part: Part) -> int:
    """Tokens, or rows that the loss counts."""
    if step.pattern is not Pattern.BY_ROW:
        return part.tokens
    return len(part.mask_BT) - (part.empty_rows if step.drops_empty_rows else 0)


def _mass(step: AuditedStep, part: Part) -> float:
    """The weight of a part in the loss of the step. A row that is empty and counted has its share of it, with a loss of 0."""
    if not step.known or part.weights_BT is None:
        return step.share_of(part)
    weight = masked(part.weights_BT, part.mask_BT).sum().item() * part.share
    filled = len(part.mask_BT) - part.empty_rows
    return weight * _units(step, part) / filled if step.pattern is Pattern.BY_ROW and filled else weight


def _averaged(step: AuditedStep) -> float:
    """The loss of the step as it is; without a known reduction, the mean of the token means."""
    return step.averaged(lambda part: part.reduced(Scheme.TOKEN_MEAN)) if step.loss is None else step.loss


def _fair(step: AuditedStep) -> float:
    """The same with one weight for every token, or for every row, of the step."""
    mean = step.whole(_row_scheme(step) if step.pattern is Pattern.BY_ROW else Scheme.TOKEN_MEAN)
    return mean * (math.fsum(_mass(step, part) for part in step.parts) if step.known else 1.0)


def _one_of_many(step: AuditedStep) -> Iterator[Finding]:
    """One file of several micro-batches."""
    first = step.parts[0]
    if len(step.parts) > 1 or not step.recognised or Scheme.TOKEN_MEAN not in step.used or step.recognised[0].factor >= 1:
        return
    steps = round(1 / step.recognised[0].factor)
    sentence = (
        f"Its token mean is divided by {steps}, so this is one micro-batch of {steps}, averaged with the others: a token of one with fewer "
        f"than these {count(first.tokens, 'token')} weighs more. Give the files of all of them to see by how much."
    )
    yield Finding("one_of_many", Effect.RISK, sentence, figures={"micro_batches": float(steps), "tokens": float(first.tokens)})


def _no_tokens(step: AuditedStep) -> Iterator[Finding]:
    """Nothing valid in a micro-batch."""
    empty = sum(not part.tokens for part in step.parts)
    if not empty:
        return
    some = f"{empty} of {count(len(step.parts), 'micro-batch')} {'has' if empty == 1 else 'have'}"
    which = "This batch has" if len(step.parts) == 1 else some
    sentence = (
        f"{which} no valid token. A mean over nothing is 0/0 = NaN if its denominator has no floor; with a floor it is 0, and an average "
        "over micro-batches or ranks counts that 0."
    )
    yield Finding("no_tokens", Effect.CHANGES, sentence, figures={"empty": float(empty), "micro_batches": float(len(step.parts))})


def _floors(step: AuditedStep) -> Iterator[Finding]:
    """Denominators that become 0."""
    if step.nothing is None:
        return
    cases = (
        ("row_without_floor", step.nothing.row, "one row is fully masked", empty_rows(step.mask_BT) > 0),
        ("batch_without_floor", step.nothing.batch, "every token of a micro-batch is masked", any(not part.tokens for part in step.parts)),
    )
    for slug, survives, when, here in cases:
        if survives is False:
            sentence = (
                f"As soon as {when}, this loss or its gradient is 0/0 = NaN: its denominator has no floor (tried with its own formula, on "
                "log-probs of 0). A clamp(min=1) on the count mends it."
            )
            yield Finding(slug, Effect.CHANGES if here else Effect.RISK, sentence)
            return  # what fails with one row fails with all


def _sums(step: AuditedStep) -> Iterator[Finding]:
    """A sum where others have a mean."""
    if Scheme.TOTAL not in step.used or Scheme.TOKEN_MEAN in step.used or step.loss is None or step.token_mean is None:
        return
    tokens = int(step.mask_BT.sum())
    figures = {"sum": step.loss, "token_mean": step.token_mean, "factor": float(tokens)}
    if isinstance(mode := step.settings.get("loss_reduction"), str):
        sentence = f"The loss is a plain sum: the advantages were divided beforehand (loss_reduction={mode}), so its weights are in them."
        yield Finding("reduced_beforehand", Effect.NOTE, sentence, Sure.SETTINGS, figures)
        return
    sentence = (
        f"The loss is a sum over {count(tokens, 'token')}, {number(step.loss)}, as in tinker; the token mean is {number(step.token_mean)}. "
        f"A learning rate or a clip of the gradient norm that was tuned for a mean is off by a factor of {tokens}, which changes with the "
        "length of the answers."
    )
    yield Finding("sum_not_mean", Effect.CHANGES, sentence, figures=figures)


def _by_a_constant(step: AuditedStep) -> Iterator[Finding]:
    """Every token weighs the same, and not one over their number: a sum, a fixed horizon, or a mean over padding as well."""
    part = step.parts[0]
    over = part.recognised.divisors.get(Pattern.EQUAL) if part.recognised is not None and part.tokens else None
    if over is None or step.pattern is not Pattern.EQUAL or {Scheme.TOKEN_MEAN, Scheme.TOTAL} & set(step.used) or step.token_mean is None:
        return
    rows, width = part.mask_BT.shape
    times, tokens = number(part.tokens / over), count(part.tokens, "token")
    figures = {"divisor": over, "tokens": float(part.tokens), "token_mean": step.token_mean}
    if abs(over - rows * width) <= SAME * over:
        sentence = (
            f"The sum over {tokens} is divided by {rows} rows × {width} columns, masked ones included: {times} times the token mean. If "
            f"{width} is a constant of the run, that is Dr. GRPO's fixed horizon; if it is how far this batch was padded, the longest "
            "answer decides how much every token weighs."
        )
        yield Finding("padding_in_denominator", Effect.RISK, sentence, figures=figures)
    elif over < min(part.tokens, MOST_STEPS) and abs(over - round(over)) <= SAME * over:
        sentence = (
            f"The loss is a sum over {tokens}, divided by {number(over)} and not by their number: {times} times the token mean, "
            f"{number(step.token_mean)}. A learning rate or a clip of the gradient norm that was tuned for a mean is off by that factor, "
            "which changes with the length of the answers."
        )
        yield Finding("sum_not_mean", Effect.CHANGES, sentence, figures=figures)
    elif abs(over - step.mask_BT.sum().item()) > step.same * over:
        sentence = (
            f"Every token weighs 1/{number(over)}, and there are {part.tokens} of them: that is a fixed horizon, under which the loss "
            "grows with the length of the answers, or the count of a whole step that this batch is a part of."
        )
        yield Finding("fixed_divisor", Effect.NOTE, sentence, figures=figures)


def _padding(step: AuditedStep) -> Iterator[Finding]:
    """A reduction that counts masked tokens."""
    outside = [part.weights_BT[part.mask_BT == 0].abs().sum().item() for part in step.parts if part.weights_BT is not None]
    if step.key is not None and math.fsum(outside) > 0:
        sentence = (
            f"{step.key} does not apply the mask to each token: padding weighs {number(math.fsum(outside))} in sum. It is left out here."
        )
        yield Finding("padding_weighs", Effect.CHANGES, sentence, figures={"weight": math.fsum(outside)})


def _own_weights(step: AuditedStep) -> Iterator[Finding]:
    """Weights that follow no pattern."""
    weights_BT = step.weights_BT
    if weights_BT is None or step.pattern is not Pattern.OTHER:
        return
    weights_N = weights_BT[step.mask_BT > 0]
    mean = weights_N.mean().item()
    if not math.isfinite(mean) or not mean:
        return
    least, most = weights_N.min().item() / mean, weights_N.max().item() / mean
    sentence = f"No known reduction weighs tokens like this: one weighs between {number(least)} and {number(most)} times the average token."
    yield Finding("own_weights", Effect.CHANGES, sentence, figures={"least": least, "most": most})


def _other_terms(step: AuditedStep) -> Iterator[Finding]:
    """A loss that is more than its policy term."""
    for part in step.parts:
        value = part.value()
        if part.other_terms and part.loss is not None and value is not None:
            sentence = (
                f"The recorded loss, {number(part.loss)}, has further terms with a reduction of their own, such as a KL or an entropy; "
                f"this audit is of the policy term, {number(value)}."
            )
            yield Finding("other_terms", Effect.NOTE, sentence, figures={"loss": part.loss, "policy": value})
            return


def _unrecognised(step: AuditedStep) -> Iterator[Finding]:
    """A recorded loss whose weights the program does not show."""
    part = step.parts[0]
    if step.known or len(step.parts) > 1 or part.loss is None or not math.isfinite(part.loss):
        return
    values = [part.reduced(scheme) for scheme in Scheme]
    if any(abs(value - part.loss) <= 1e-5 * (step.size + abs(part.loss)) for value in values):
        return
    sentence = f"No reduction of the PPO loss gives the recorded loss, {number(part.loss)}: it has another objective, or further terms."
    yield Finding("unrecognised", Effect.NOTE, sentence, figures={"loss": part.loss})


def _left_out(step: AuditedStep) -> Iterator[Finding]:
    """Tokens that have no loss to speak of."""
    left_out = sum(part.left_out for part in step.parts)
    if left_out:
        have = "has" if left_out == 1 else "have"
        sentence = f"{count(left_out, 'valid token')} {have} no finite loss: counted as 0 in all values here. Weights do not depend on it."
        yield Finding("not_finite", Effect.NOTE, sentence, figures={"tokens": float(left_out)})


def _normalised_twice(step: AuditedStep) -> Iterator[Finding]:
    """Advantages that were normalised a second time."""
    found = normalised(step.advantages(), step.mask_BT, step.group_size or group_size(step.settings))
    figures = {"mean": found.mean, "spread": found.spread, "group_mean": found.group_mean, "group_spread": found.group_spread}
    again = _settings_say_twice(step.settings)
    if found.twice is Twice.SEEN:
        yield Finding("normalised_twice", Effect.CHANGES, _seen_twice(found), Sure.MEASURED, figures)
    elif found.twice is Twice.PADDING:
        sentence = (
            f"The advantages were centred with padding counted in: their mean is 0 over all positions, and {number(found.mean)} over the "
            "valid tokens. Every token is pushed by that much, whatever its reward. SkyRL's advantage_batch_normalize does this."
        )
        yield Finding("normalised_with_padding", Effect.CHANGES, sentence, Sure.MEASURED, figures)
    elif again:
        numbers = f"Over the valid tokens they have the mean {number(found.mean)} and the deviation {number(found.spread)}."
        yield Finding(
            "normalised_twice", Effect.CHANGES, f"The advantages are normalised twice: {again}. {numbers}", Sure.SETTINGS, figures
        )
    elif found.twice is Twice.HIDDEN:
        sentence = (
            f"The advantages have mean 0 and deviation 1 in every group of {found.size} rows, and over {_over(found)} as well: whether "
            "they were normalised once or twice cannot be told, and a second time would have changed nothing."
        )
        yield Finding("normalised_both_ways", Effect.NOTE, sentence, Sure.GUESSED, figures)


def _over(found: Normalised) -> str:
    return "the rows of the batch" if found.over_rows else "the valid tokens of the batch"


def _seen_twice(found: Normalised) -> str:
    mean, spread = number(found.group_mean), number(found.group_spread)
    moved = f", and added {mean} to it" if abs(found.group_mean) > 1e-6 else ""
    alike = f"the same mean, {mean if moved else 0}, and the same deviation, {spread}"
    return (
        f"The advantages were normalised twice, by group and then over {_over(found)}: all {count(found.groups, 'group')} of {found.size} "
        f"rows have {alike}, which hardly ever happens by chance, and over {_over(found)} these are 0 and 1. The second time multiplied "
        f"every advantage by {spread}{moved}."
    )


_WHITENING = ("gae", "reinforce_plus_plus", "reinforce++", "reinforce")  # estimators that whiten over the batch
_AGAIN = ("advantage_batch_normalize", "whiten_advantages", "normalize_advantages", "normalize_advantage")  # settings that do so afterwards


def _settings_say_twice(settings: Mapping[str, Any]) -> str:
    again = next((name for name in _AGAIN if settings.get(name) is True), None)
    estimator = str(settings.get("advantage_estimator", settings.get("adv_estimator", "")))
    if again is None:
        return ""
    if estimator in _WHITENING:
        return f"the estimator {estimator} whitens over the batch, and {again}=True does it again"
    if settings.get("scale_rewards") in ("group", True) or settings.get("grpo_norm_by_std") is True:
        return f"each group is divided by its deviation, and {again}=True normalises the batch again"
    return ""


Rule = Callable[[AuditedStep], Iterator[Finding]]
RULES: tuple[Rule, ...] = (  # within one effect, in this order
    _no_tokens, _floors, _micro_batches, _ranks, _rows, _sums, _by_a_constant, _empty_rows, _padding, _own_weights, _normalised_twice,
    _one_of_many, first_step, _other_terms, _unrecognised, _left_out,
)  # fmt: skip
