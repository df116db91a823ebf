"""The objective: order of its steps, gradients against finite differences, reductions against loops, and errors."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.objective.bounds import SAFE, Bounds
from nanscope.objective.evaluate import objective
from nanscope.objective.reduction import Guard, Masking, Over, Reduction, reduce
from nanscope.objective.settings import (
    PER_SEQUENCE,
    Anchor,
    Correction,
    Divergence,
    Entropy,
    Estimator,
    Gate,
    Kl,
    KlWeight,
    Level,
    LossInputs,
    LossSettings,
    Ratio,
    TrustRegion,
)
from nanscope.objective.surrogates import Cispo, Dro, ImportanceSampling, KlCov, Ppo, Reinforce, Sapo, Vespo
from nanscope.roles import Role

NAN, INF = float("nan"), float("inf")


def batch(seed: int = 0, rows: int = 2, columns: int = 4, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Random log-probs near each other; at least the last column is masked."""
    generator = torch.Generator().manual_seed(seed)
    base = -3 * torch.rand(rows, columns, generator=generator, dtype=dtype) - 0.5

    def near() -> Tensor:
        return base + 0.2 * torch.randn(rows, columns, generator=generator, dtype=dtype)

    lengths = torch.randint(1, columns, (rows, 1), generator=generator)
    mask = (torch.arange(columns) < lengths).to(dtype)
    advantages = torch.randn(rows, columns, generator=generator, dtype=dtype)
    return LossInputs(near().requires_grad_(), near(), near(), near(), advantages, mask, near().exp())


def gradient(inputs: LossInputs, chosen: LossSettings) -> Tensor:
    return torch.autograd.grad(objective(inputs, chosen).loss, inputs.log_probs)[0]


# Losses whose gradient is the derivative of their value: nothing in them is held constant.
SMOOTH = {
    "ppo": LossSettings(),
    "dual clip": LossSettings(Ppo(dual=1.5)),
    "two-sided": LossSettings(Ppo(cap=1.1)),
    "importance sampling": LossSettings(ImportanceSampling(), Ratio(clamp=SAFE)),
    "reinforce": LossSettings(Reinforce()),
    "sapo": LossSettings(Sapo(1.0, 1.0)),
    "dro": LossSettings(Dro(0.1)),
    "kl-cov": LossSettings(KlCov(share=1.0)),  # every token: which ones are picked is a step
    "gspo": LossSettings(Ppo(), PER_SEQUENCE),
    "rloo": LossSettings(Ppo(), replace(PER_SEQUENCE, level=Level.SEQUENCE_SUM), reduction=Reduction(Over.VALUES)),
    "gmpo": LossSettings(ImportanceSampling(), replace(PER_SEQUENCE, log_clip=Bounds(-0.1, 0.1)), mean_advantages=Guard.FLOOR),
    "tis": LossSettings(correction=Correction(bounds=Bounds(high=1.1))),
    "gated": LossSettings(correction=Correction(gates=(Gate(Bounds(0.8, 1.2)), Gate(Bounds(0.5, 2.0), whole_row=True, from_mask=True)))),
    **{f"kl {estimator}": LossSettings(None, kl=Kl(1.0, estimator)) for estimator in Estimator},
    "kl times ratio": LossSettings(kl=Kl(0.1, weight=KlWeight.RATIO)),
    "kl against rollout": LossSettings(kl=Kl(0.1, against=Anchor.ROLLOUT)),
    "kl, on-policy": LossSettings(kl=Kl(0.1, weight=KlWeight.ROLLOUT)),
    "scaled advantages": LossSettings(reduction=Reduction(Over.TOTAL), scale_advantages=Reduction(Over.ROW_MEANS)),
    **{f"over {over}": LossSettings(reduction=Reduction(over, horizon=None)) for over in Over},
}


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_the_derivative(name: str, seed: int) -> None:
    """In float64, against finite differences, where nothing is held constant."""
    inputs = batch(seed)

    def loss(log_probs: Tensor) -> Tensor:
        return objective(replace(inputs, log_probs=log_probs), SMOOTH[name]).loss

    assert torch.autograd.gradcheck(loss, (inputs.log_probs,))


