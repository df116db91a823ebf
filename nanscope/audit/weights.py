"""How much each token weighs in a loss: by the rule of a reduction, and as a recorded step really weighed it.

    token_weights(mask_BT, Reduction(Over.ROW_MEANS))      # 1 / (B·n_i) at each valid token of row i
    recorded = weights_of(trace, mask_BT)                  # ∂loss / ∂(loss of each token), read off the trainer's own program
    recognise(recorded.weights_BT, recorded.mask_BT)       # "this is the row mean"

Notable: a weight is a derivative, not a value. It says which reduction a trainer used even where the loss is 0, as on a first step, or
NaN, and for a loss that nobody has a name for.

Shapes: B rows, T response tokens, n_i valid tokens of row i, N of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from nanscope.frameworks.rows import Setting
from nanscope.locate.trace import Trace
from nanscope.objective.reduction import Masking, Over, Reduction, reduce
from nanscope.program.calls import Leaf
from nanscope.program.ops import WEIGHINGS
from nanscope.program.program import Program
from nanscope.roles import LOG_PROBS, Role

SAME = 1e-4  # relative: two weights are one; float32 sums over long rows are off by less
MOST_STEPS = 256  # micro-batches of a step that are thought of
NOT_A_LOSS = frozenset((*LOG_PROBS, Role.LOG_RATIO, Role.RATIO, Role.KL, Role.ADVANTAGES, Role.MASK))


class Scheme(StrEnum):
    """The reductions that are told apart."""

    TOKEN_MEAN = "token_mean"
    ROW_MEAN = "row_mean"
    FILLED_ROW_MEAN = "filled_row_mean"
    ROW_SUM = "row_sum"
    HORIZON = "horizon"
    TOTAL = "total"


Use = tuple[str, tuple[tuple[str, Setting], ...]]  # a key of `framework_loss`, and the settings that choose the reduction


@dataclass(frozen=True, slots=True)
class SchemeInfo:
    """One reduction.

    title: what people call it, with an article where it is a sum. reduction: as the objective has it, counted over one micro-batch.
    adds_up: when the mean over micro-batches and ranks is the reduction of the whole step. count: what to divide by to make it so.
    uses: where it is met.
    """

    title: str
    reduction: Reduction
    adds_up: str
    count: str
    uses: tuple[Use, ...]


SCHEMES: dict[Scheme, SchemeInfo] = {
    Scheme.TOKEN_MEAN: SchemeInfo(
        "token mean",
        Reduction(Over.TOKENS),
        "only where all hold equally many tokens",
        "the valid tokens of the whole step",
        (
            ("trl.bnpo", ()),
            ("verl.vanilla", (("loss_agg_mode", "token-mean"),)),
            ("skyrl.regular", (("loss_reduction", "token_mean"),)),
            ("openrlhf.ppo", ()),
        ),
    ),
    Scheme.ROW_MEAN: SchemeInfo(
        "row mean",
        Reduction(Over.ROW_MEANS),
        "where all hold equally many rows",
        "the rows of the whole step",
        (("trl.grpo", ()), ("liger.grpo", (("beta", 0.0),)), ("skyrl.regular", (("loss_reduction", "sequence_mean"),))),
    ),
    Scheme.FILLED_ROW_MEAN: SchemeInfo(
        "row mean without empty rows",
        Reduction(Over.ROW_MEANS, empty=Masking.MULTIPLY),
        "only where all hold equally many rows that have a token",
        "the rows of the whole step that have a token",
        (("verl.vanilla", (("loss_agg_mode", "seq-mean-token-mean"),)), ("openrlhf.ppo", (("token_level_loss", False),))),
    ),
    Scheme.ROW_SUM: SchemeInfo(
        "mean of row sums",
        Reduction(Over.ROW_SUMS),
        "where all hold equally many rows",
        "the rows of the whole step",
        (("trl.luspo", ()), ("verl.vanilla", (("loss_agg_mode", "seq-mean-token-sum"),))),
    ),
    Scheme.HORIZON: SchemeInfo(
        "fixed horizon",
        Reduction(Over.ROW_SUMS, horizon=None),
        "where all hold equally many rows, padded to one width",
        "the rows of the whole step, times one constant length",
        (
            ("verl.vanilla", (("loss_agg_mode", "seq-mean-token-sum-norm"),)),
            ("skyrl.regular", (("loss_reduction", "seq_mean_token_sum_norm"),)),
        ),
    ),
    Scheme.TOTAL: SchemeInfo(
        "sum",
        Reduction(Over.TOTAL),
        "always, if they are summed; a mean over them makes it that much smaller",
        "nothing",
        (("tinker.ppo", ()),),
    ),
}  # fmt: skip


class Pattern(StrEnum):
    """What decides how much a token weighs."""

    EQUAL = "equal"  # every valid token weighs the same
    BY_ROW = "by_row"  # every row that has a token weighs the same
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Recognised:
    """What weights turned out to be.

    schemes: the reductions that give them, more than one where they are the same on this batch, none if no known one does.
    factor:  what multiplies the scheme: 1, or 1 / micro-batches of a step.
    divisors: the patterns that hold, EQUAL before BY_ROW, with the tokens or rows that the sum was divided by. Both hold where all rows
    have one length, none where tokens have weights of their own.
    """

    schemes: tuple[Scheme, ...]
    factor: float
    divisors: dict[Pattern, float]

    @property
    def pattern(self) -> Pattern:
        """The first pattern that holds."""
        return next(iter(self.divisors), Pattern.OTHER)


def token_weights(mask_BT: Tensor, how: Reduction) -> Tensor:
    """Return ∂ reduce(x) / ∂x: what the loss of each token is multiplied by, [B, T], float64. A batch without a token may give NaN."""
    x_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        loss = reduce(x_BT, mask_BT.to(torch.float64), how)
    (weights_BT,) = torch.autograd.grad(loss, x_BT)
    return weights_BT


def recognise(weights_BT: Tensor, mask_BT: Tensor, *, steps: int = 1, horizons: Sequence[float] = (), same: float = SAME) -> Recognised:
    """Say which reduction gives these weights on this mask.

    steps: micro-batches of a step, by which a trainer may have divided already. horizons: constant lengths to try besides the width.
    same:  relative difference that is rounding.
    """
    valid_BT = mask_BT > 0
    weights = weights_BT.to(torch.float64)
    divisors = _divisors(weights, valid_BT, same)
    for factor in dict.fromkeys((1.0, 1.0 / steps, *_guessed(divisors, valid_BT, same))):
        found = tuple(scheme for scheme in Scheme if _gives(weights, valid_BT, scheme, factor, horizons, same))
        if found:
            return Recognised(found, factor, divisors)
    return Recognised((), 1.0, divisors)


def _guessed(divisors: dict[Pattern, float], valid_BT: Tensor, same: float) -> Iterator[float]:
    """Yield the factor 1/k of a mean that was divided by k micro-batches in the training code, where no setting tells."""
    own = {Pattern.EQUAL: valid_BT.sum().item(), Pattern.BY_ROW: float(len(valid_BT))}
    for pattern, divisor in divisors.items():
        steps = round(divisor / own[pattern])
        if 1 < steps <= MOST_STEPS and abs(divisor / own[pattern] - steps) <= same * steps:
            yield 1.0 / steps


def _divisors(weights_BT: Tensor, valid_BT: Tensor, same: float) -> dict[Pattern, float]:
    by_row_BT = weights_BT * valid_BT.sum(-1, keepdim=True)
    values = {Pattern.EQUAL: weights_BT[valid_BT], Pattern.BY_ROW: by_row_BT[valid_BT]}
    return {
        pattern: 1.0 / values_N.mean().item()
        for pattern, values_N in values.items()
        if len(values_N) and is_constant(values_N, same) and bool(torch.isfinite(values_N).all() and (values_N != 0).all())
    }


def _gives(weights_BT: Tensor, valid_BT: Tensor, scheme: Scheme, factor: float, horizons: Sequence[float], same: float) -> bool:
    how = SCHEMES[scheme].reduction
    known_BT = token_weights(valid_BT, how) * factor
    lengths = (1.0, *(valid_BT.shape[-1] / length for length in horizons if length > 0)) if scheme is Scheme.HORIZON else (1.0,)
    return bool(valid_BT.any()) and any(
        torch.allclose(weights_BT[valid_BT], known_BT[valid_BT] * by, rtol=same, atol=0.0) for by in lengths
    )


def is_constant(values_N: Tensor, same: float = SAME) -> bool:
    """Are these all one number, up to rounding? Empty is; NaN is not."""
    return not len(values_N) or bool((values_N - values_N[0]).abs().max() <= same * values_N.abs().max())


@dataclass(frozen=True, slots=True)
class RecordedWeights:
    """What a snapshot's own program says.

    token_loss_BT: what was reduced, so that loss = Σ weights · token_loss, [B, T]. weights_BT: of it, [B, T], 0 where masked. complete:
    the loss holds nothing else, such as a KL term with a reduction of its own. same: relative difference that is rounding in its dtype.
    """

    token_loss_BT: Tensor
    weights_BT: Tensor
    complete: bool
    same: float


def weights_of(trace: Trace, mask_BT: Tensor) -> RecordedWeights | None:
    """Read the weight of every token off a recorded program; None where the file does not hold one value per token and its gradient.

    trace: of the loss, with gradients. mask_BT: as `loss_inputs` has it.
    """
    names, values, grads = trace.names, trace.values, trace.run.grads
    ends = _reduced_values(trace, mask_BT.numel())
    behind = {value: _roles_behind(trace, value) for value in ends}
    known = any(Role.ADVANTAGES in roles for roles in behind.values())
    policy = [value for value in ends if Role.ADVANTAGES in behind[value] or not known]
    if len(policy) != 1 or policy[0] not in grads or (not known and names.role(policy[0]) in NOT_A_LOSS):
        return None
    valid_BT, value = mask_BT > 0, _before_weights(trace, policy[0], mask_BT)
    loss_BT = values[value].reshape(mask_BT.shape).to(torch.float64)
    weights_BT = torch.where(valid_BT, grads[value].reshape(mask_BT.shape).to(torch.float64), 0.0)
    whole = values[trace.program.output].to(torch.float64)
    if len(ends) == 1 and not _adds_up(whole, loss_BT, weights_BT):
        return None  # not what was reduced: something between it and the loss is more than a weighted sum
    if weights_BT.sum() < 0:  # what was reduced is the objective, and the minus comes after it
        loss_BT, weights_BT = -loss_BT, -weights_BT
    if not bool((weights_BT[valid_BT] >= 0).all()):
        return None  # NaN, or of both signs: that is no weight, the advantages come after it
    same = max(SAME, 4 * torch.finfo(grads[value].dtype).eps)
    return RecordedWeights(loss_BT, weights_BT, complete=len(ends) == 1, same=same)


def _before_weights(trace: Trace, value: int, mask_BT: Tensor) -> int:
    """Return what a value was before the mask, or something made of the mask, multiplied or divided it token by token."""
    masks = _mask_values(trace, mask_BT)
    while (call := trace.program.maker(value)) is not None and call.name in WEIGHINGS:
        inputs = list(call.inputs())
        sources = [each for each in inputs if each in trace.run.grads]
        others = [each for each in inputs if each not in trace.run.grads]
        if len(sources) != 1 or trace.values[sources[0]].numel() != mask_BT.numel():
            break
        if not all(_of_mask(trace, masks, other) for other in others):
            break
        value = sources[0]
    return value


def _of_mask(trace: Trace, masks: list[int], value: int) -> bool:
    """Is a value made of the mask and of single numbers only?"""
    stack, seen = [value], {value, *masks}
    while stack:
        each = stack.pop()
        if each in masks or trace.values[each].numel() == 1:
            continue
        call = trace.program.maker(each)
        if call is None:
            return False
        further = set(call.inputs()) - seen
        stack += further
        seen |= further
    return True


def _adds_up(loss: Tensor, token_loss_BT: Tensor, weights_BT: Tensor) -> bool:
    """Is loss = Σ w·x? Unknown, and so not denied, where one of them is not finite."""
    parts_BT = torch.where(weights_BT == 0, 0.0, weights_BT * token_loss_BT)
    close = (loss.sum() - parts_BT.sum()).abs() <= 1e-3 * parts_BT.abs().sum() + 1e-6
    return bool(close) or not bool(torch.isfinite(parts_BT).all() and torch.isfinite(loss).all())


def _reduced_values(trace: Trace, elements: int) -> list[int]:
    """Return the last values on the way to the loss that still have one element per token."""
    found: dict[int, None] = {}
    stack, seen = [trace.program.output], {trace.program.output}
    while stack:
        value = stack.pop()
        tensor = trace.values.get(value)
        if tensor is not None and tensor.numel() == elements and tensor.dim() > 0 and elements > 1:
            found[value] = None
            continue
        call = trace.program.maker(value)
        for source in call.inputs() if call is not None else ():
            if source in trace.run.grads and source not in seen:  # only what a gradient flows through
                seen.add(source)
                stack.append(source)
    return list(found)


def _roles_behind(trace: Trace, value: int) -> set[Role | None]:
    stack, seen = [value], {value}
    while stack:
        call = trace.program.maker(stack.pop())
        for source in call.inputs() if call is not None else ():
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return {trace.names.role(each) for each in seen}


@dataclass(frozen=True, slots=True)
class Emptied:
    """Is the recorded loss, with its gradients, finite if masks take tokens away? None: it could not be tried."""

    row: bool | None
    batch: bool | None


def emptied(trace: Trace, mask_BT: Tensor) -> Emptied:
    """Run the recorded program on a harmless batch with one row masked, and with all of them.

    Harmless: all that has one number per token is 0, so that every ratio is 1; what is left to go wrong is a denominator.
    """
    masks = _mask_values(trace, mask_BT)
    if not masks:
        return Emptied(None, None)
    cut = _cut(trace.program, masks[0])
    shape, dtype = trace.values[masks[0]].shape, trace.values[masks[0]].dtype
    leaves = {value: _harmless(tensor, mask_BT.numel()) for value, tensor in trace.tensors.items()}
    for value in _made_beforehand(cut, trace, masks[0], mask_BT.numel()):
        cut, leaves[value] = _cut(cut, value), torch.zeros_like(trace.values[value])

    def survives(valid_BT: Tensor) -> bool:
        again = cut.execute({**leaves, masks[0]: valid_BT.reshape(shape).to(dtype)})
        ends = [again.values[cut.output], *(again.grads[leaf.id] for leaf in cut.leaves if leaf.id in again.grads)]
        return all(bool(torch.isfinite(end).all()) for end in ends)

    full_BT = torch.ones(mask_BT.shape)
    if not survives(full_BT):
        return Emptied(None, None)
    one_BT = full_BT.clone()
    one_BT[0] = 0
    return Emptied(survives(one_BT) if len(one_BT) > 1 else None, survives(torch.zeros_like(full_BT)))


def _mask_values(trace: Trace, mask_BT: Tensor) -> list[int]:
    """Return the values that are this mask, the earliest first."""
    program, valid_BT = trace.program, (mask_BT > 0).double()
    order = [*(leaf.id for leaf in program.leaves), *(out for call in program.calls for out in call.outs if out is not None)]

    def is_it(value: int) -> bool:
        tensor = trace.values.get(value)
        if tensor is None or tensor.numel() != mask_BT.numel() or not torch.equal(tensor.reshape(mask_BT.shape).double(), valid_BT):
            return False
        # where the mask has zeros, one and the same pattern is no accident, whatever the name
        return trace.names.role(value) is Role.MASK or (value not in trace.run.grads and not bool(valid_BT.all()))

    return [value for value in order if is_it(value)]


def _made_beforehand(program: Program, trace: Trace, mask: int, elements: int) -> list[int]:
    """Return what has one number per token, was computed without a gradient and not of the mask, and is read where there is a gradient:
    log-probs of the sampler in which a token was replaced, say."""
    flows, masked = {leaf.id for leaf in program.leaves if leaf.diff}, {mask}
    found: dict[int, None] = {}
    for call in program.calls:
        read, outs = set(call.inputs()), {out for out in call.outs if out is not None}
        masked |= outs if read & masked else set()
        if call.grad and read & flows:
            flows |= outs
            given = (value for value in read - flows - masked if program.maker(value) is not None)
            tensors = {value: trace.values[value] for value in given if value in trace.values}
            found |= dict.fromkeys(value for value, one in tensors.items() if one.is_floating_point() and one.numel() == elements)
    return list(found)


def _cut(program: Program, value: int) -> Program:
    """Return the program with a value as a leaf instead of a result."""
    if program.leaf(value) is not None:
        return program
    calls = tuple(call for call in program.calls if value not in call.outs)
    return replace(program, leaves=(*program.leaves, Leaf(value, None, "data", diff=False)), calls=calls).slice()


def _harmless(tensor: Tensor, elements: int) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return torch.zeros_like(tensor) if tensor.numel() == elements else torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
