"""Where a loss loses its bits: what one call costs alone, what a wider dtype gives back, and what rounded log-probs do to the clip."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recorded import Recorded, record
from torch import Tensor

import nanscope
from nanscope.audit import audit_snapshots
from nanscope.errors import NanscopeError
from nanscope.foresight.precision import precision
from nanscope.foresight.precision_model import Precision, Rounds
from nanscope.foresight.precision_run import EXACT, Widened, change, own_errors, replaced
from nanscope.foresight.precision_sums import sums
from nanscope.foresight.precision_tokens import grid_of, half_unit
from nanscope.program.calls import Computes

B, T = 6, 24


def grpo(logps, old_logps, ref_logps, advantages, mask):
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    per_token_loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    d = ref_logps - logps
    kl = torch.exp(d) - d - 1
    per_token_loss = per_token_loss + 0.04 * kl
    return ((per_token_loss * mask).sum(-1) / mask.sum(-1)).mean()


def batch(dtype: torch.dtype = torch.float32, *, apart: float = 0.1) -> list[Tensor]:
    old = -0.5 - torch.rand(B, T) * 4
    logps = (old + apart * torch.randn(B, T)).to(dtype).requires_grad_()
    mask = (torch.arange(T) < torch.randint(T // 2, T, (B, 1))).float()
    return [logps, old.to(dtype), (old + 0.05 * torch.randn(B, T)).to(dtype), torch.randn(B).to(dtype), mask.to(dtype)]


@pytest.fixture
def half() -> Precision:
    return precision(record(grpo, *batch(torch.bfloat16)).snapshot())


def call(found: Precision, op: str, name: str = "") -> Rounds:
    return next(row for row in found.calls if row.op == op and name in row.called)


# -- what a call costs -------------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_call_is_that_of_its_own_rounding(half: Precision) -> None:
    """Worked out by hand: the exact loss with nothing but the rounding of exp put in, forward, and backward where its result is read."""
    torch.manual_seed(0)
    logps, old, ref, advantages, mask = batch(torch.bfloat16)
    given = [tensor.detach().double() for tensor in (old, ref, advantages, mask)]
    x = logps.detach().double().requires_grad_()
    delta = x - given[0]
    rounded = torch.exp(logps.detach() - old).double() - torch.exp((logps.detach() - old).double())
    ratio = torch.exp(delta) + rounded
    surrogate = torch.min(ratio * given[2][:, None], ratio.clamp(0.8, 1.2) * given[2][:, None])
    d = given[1] - x
    per_token = -surrogate + 0.04 * (torch.exp(d) - d - 1)
    loss = ((per_token * given[3]).sum(-1) / given[3].sum(-1)).mean()
    found = call(half, "exp", "ratio")
    assert found.alone is not None
    assert found.alone.loss == pytest.approx(float(loss.detach()) - half.exact_loss, rel=1e-9)


def test_first_order_is_what_running_gives_where_nothing_is_decided(half: Precision) -> None:
    """Rounding is small: sensitivity times error foretells loss and gradient norm, but for calls in front of a kink, such as a clip."""
    calls = [row for row in precision(record(smooth, *batch(torch.float32)).snapshot()).calls if row.alone is not None]
    assert len(calls) > 5
    for row in calls:
        assert row.alone is not None
        assert row.alone.loss == pytest.approx(row.loss, rel=1e-3, abs=1e-15)
        assert row.alone.norm == pytest.approx(row.norm, rel=1e-3, abs=1e-13)


def smooth(logps, old_logps, ref_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    d = ref_logps - logps
    return ((-ratio * advantages[:, None] + 0.04 * (torch.exp(d) - d - 1)) * mask).sum() / mask.sum()


def test_an_exact_call_costs_nothing(half: Precision) -> None:
    """A minus sign, a maximum and a mask of ones and zeros round nothing, forward or backward, and are not listed."""
    assert not {"neg", "minimum"} & {row.op for row in half.calls}
    assert all(row.called != "per_token_loss * mask" for row in half.calls)


def test_the_costs_add_up_to_what_was_recorded() -> None:
    """Without a kink the errors of the calls are those of the step: what is put in call by call is all that float32 lost."""
    recorded = record(smooth, *batch(torch.float32))
    found = precision(recorded.snapshot())
    together = math.fsum(row.alone.loss for row in found.calls if row.alone is not None)
    assert found.left_out == 0
    assert together == pytest.approx(found.recorded.loss, rel=1e-3, abs=1e-14)


def test_two_sides_of_a_minimum_are_rounded_together() -> None:
    """ratio · A and clipped · A are the same number where the clip is open: rounded one without the other a minimum would pick the lower
    of the two at every token, which never happened."""
    found = precision(record(grpo, *batch(apart=0.01)).snapshot())
    row = call(found, "mul", " and ")
    assert len(row.places) == 2 and row.called == "ratio * advantages[:, None] and clipped * advantages[:, None]"
    assert row.alone is not None and row.alone.loss == pytest.approx(row.loss, rel=1e-3, abs=1e-15)
    together = math.fsum(row.alone.loss for row in found.calls if row.alone is not None)
    assert together == pytest.approx(found.recorded.loss, rel=1e-2, abs=1e-13)


def test_the_costliest_call_comes_first() -> None:
    """One line in bfloat16 within a loss in float32 is the line that is named, and float32 there gives nearly all back."""

    def loss(logps, old_logps, ref_logps, advantages, mask):
        log_ratio = logps - old_logps
        ratio = torch.exp(log_ratio.bfloat16()).float()
        return -(ratio * advantages[:, None] * mask).sum() / mask.sum()

    found = precision(record(loss, *batch()).snapshot())
    assert found.harmful is (found.recorded.gradient > 0.01)
    assert found.worst is not None and found.worst.where.startswith("test_precision.py:")
    assert found.worst.dtype == "bfloat16" and found.worst.to == "float32" and found.worst.wider is not None
    assert found.recorded.gradient > 1e-4
    assert found.wide is not None and found.wide.gradient < 1e-5
    assert found.worst.called in found.sentence and "bfloat16" in found.sentence


def test_a_wider_call_is_what_a_cast_in_the_code_gives() -> None:
    """`.float()` on the operand, written into the loss, gives the same numbers, bit for bit."""

    def narrow(logps, old_logps, advantages, mask):
        ratio = torch.exp(logps - old_logps)
        return -(ratio * advantages[:, None] * mask).sum() / mask.sum()

    def wide(logps, old_logps, advantages, mask):
        ratio = torch.exp((logps - old_logps).float())
        return -(ratio * advantages[:, None] * mask).sum() / mask.sum()

    logps, old, _, advantages, mask = batch(torch.bfloat16)
    plain = record(narrow, logps, old, advantages, mask)
    at = next(index for index, one in enumerate(plain.program.calls) if one.name == "exp")
    run = plain.program.execute(plain.tensors, performer=Widened(plain.run.values, {at}, torch.float32))
    cast = record(wide, logps, old, advantages, mask)
    assert torch.equal(run.values[plain.program.output], cast.run.values[cast.program.output])
    leaves = [next(leaf.id for leaf in one.program.leaves if leaf.diff) for one in (plain, cast)]
    assert torch.equal(run.grads[leaves[0]], cast.run.grads[leaves[1]])


def test_a_run_with_nothing_rounded_is_the_exact_one() -> None:
    """What is put in is a difference: of a program in float64 there is none, and the sentence says so."""
    recorded = record(grpo, *batch(torch.float64))
    found = precision(recorded.snapshot())
    assert found.calls == () and found.recorded.gradient == 0.0 and not found.harmful
    assert "float64" in found.sentence
    trace = recorded.trace
    assert all(not own_errors(trace, index).some for index in range(len(trace.program.calls)))
    exact = trace.program.execute(trace.tensors, dtype=EXACT)
    assert change(trace, replaced(trace, {}), exact).gradient == 0.0


def test_a_step_that_only_half_precision_kills_is_blamed_on_the_call() -> None:
    """exp(12) is beyond float16 and nothing in float64: the call that overflows makes the step non-finite alone, and float32 there heals."""

    def loss(logps, old_logps, mask):
        return (torch.exp(logps - old_logps) * mask).sum() / mask.sum()

    logps, old = torch.full((2, 4), -1.0).half().requires_grad_(), torch.full((2, 4), -1.0).half()
    old[1, 2] = -13.0
    found = precision(record(loss, logps, old, torch.ones(2, 4).half()).snapshot())
    assert found.harmful and not found.recorded.finite and math.isfinite(found.exact_loss)
    assert found.worst is not None and found.worst.op == "exp" and not found.worst.alone.finite
    assert found.worst.wider is not None and found.worst.wider.finite
    assert "not finite" in found.sentence
    json.dumps(found.to_json(), allow_nan=False)


# -- log-probs ---------------------------------------------------------------------------------------------------------------------


def test_nats_off_in_bfloat16_are_those_of_rounding() -> None:
    """Held against the rounding itself, at the tokens that count."""
    given = batch()
    found = precision(record(grpo, *given).snapshot())
    row = next(row for row in found.moved if "bfloat16" in row.label)
    logps, mask = given[0].detach(), given[4] > 0
    off = (logps.bfloat16().float() - logps).abs()[mask]
    assert row.off is not None and row.off.largest == pytest.approx(float(off.max()))
    assert row.off.mean == pytest.approx(float(off.mean()))
    policy = found.log_probs[0]
    assert (policy.name, policy.dtype, policy.grid, policy.tokens, policy.off) == ("logps", "float32", "float32", int(mask.sum()), None)


def test_tokens_that_the_clip_decides_differently_are_counted() -> None:
    """Two tokens sit within rounding of the clip at 1.2: in float32 they are passed, and in bfloat16 not."""
    logps = torch.full((2, 8), -2.0)
    old = torch.full((2, 8), -2.0)
    logps[:, ::2] += torch.linspace(-0.1, 0.1, 8).reshape(2, 4)
    old[0, 1] = old[1, 3] = -2.0 - math.log(1.2) + 1e-3
    given = (logps.requires_grad_(), old, torch.zeros(2, 8) - 2, torch.ones(2), torch.ones(2, 8))
    found = precision(record(grpo, *given).snapshot())
    assert (found.decided, found.of) == (0, 16)
    row = next(row for row in found.moved if "bfloat16" in row.label)
    new = (logps.detach().bfloat16().double() - old.bfloat16().double()).exp() <= 1.2
    was = (logps.detach().double() - old.double()).exp() <= 1.2
    assert row.decided == int((new != was).sum()) == 2


def gspo(logps, old_logps, ref_logps, advantages, mask):
    log_ratio = ((logps - old_logps) * mask).sum(-1) / mask.sum(-1)
    ratio = torch.exp(log_ratio)
    return -torch.min(ratio * advantages, torch.clamp(ratio, 0.97, 1.03) * advantages).mean()


def cispo(logps, old_logps, ref_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    weight = torch.clamp(ratio, max=1.02).detach()
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()


@pytest.mark.parametrize(("loss", "of"), [(gspo, B), (cispo, None), (smooth, None)])
def test_a_clip_is_found_where_it_stands(loss: Callable[..., Tensor], of: int | None) -> None:
    """Of sequences, where these have one ratio; in front of a detach, where no gradient tells; and without a clip every token passes."""
    given = batch(apart=0.05)
    found = precision(record(loss, *given).snapshot())
    tokens = int(given[4].sum())
    assert (found.decided, found.of) == (0, of or tokens)
    moved = {row.label: row for row in found.moved}["all log-probs in bfloat16"]
    if loss is cispo:
        logps, old = (tensor.detach()[given[4] > 0] for tensor in given[:2])
        was, now = (logps - old).exp() > 1.02, (logps.bfloat16().double() - old.bfloat16().double()).exp() > 1.02
        assert moved.decided == int((was != now).sum()) > 0
    if loss is smooth:
        assert moved.decided == 0


def test_log_probs_that_came_on_a_coarse_grid_are_told_as_that() -> None:
    """Computed in bfloat16 and cast to float32: no bit beyond the eighth. What they were is not in the file; half a unit is what it may be."""
    given = batch()
    given[0] = given[0].detach().bfloat16().float().requires_grad_()
    found = precision(record(grpo, *given).snapshot())
    policy = found.log_probs[0]
    assert (policy.dtype, policy.grid, policy.coarse) == ("float32", "bfloat16", True)
    assert policy.unit is not None and policy.unit.largest == 2.0**-6  # between −8 and −4
    assert [row.label.rpartition(" ")[2] for row in found.moved] == ["above", "below"]
    assert all(row.off is not None and row.off.largest <= policy.unit.largest for row in found.moved)


def test_log_probs_that_the_program_computes_are_held_against_float64() -> None:
    """A log-softmax in bfloat16 on the tape: each token is off by what that rounded."""

    def loss(logits, ids, old_logps, advantages, mask):
        logps = torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)
        return -(torch.exp(logps - old_logps) * advantages[:, None] * mask).sum() / mask.sum()

    logits = torch.randn(B, T, 11).bfloat16().requires_grad_()
    ids = torch.randint(11, (B, T))
    exact = torch.log_softmax(logits.detach().double(), -1).gather(-1, ids[..., None]).squeeze(-1)
    found = precision(record(loss, logits, ids, exact.float(), torch.randn(B), torch.ones(B, T)).snapshot())
    held = next(row for row in found.log_probs if row.role == "log_probs")
    own = torch.log_softmax(logits.detach(), -1).gather(-1, ids[..., None]).squeeze(-1).double()
    assert held.off is not None and held.off.largest == pytest.approx(float((own - exact).abs().max()))
    assert found.worst is not None and "softmax" in found.worst.op


@pytest.mark.parametrize(
    ("number", "dtype", "unit"), [(-2.5, torch.bfloat16, 2**-7), (-2.0, torch.float16, 2**-10), (1.0, torch.float32, 2**-24)]
)
def test_half_a_unit_is_half_the_distance_to_the_next_number(number: float, dtype: torch.dtype, unit: float) -> None:
    """For numbers of any size; the next one away from 0 is twice as far."""
    held = torch.tensor(number, dtype=dtype)
    beyond = torch.nextafter(held, torch.tensor(math.copysign(math.inf, number), dtype=dtype))
    assert float(half_unit(held, dtype)) == unit == abs(float(beyond.double() - held.double())) / 2


def test_a_few_round_numbers_are_no_grid() -> None:
    """Log-probs of −1, −2 and 0 are float32 as well as anything."""
    assert grid_of(torch.tensor([-1.0, -2.0, 0.0] * 9)) is torch.float32
    assert grid_of(torch.randn(99).half().float()) is torch.float16


# -- sums and differences ----------------------------------------------------------------------------------------------------------


def summed(numbers: Tensor) -> Recorded:
    return record(lambda x: x.sum(), numbers.requires_grad_())


def test_the_order_of_a_sum_is_told_where_it_matters() -> None:
    """1e8 and then many ones: forward, backward and in pairs float32 loses different amounts, and float64 none."""
    numbers = torch.cat([torch.tensor([1e8]), torch.ones(4095), torch.tensor([-1e8])])
    recorded = summed(numbers)
    trace = recorded.trace
    (found,) = sums(trace, trace.program.execute(trace.tensors, dtype=EXACT).grads)
    assert found.terms == 4097 and found.condition == pytest.approx((2e8 + 4095) / 4095)
    assert found.recorded == pytest.approx(float(numbers.detach().sum()) - 4095)
    assert found.backwards == pytest.approx(float(numbers.detach().flip(0).sum()) - 4095)
    pairs = torch.nn.functional.pad(numbers.detach(), (0, 8192 - 4097))
    while len(pairs) > 1:
        pairs = pairs[::2] + pairs[1::2]
    assert found.pairwise == pytest.approx(float(pairs[0]) - 4095)


def test_bits_that_cancel_are_counted() -> None:
    """1 + 2⁻¹⁰ minus 1 leaves 14 of 24 bits; two equal numbers leave none, and are counted for themselves."""
    left = torch.tensor([1 + 2.0**-10, 3.0, 5.0]).requires_grad_()
    recorded = record(lambda a, b: ((a - b) * torch.tensor([1.0, 2.0, 3.0])).sum(), left, torch.tensor([1.0, 3.0, -5.0]))
    (found,) = precision(recorded.snapshot()).differences
    assert (found.bits, found.most, found.elements, found.equal) == (24, pytest.approx(10.0, abs=0.01), 3, 1)


# -- what cannot be measured -------------------------------------------------------------------------------------------------------


def test_what_has_no_measure_is_one_error() -> None:
    """No program, a program of a gradient, a loss that is not finite in float64 either, one without a gradient."""
    snapshot = record(grpo, *batch()).snapshot()
    bad = batch()
    bad[1][0, 0] = -math.inf
    cases = [
        replace(snapshot, program=replace(snapshot.program, calls=())),
        replace(snapshot, program=replace(snapshot.program, computes=Computes.GRADIENT)),
        record(grpo, *bad).snapshot(),
        record(lambda x: (x * 0.0).sum(), batch()[0]).snapshot(),
    ]
    for case in cases:
        with pytest.raises(NanscopeError) as raised:
            precision(case)
        assert raised.value.slug == "nothing-to-measure"


def test_a_large_program_runs_its_likeliest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time would run out the first-order figures choose, and how many are left out is said."""
    monkeypatch.setattr("nanscope.foresight.precision.WORK", 1)
    found = precision(record(grpo, *batch()).snapshot())
    run = [row for row in found.calls if row.alone is not None]
    assert len(run) == 6 and found.left_out == len(found.calls) - 6 > 0
    assert max(abs(row.norm) for row in found.calls) in {abs(row.norm) for row in run}