def test_what_is_held_constant_has_the_gradient_of_its_formula() -> None:
    """CISPO: −clip(r)·A / N. VESPO: −φA / N. The ratio against itself: value −A, gradient −A. The straight-through KL: −d."""
    inputs = batch(1)
    mask, tokens = inputs.mask, inputs.mask.sum()
    ratio = (inputs.log_probs - inputs.old_log_probs).detach().exp()
    torch.testing.assert_close(
        gradient(inputs, LossSettings(Cispo(Bounds(0.9, 1.1)))), -ratio.clamp(0.9, 1.1) * inputs.advantages * mask / tokens
    )

    drift = ((inputs.log_probs - inputs.old_log_probs).detach() * mask).sum(-1, keepdim=True)
    phi = torch.where(inputs.advantages >= 0, (3 + 2 * drift - 3 * drift.exp()).exp(), (2 + 3 * drift - 2 * drift.exp()).exp())
    torch.testing.assert_close(gradient(inputs, LossSettings(Vespo())), -phi * inputs.advantages * mask / tokens, rtol=1e-6, atol=1e-9)

    own = LossSettings(ImportanceSampling(), Ratio(against=Anchor.SELF))
    torch.testing.assert_close(gradient(inputs, own), gradient(inputs, LossSettings(Reinforce())))
    assert objective(inputs, own).loss.item() == pytest.approx((-inputs.advantages * mask).sum().item() / tokens.item())

    through = LossSettings(None, kl=Kl(1.0, Estimator.K1, straight_through=True))
    torch.testing.assert_close(gradient(inputs, through), (inputs.log_probs - inputs.ref_log_probs).detach() * mask / tokens)
    assert objective(inputs, through).loss.item() == pytest.approx(
        objective(inputs, LossSettings(None, kl=Kl(1.0, Estimator.K1))).loss.item()
    )


def loop(x: Tensor, mask: Tensor, over: Over, horizon: float) -> float:
    """The reductions, a token at a time."""
    rows = [[(x[i, t].item(), mask[i, t].item()) for t in range(x.shape[1])] for i in range(len(x))]
    sums = [sum(value * kept for value, kept in row) for row in rows]
    counts = [sum(kept for _, kept in row) for row in rows]
    return {
        Over.TOKENS: sum(sums) / max(sum(counts), 1),
        Over.TOTAL: sum(sums),
        Over.ROW_MEANS: sum(s / max(n, 1) for s, n in zip(sums, counts, strict=True)) / len(rows) / horizon,
        Over.ROW_SUMS: sum(sums) / len(rows) / horizon,
        Over.LONG_ROWS: sum(n * sum(v for v, _ in row) / len(row) for n, row in zip(counts, rows, strict=True)) / len(rows),
        Over.VALUES: sum(v for row in rows for v, _ in row) / x.numel(),
    }[over]


@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    over=st.sampled_from(list(Over)),
    masking=st.sampled_from([Masking.MULTIPLY, Masking.WHERE]),
    horizon=st.sampled_from([1.0, 7.0]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_a_reduction_equals_a_loop(rows: int, columns: int, over: Over, masking: Masking, horizon: float, data: st.DataObject) -> None:
    """Each reduction, over random shapes and masks, empty rows and empty batches too."""
    values = data.draw(st.lists(st.floats(-5, 5), min_size=rows * columns, max_size=rows * columns))
    kept = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    x = torch.tensor(values, dtype=torch.float64).view(rows, columns)
    mask = torch.tensor(kept).view(rows, columns).double()
    found = reduce(x, mask, Reduction(over, mask=masking, horizon=horizon)).item()
    assert found == pytest.approx(loop(x, mask, over, horizon), abs=1e-9)


def test_counts_given_are_counts_used() -> None:
    """count replaces the tokens or rows that are here, factor multiplies, and empty rows are counted or not as told."""
    x, mask = torch.ones(2, 4), torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 0]])
    assert reduce(x, mask, Reduction(count=6.0, factor=2.0)).item() == 1.0
    assert reduce(x, mask, Reduction(Over.ROW_MEANS)).item() == 0.5
    assert reduce(x, mask, Reduction(Over.ROW_MEANS, empty=Masking.WHERE, guard=Guard.RAW)).item() == 1.0
    assert reduce(x, mask, Reduction(Over.ROW_MEANS, empty=Masking.WHERE, count=4.0)).item() == 0.25
    assert reduce(x, torch.zeros(2, 4), Reduction(guard=Guard.RAW)).isnan()


