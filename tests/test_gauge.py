"""The gauge of a step: extremes on counted and masked tokens, headroom, clip fraction, and nothing where nothing is held."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import Recorded, leaf, record
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanscope import watch
from nanscope.capture.gauge import Beside, Dials, Gauge, read_gauge
from nanscope.capture.reading import Extremes, Mean, Reading, Spot
from nanscope.objective.bounds import Bounds
from nanscope.objective.settings import Correction, Gate, Level
from nanscope.program.numbers import exponent_limit
from nanscope.snapshot.history import read


def told(recorded: Recorded) -> Reading:
    """What the gauge says of a recorded loss."""
    gauged = read_gauge(Dials.of(recorded.program), recorded.run.values)
    return Reading() if gauged.numbers is None else gauged.told(gauged.numbers.tolist())


def ppo(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return (torch.min(ratio, clipped) * mask).sum() / mask.sum()


@given(st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_extremes_match_a_loop(log_ratios: list[float], counted: list[bool]) -> None:
    """Largest exponent and clip fraction are those of a plain loop over the tokens."""
    delta = torch.tensor(log_ratios).reshape(3, 4)
    mask = torch.tensor(counted, dtype=torch.float32).reshape(3, 4)
    old = leaf(3, 4).detach()
    recorded = record(ppo, (old + delta).requires_grad_(), old, mask)
    reading = told(recorded)
    exponents = (old + delta) - old
    inside = [float(x) for x, c in zip(exponents.flatten(), counted, strict=True) if c]
    outside = [float(x) for x, c in zip(exponents.flatten(), counted, strict=True) if not c]
    assert (reading.highest, reading.lowest) == ((max(inside), min(inside)) if inside else (None, None))
    assert (reading.highest_masked, reading.lowest_masked) == ((max(outside), min(outside)) if outside else (None, None))
    assert reading.headroom == pytest.approx(exponent_limit(torch.float32) - max(inside + outside))
    if inside:
        ratios = torch.tensor(inside).exp()
        assert reading.clipped == pytest.approx(float(((ratios < 0.8) | (ratios > 1.2)).float().mean()), abs=0.1)
        assert reading.kl_old is not None
        assert reading.kl_old.value == pytest.approx(float((ratios - 1 - torch.tensor(inside)).mean()), rel=1e-3, abs=1e-5)


def test_headroom_goes_below_zero_when_exp_overflows() -> None:
    """The limits are those of the dtype: 88.72 nats in float32 and bfloat16, 11.09 in float16."""
    assert exponent_limit(torch.float32) == pytest.approx(88.72, abs=0.01)
    assert exponent_limit(torch.bfloat16) == pytest.approx(88.72, abs=0.01)
    assert exponent_limit(torch.float16) == pytest.approx(11.09, abs=0.01)
    old = leaf(2, 3).detach()
    recorded = record(ppo, (old + 100).requires_grad_(), old, torch.ones(2, 3))
    reading = told(recorded)
    assert reading.headroom is not None and reading.headroom < -11


def test_of_two_exponents_one_that_is_not_held_may_be_the_one_that_counts() -> None:
    """What is known of the other is no headroom of the loss, nor the largest exponent; it is still known of itself."""

    def with_kl(logps: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        ratio = torch.exp(logps - old)
        log_ratio = ref - logps
        return (ratio + torch.exp(log_ratio) - log_ratio - 1).sum()

    recorded = record(with_kl, leaf(2, 3), leaf(2, 3).detach(), leaf(2, 3).detach())
    dials = Dials.of(recorded.program)
    assert told(recorded).headroom is not None
    hidden = dials.exponents[1][0]
    gauged = read_gauge(dials, {value: tensor for value, tensor in recorded.run.values.items() if value != hidden})
    assert gauged.numbers is not None
    reading = gauged.told(gauged.numbers.tolist()).joined(told(recorded))
    assert (reading.headroom, reading.highest, reading.highest_masked) == (None, None, None)
    assert {one.spot for one in reading.extremes} == {spot for _, spot in dials.exponents}


def test_what_is_not_held_is_not_seen() -> None:
    """Without tensors there is nothing to read, and two readings join to the worse of each, and to the mean of means."""
    recorded = record(ppo, leaf(2, 3), leaf(2, 3).detach(), torch.ones(2, 3))
    assert read_gauge(Dials.of(recorded.program), {}).numbers is None
    spot = Spot("loss.py", 3, 0, "loss", "exp", "log_ratio")
    first = Reading((Extremes(spot, 88.0, highest=1.0, lowest=-3.0),), 0.1, kl=Mean(2.0, 4.0))
    second = Reading((Extremes(spot, 88.0, highest=3.0, lowest=-1.0, highest_masked=2.0),), kl=Mean(4.0, 2.0))
    joined = first.joined(second)
    assert joined.extremes == (Extremes(spot, 88.0, 3.0, -3.0, 2.0, None),)
    assert (joined.headroom, joined.clipped, joined.kl) == (85.0, 0.1, Mean(6.0, 6.0))


def grpo(logps: Tensor, old: Tensor, ref: Tensor, rollout_log_probs: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    weight = torch.exp(old - rollout_log_probs).clamp(max=2.0)
    ref_log_ratio = ref - logps
    per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1
    loss = -ratio * weight + 0.04 * per_token_kl - 0.01 * entropy
    return (loss * mask).sum() / mask.sum()


def test_means_are_those_over_the_counted_tokens() -> None:
    """KL, entropy, and the distance from the old policy and from the sampler leave masked tokens out, whatever stands there."""
    mask = torch.ones(2, 4)
    mask[1, 2:] = 0.0
    logps, old, ref, rollout = (leaf(2, 4).detach() for _ in range(4))
    entropy = torch.rand(2, 4)
    old[1, 3], entropy[1, 2], rollout[1, 2] = -300.0, 1e6, 40.0
    reading = told(record(grpo, logps.clone().requires_grad_(), old, ref, rollout, entropy, mask))
    counted = mask.bool()
    expected = {
        "kl": ((ref - logps).exp() - (ref - logps) - 1)[counted].mean(),
        "kl_old": ((logps - old).exp() - 1 - (logps - old))[counted].mean(),
        "entropy": entropy[counted].mean(),
    }
    for name, value in expected.items():
        mean = getattr(reading, name)
        assert mean is not None and mean.tokens == 6, name
        assert mean.value == pytest.approx(float(value), rel=1e-4), name
    assert reading.mismatch is not None and reading.mismatch.tokens == 6
    assert reading.mismatch.mean == pytest.approx(float((old - rollout)[counted].abs().mean()), rel=1e-5)


class Waits(TorchDispatchMode):
    """Lists the calls that wait for a device: a number goes to the host, or as many elements are made as its content says."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(one in name for one in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_computing_it_waits_for_nothing() -> None:
    """What is read stays on the device, as one tensor, until somebody fetches it with what else crosses in that step."""
    recorded = record(grpo, leaf(2, 4), *(leaf(2, 4).detach() for _ in range(4)), torch.ones(2, 4))
    gauge, values = Gauge(), recorded.run.values
    correction = Correction(bounds=Bounds(0.5, 2.0), drop=True, gates=(Gate(Bounds(0.1, 10.0), level=Level.SEQUENCE_MEAN),))
    with Waits() as waits:
        for _ in range(2):
            gauged = gauge.read(recorded.program, values.get, Beside({}, lambda: correction))
    assert waits.found == [] and gauged.numbers is not None and gauged.numbers.shape == (gauged.size,)
    assert gauged.told(gauged.numbers.tolist()).mismatch is not None