def test_everything_survives_json_and_a_file(tmp_path: Path, half: Precision) -> None:
    """Plain data, with the sentence."""
    told = json.loads(json.dumps(half.to_json(), allow_nan=False))
    assert told["sentence"] == half.sentence and told["schema"] == 1
    assert len(told["calls"]) == len(half.calls) and told["calls"][0]["alone"]["gradient"] == half.calls[0].alone.gradient
    assert all(row["name"] for row in (*told["sums"], *told["differences"]))


def test_a_step_of_trl(tmp_path: Path) -> None:
    """GRPOTrainer as installed: rounding in float32 does no harm, the costs stand at its own lines, and the first step, whose loss is 0, has
    the gradient that it has in float64."""
    pytest.importorskip("trl")
    from trl_runs import make_trainer

    trainer = make_trainer(tmp_path, beta=0.04, loss_type="grpo", max_steps=2)
    with nanscope.watch(trainer, out=tmp_path / "run", save_steps=(1, 2)) as scope:
        trainer.train()
    first, second = (nanscope.load(path) for path in sorted(scope.out.glob("batch-*.safetensors")))
    found = precision(second)
    assert not found.harmful and 0 < found.recorded.gradient < 1e-5 and found.left_out == 0
    assert found.worst is not None and found.worst.where.startswith("grpo_trainer.py:")
    assert {held.role: held.grid for held in found.log_probs} == dict.fromkeys(("log_probs", "old_log_probs", "ref_log_probs"), "float32")
    assert all(row.change.gradient == 0 for row in precision(first).moved)  # both sides of each log-ratio are rounded alike
    by_slug = {finding.slug: finding for finding in audit_snapshots([first]).findings}
    assert by_slug["first_step_exact"].figures["gradient"] < 1e-6
    assert by_slug["advantage_noise"].figures["cosine"] > 0.9