def test_a_clamp_before_exp_is_not_a_clamp_after_it() -> None:
    """The same finite loss at an overflow; a gradient that is 0 in one case and NaN in the other."""
    inputs = batch(dtype=torch.float32)
    inputs.old_log_probs[0, 0] = -200.0
    inputs = replace(inputs, advantages=-torch.ones(2, 4))
    before = LossSettings(ImportanceSampling(), Ratio(clamp=Bounds(high=math.log(4.0))))
    after = LossSettings(Ppo(clip=Bounds(high=4.0)))
    assert objective(inputs, before).token_loss[0, 0].item() == pytest.approx(4.0)
    capped = LossSettings(Ppo(clip=Bounds(high=4.0), cap=4.0))
    assert objective(inputs, capped).token_loss[0, 0].item() == pytest.approx(4.0)
    assert gradient(inputs, before)[0, 0].item() == 0.0
    assert gradient(inputs, capped)[0, 0].isnan()
    assert objective(inputs, after).loss.isinf()


# Where a masked −200 in ℓ_old is stopped: settings, harm to the loss, harm to the gradient.
MASKS = {
    "multiply after exp": (LossSettings(ImportanceSampling()), True, True),
    "where after exp": (LossSettings(ImportanceSampling(), reduction=Reduction(mask=Masking.WHERE)), False, True),
    "where on the ratio": (LossSettings(ImportanceSampling(), Ratio(mask_ratio=Masking.WHERE)), False, True),
    "where before exp": (LossSettings(ImportanceSampling(), Ratio(mask_log_ratio=Masking.WHERE)), False, False),
    "clamp before exp": (LossSettings(ImportanceSampling(), Ratio(clamp=SAFE)), False, False),
    "where on the inputs": (LossSettings(ImportanceSampling(), mask_log_probs=Masking.WHERE, mask_others=Masking.WHERE), False, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_only_what_stands_before_exp_helps_a_masked_token(name: str) -> None:
    """A mask after exp cleans the loss at best."""
    chosen, in_loss, in_gradient = MASKS[name]
    inputs = batch(dtype=torch.float32)
    inputs.old_log_probs[0, -1] = -200.0
    assert objective(inputs, chosen).loss.isfinite().item() is not in_loss
    assert gradient(inputs, chosen).isfinite().all().item() is not in_gradient


@given(
    seed=st.integers(0, 50),
    value=st.sampled_from([NAN, INF, -INF, 200.0, -200.0]),
    name=st.sampled_from(["old_log_probs", "ref_log_probs"]),
)
@settings(max_examples=60, deadline=None)
def test_masked_inputs_cannot_reach_anything_where_they_are_replaced_first(seed: int, value: float, name: str) -> None:
    """`where` on every log-prob before the first exp: loss and gradient are those of the clean batch, bit for bit."""
    clean = batch(seed, dtype=torch.float32)
    dirty = replace(clean, **{name: getattr(clean, name).clone()})
    getattr(dirty, name)[:, -1] = value
    chosen = LossSettings(kl=Kl(0.1), mask_log_probs=Masking.WHERE, mask_others=Masking.WHERE)
    assert torch.equal(objective(clean, chosen).loss, objective(dirty, chosen).loss)
    assert torch.equal(gradient(clean, chosen), gradient(dirty, chosen))


def test_a_zero_advantage_does_not_protect() -> None:
    """inf · 0 is NaN: a group without variance keeps the overflow, and a detached, clipped ratio does not have it."""
    inputs = replace(batch(dtype=torch.float32), advantages=torch.zeros(2))
    inputs.old_log_probs[0, 0] = -200.0
    assert objective(inputs, LossSettings()).loss.isnan()
    assert gradient(inputs, LossSettings())[0, 0].isnan()
    clipped = LossSettings(Cispo(Bounds(high=5.0)))
    assert objective(inputs, clipped).loss.item() == 0.0
    assert gradient(inputs, clipped).eq(0).all()


def test_a_coefficient_of_zero_keeps_a_nan_and_none_does_not() -> None:
    """A term is left out by None only."""
    inputs = batch(dtype=torch.float32)
    inputs.ref_log_probs[0, 0] = NAN
    assert objective(inputs, LossSettings(kl=Kl(0.0))).loss.isnan()
    assert objective(inputs, LossSettings(kl=None)).loss.isfinite()
    inputs.entropy[0, 0] = NAN
    assert objective(inputs, LossSettings(entropy=Entropy(0.0))).loss.isnan()
    assert objective(replace(inputs, entropy=None), LossSettings(entropy=Entropy(0.0, required=False))).loss.isfinite()


def test_weights_that_cannot_be_formed() -> None:
    """A NaN of the rollout engine is weight 1 (unscored), weight 0 (finite), a dropped token (drop), or a NaN."""
    inputs = batch(dtype=torch.float32)
    inputs.mask[0, 0] = 1
    inputs.rollout_log_probs[0, 0] = NAN

    def weight(correction: Correction) -> float:
        found = objective(inputs, LossSettings(correction=correction)).weight
        assert found is not None
        return found[0, 0].item()

    assert weight(Correction(unscored=True)) == 1.0
    assert weight(Correction(finite=True)) == 0.0
    assert weight(Correction(bounds=Bounds(0.5, 2.0), drop=True)) == 0.0
    assert math.isnan(weight(Correction(bounds=Bounds(high=2.0))))
    assert weight(Correction(gates=(Gate(Bounds(0.5, 5.0)),))) == 0.0


def test_gates_take_tokens_or_rows() -> None:
    """A gate on the mask removes a token, or with whole_row its row; a NaN passes where the framework lets it."""
    inputs = replace(batch(dtype=torch.float32), mask=torch.ones(2, 4))
    rollout = inputs.old_log_probs.clone()
    rollout[0, 1] -= 3.0
    rollout[1, 2] = NAN
    inputs = replace(inputs, rollout_log_probs=rollout)

    def left(gate: Gate) -> list[list[float]]:
        return objective(inputs, LossSettings(correction=Correction(gates=(gate,), weigh=False))).mask_BT.tolist()

    band = Bounds(0.5, 2.0)
    assert left(Gate(band, from_mask=True)) == [[1, 0, 1, 1], [1, 1, 0, 1]]
    assert left(Gate(band, from_mask=True, nan_passes=True)) == [[1, 0, 1, 1], [1, 1, 1, 1]]
    assert left(Gate(band, from_mask=True, nan_passes=True, whole_row=True)) == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert left(Gate(band, from_mask=True, level=Level.SEQUENCE_MEAN)) == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_trust_region_looks_at_the_side_that_the_advantage_pushes() -> None:
    """A token that became more likely is dropped where A > 0, and kept where A < 0."""
    log_probs, old = torch.tensor([[-0.2, -0.2, -2.0, -2.0]]), torch.tensor([[-1.5, -1.5, -0.5, -0.5]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    for divergence in Divergence:
        assert TrustRegion(divergence).holds(log_probs, old, advantages).tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_the_trace_names_what_it_holds() -> None:
    """Every intermediate by its role; what the settings leave out is not there."""
    inputs = batch()
    full = LossSettings(kl=Kl(0.1), entropy=Entropy(0.01), correction=Correction())
    trace = objective(inputs, full)
    assert set(trace.roles()) == {
        Role.LOG_RATIO, Role.RATIO, Role.ADVANTAGES, Role.MASK, Role.IS_WEIGHT, Role.KL, Role.ENTROPY, Role.LOSS,
    }  # fmt: skip
    torch.testing.assert_close(trace.ratio, trace.log_ratio_BT.exp())
    assert trace.policy_loss is not None and trace.kl_loss is not None and trace.entropy_loss is not None
    torch.testing.assert_close(trace.loss, trace.policy_loss + 0.1 * trace.kl_loss - 0.01 * trace.entropy_loss)
    torch.testing.assert_close(reduce(trace.token_loss, trace.mask_BT, full.reduction), trace.loss)
    alone = objective(inputs, LossSettings(None, kl=Kl(1.0)))
    assert alone.policy is None and Role.IS_WEIGHT not in alone.roles()
    assert {field.name for field in fields(trace)} >= {"exponent", "token_loss", "policy"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_the_log_probs_is_kept(dtype: torch.dtype) -> None:
    """Masks and advantages of other types do not promote the loss."""
    inputs = batch(dtype=dtype)
    for mask in (inputs.mask.bool(), inputs.mask.long()):
        trace = objective(replace(inputs, mask=mask, advantages=inputs.advantages[:, 0]), LossSettings(kl=Kl(0.1)))
        assert trace.loss.dtype == dtype


def test_advantages_per_row_and_per_token_are_one_thing() -> None:
    """[B], [B, 1] and [B, T] with equal values give the same loss."""
    inputs = batch(2)
    row = inputs.advantages[:, 0]
    losses = [objective(replace(inputs, advantages=a), LossSettings()).loss.item() for a in (row, row[:, None], row[:, None].expand(2, 4))]
    assert losses[0] == losses[1] == losses[2]


def test_without_old_log_probs_the_ratio_is_one() -> None:
    """The first update after sampling."""
    trace = objective(replace(batch(), old_log_probs=None), LossSettings())
    assert trace.ratio.eq(1).all()


def test_a_batch_answers_to_the_former_spelling_of_its_fields() -> None:
    """`logprobs` and its relatives are accepted where a batch is made, changed and read."""
    x = torch.ones(1, 2)
    former = LossInputs(logprobs=x, old_logprobs=2 * x, ref_logprobs=3 * x, rollout_logprobs=4 * x, advantages=x, mask=x)
    changed = replace(former, old_logprobs=5 * x)
    assert (former.log_probs is former.logprobs) and torch.equal(changed.old_log_probs, 5 * x) and torch.equal(changed.ref_logprobs, 3 * x)
    assert torch.equal(former.rollout_logprobs, 4 * x) and not hasattr(former, "logprob")
    assert pickle.loads(pickle.dumps(former)).old_logprobs.sum() == 4


# What the batch lacks or has wrong, the settings that read it, the slug.
WRONG = (
    ({"ref_log_probs": None}, LossSettings(kl=Kl(0.1)), "missing-input", "ref_log_probs"),
    ({"rollout_log_probs": None}, LossSettings(correction=Correction()), "missing-input", "rollout_log_probs"),
    ({"entropy": None}, LossSettings(entropy=Entropy(0.1)), "missing-input", "entropy"),
    ({"mask": torch.ones(2, 3)}, LossSettings(), "shape-mismatch", "mask"),
    ({"advantages": torch.ones(3)}, LossSettings(), "shape-mismatch", "advantages"),
    ({"log_probs": torch.ones(8)}, LossSettings(), "shape-mismatch", "log_probs"),
    ({}, LossSettings(surrogate=None), "empty-loss", "surrogate"),
)


@pytest.mark.parametrize(("changed", "chosen", "slug", "named"), WRONG)
def test_a_batch_that_does_not_fit_is_one_clear_error(
    changed: dict[str, Tensor | None], chosen: LossSettings, slug: str, named: str
) -> None:
    """What is missing, or which shape is not the other's."""
    with pytest.raises(NanscopeError, match=named) as caught:
        objective(replace(batch(), **changed), chosen)
    assert caught.value.slug == slug


@pytest.mark.parametrize("over", [Over.TOKENS, Over.ROW_MEANS])
def test_tokens_are_counted_exactly_in_bfloat16(over: Over) -> None:
    """bfloat16 has no 301: a count in it would divide by 300 or 302."""
    mask = torch.ones(1, 301, dtype=torch.bfloat16)
    one = torch.zeros_like(mask)
    one[0, 0] = 1
    assert reduce(one, mask, Reduction(over)).item() == pytest.approx(1 / 301, rel=1e-6)