@pytest.mark.parametrize("turned", ["filled", "negated", "subtracted"])
def test_a_mask_of_what_does_not_count_is_not_taken_for_one_of_what_does(turned: str) -> None:
    """`masked_fill(drop_mask, 0)`, `~mask` and `1 - mask` stand beside the mask that counts."""

    def loss(logps: Tensor, old: Tensor, mask: Tensor, drop_mask: Tensor) -> Tensor:
        ratio = torch.exp(logps - old)
        if turned == "filled":
            ratio = ratio.masked_fill(drop_mask, 0.0)
        padding_mask = ~mask.bool() if turned == "negated" else 1 - mask
        bias = 0.0 if turned == "filled" else padding_mask * 0.1
        return ((ratio + bias) * mask).sum() / mask.sum()

    logps = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    found = told(record(loss, logps, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[False, True, False]])))
    assert (found.highest, found.lowest, found.highest_masked) == (2.0, 1.0, 3.0)


def test_two_steps_of_one_structure_are_read_alike() -> None:
    """Where to look is found once; the second step is read at the same places, also where it reads one tensor twice that were two."""

    def loss(logps: Tensor, old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        ratio, apart = torch.exp(logps - old), torch.exp(ref - logps)
        return ((ratio + apart) * mask).sum()

    gauge, mask = Gauge(), torch.tensor([[1.0, 1.0, 0.0]])
    old, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-2.0, -7.0, -1.0]])
    for first, second in ((old, old), (old, ref), (ref, old)):
        recorded = record(loss, torch.zeros(1, 3, requires_grad=True), first, second, mask)
        gauged = gauge.read(recorded.program, recorded.run.values.get)
        assert gauged.numbers is not None
        found = gauged.told(gauged.numbers.tolist())
        highest = {one.spot.column: (one.highest, one.highest_masked) for one in found.extremes}
        assert list(highest.values()) == [
            (float(-first[0, :2].min()), -float(first[0, 2])),
            (float(second[0, :2].max()), float(second[0, 2])),
        ]
    assert len(gauge._dials) == 1


def test_the_line_of_a_step_says_what_was_read(tmp_path: Path) -> None:
    """Of several micro-batches the extremes are the worst, and the means are over all tokens; a reader of the file gets them back."""
    weight = torch.zeros(2, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    old, ref, rollout = (torch.full((2, 4), value) for value in (-1.0, -3.0, -1.5))
    entropy, larger, mask = torch.ones(2, 4), torch.full((2, 4), 3.0), torch.ones(2, 4)
    with watch(out=tmp_path) as scope:
        grpo(weight - 1.0, old, ref, rollout, entropy, mask).backward()  # type: ignore[no-untyped-call]
        grpo(weight - 1.0, old, ref + 4.0, rollout, larger, mask).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    (entry,) = read(scope.out / "history.rank0.jsonl")
    assert (entry.log_ratio_max, entry.log_ratio_min, entry.entropy, entry.kl_old) == (2.0, -2.0, 2.0, 0.0)
    assert entry.kl == pytest.approx((math.exp(-2) + 2 - 1 + math.exp(2) - 2 - 1) / 2, rel=1e-5)
    assert entry.mismatch_mean == entry.mismatch_max == 0.5
    assert entry.mismatch_k1 == pytest.approx(-0.5)


def shuffled(logps: Tensor, old: Tensor, mask: Tensor, order: Tensor) -> Tensor:
    """The loss of a batch whose rows were put in another order."""
    old, loss_mask = old[order], mask[order]
    ratio = torch.exp(logps - old)
    return (torch.clamp(ratio, 0.8, 1.2) * loss_mask).sum() / mask.sum()


def test_a_mask_counts_where_it_lies_and_not_where_it_lay() -> None:
    """That of the batch as it came has the same shape, and other rows."""
    old, mask = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    logps = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    reading = told(record(shuffled, logps.requires_grad_(), old, mask, torch.tensor([1, 0])))
    assert (reading.highest, reading.lowest) == (pytest.approx(0.5), pytest.approx(0.3))
    assert (reading.highest_masked, reading.lowest_masked) == (pytest.approx(0.6), pytest.approx(0.1))


COUNTING = {
    "multiplied": lambda ratio, mask: (ratio * mask).sum() / mask.sum(),
    "in another dtype": lambda ratio, mask: (ratio * mask.float()).sum() / mask.sum(),
    "picked": lambda ratio, mask: ratio[mask.bool()].mean(),
    "selected": lambda ratio, mask: ratio.masked_select(mask.bool()).mean(),
    "filled": lambda ratio, mask: ratio.masked_fill(~mask.bool(), 0.0).sum() / mask.sum(),
    "chosen": lambda ratio, mask: torch.where(mask.bool(), ratio, torch.zeros_like(ratio)).sum() / mask.sum(),
    "as a product": lambda ratio, mask: torch.einsum("bt,bt->", ratio, mask.float()) / mask.sum(),
}


@pytest.mark.parametrize("count", COUNTING.values(), ids=COUNTING)
def test_tokens_are_counted_however_a_mask_is_used(count: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As trainers use it."""

    def loss(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.exp(logps - old)
        return count(ratio, mask)

    logps = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    reading = told(record(loss, logps.requires_grad_(), torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 1]])))
    assert (reading.highest, reading.lowest) == (pytest.approx(0.6), pytest.approx(0.1))
    assert (reading.highest_masked, reading.lowest_masked) == (pytest.approx(0.5), pytest.approx(0.3))


def test_a_mask_of_what_does_not_count_is_none_of_what_does() -> None:
    """Whose inverse the loss counts by: which tokens those are is not known then, and all are among the counted."""

    def loss(logps: Tensor, old: Tensor, padding_mask: Tensor) -> Tensor:
        return (torch.exp(logps - old) * ~padding_mask).sum() / (~padding_mask).sum()

    logps = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    padding = torch.tensor([[False, False, True], [True, True, False]])
    reading = told(record(loss, logps.requires_grad_(), torch.zeros(2, 3), padding))
    assert (reading.highest, reading.lowest, reading.highest_masked) == (pytest.approx(0.6), pytest.approx(0.1), None)
