"""One clamp after another on a recorded step: which are finite, which leave the healthy tokens alone, and that after exp none helps."""

from __future__ import annotations

import math

import pytest
import torch
from recorded import record

from nanscope.errors import NanscopeError
from nanscope.replay.sweep import Point, Sweep, sweep_clamp
from nanscope.snapshot.step import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore")

LP = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]])
DELTA = torch.tensor([[0.5, -1.25, 0.0], [2.5, 0.75, 200.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
ADV = torch.tensor([0.5, -1.5])


def ratio_loss(logps, old_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


def kl_loss(logps, old_logps, ref_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    d = ref_logps - logps
    per_token_kl = torch.exp(d) - d - 1
    return ((-ratio * advantages[:, None] + 0.1 * per_token_kl) * mask).sum() / mask.sum()


def two_exps(logps, old_logps, ref_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    other = torch.exp(ref_logps - logps)
    return ((-ratio * advantages[:, None] + 0.1 * other) * mask).sum() / mask.sum()


def of_ratio(dtype: torch.dtype = torch.float32, stale: float = 200.0, at: tuple[int, int] = (1, 2)) -> Snapshot:
    delta = DELTA.clone()
    delta[1, 2] = 0.0
    delta[at] = stale
    tensors = [tensor.to(dtype) for tensor in (LP, LP - delta, ADV, MASK)]
    return record(ratio_loss, tensors[0].requires_grad_(), *tensors[1:]).snapshot()


def usable(swept: Sweep) -> list[Point]:
    """All points but the last: exp of the limit itself overflows again with an advantage above 1."""
    return [point for point in swept.points if point.bound < swept.limit - 1]


def test_at_the_very_end_of_exp_the_next_product_overflows(swept: Sweep) -> None:
    """A clamp of 88.7 is finite by itself; times an advantage of −1.5 it is not, and the table says so."""
    last = swept.points[-1]
    assert last not in usable(swept) and not last.before.works and last.objective_before is not None and not last.objective_before.works


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep_clamp(of_ratio())


def test_the_smallest_clamp_is_that_of_the_largest_healthy_token(swept: Sweep) -> None:
    """Below |Δ| = 2.5 a counted token loses its gradient; from there on nothing changes; the stale token is no healthy one."""
    assert swept.largest == pytest.approx(2.5, abs=1e-5)
    assert swept.chosen is not None and 2.5 <= swept.chosen <= 2.51
    for point in usable(swept):
        assert point.before.works
        assert (point.before.distortion == 0) is (point.bound >= swept.largest), point
        if point.bound < swept.largest:
            assert point.before.distortion is not None and point.before.distortion > 0.1


def test_after_exp_no_clamp_helps(swept: Sweep) -> None:
    """The loss is finite and the gradient is not, at every bound, in the program and in the objective."""
    for point in usable(swept):
        assert not point.after.works and point.after.bad == 1 and point.after.distortion is None
        assert point.after.loss is not None and math.isfinite(point.after.loss)
        assert point.objective_after is not None and not point.objective_after.works and point.objective_after.bad == 1
    assert "Clamping after exp instead leaves a non-finite gradient at every bound" in swept.sentence


def test_the_objective_agrees_with_the_program(swept: Sweep) -> None:
    """A loss of the same kind on the same batch is finite at the same bounds, and untouched from the largest healthy exponent on."""
    assert swept.key is not None and swept.key.startswith("trl.grpo")
    for point in usable(swept):
        assert point.objective_before is not None and point.objective_before.works
        if point.bound >= swept.largest:
            assert point.objective_before.distortion == 0


def test_the_grid_goes_from_below_the_healthy_to_the_end_of_exp(swept: Sweep) -> None:
    """In ascending order, with what frameworks use among it."""
    bounds = [point.bound for point in swept.points]
    assert bounds == sorted(set(bounds)) and bounds[0] < swept.largest
    assert {5.0, 10.0, 20.0} < set(bounds)
    assert 0.95 * swept.limit < bounds[-1] <= swept.limit


@pytest.mark.parametrize(("dtype", "limit", "stale"), [(torch.float32, 88.72, 200.0), (torch.float16, 11.09, 60.0)], ids=str)
def test_the_limit_is_that_of_the_dtype(dtype: torch.dtype, limit: float, stale: float) -> None:
    """Half precision ends at 11 nat: a clamp of 20 is of no use there and is not tried."""
    swept = sweep_clamp(of_ratio(dtype, stale))
    assert swept.limit == pytest.approx(limit, abs=0.01) and swept.value == pytest.approx(stale, rel=0.01)
    assert all(point.bound <= swept.limit for point in swept.points)


def test_a_counted_token_that_overflows_is_not_taken_for_healthy() -> None:
    """Its own gradient cannot be kept; that of the others can."""
    swept = sweep_clamp(of_ratio(at=(0, 1)))
    assert swept.largest == pytest.approx(2.5, abs=1e-5)
    good = next(point for point in swept.points if point.bound == swept.chosen)
    assert good.before.works and good.objective_before is not None and good.objective_before.works
    assert good.objective_before.distortion == 0


def test_a_masked_exponent_that_is_merely_large_does_not_count() -> None:
    """A clamp may cut it: the loss does not read it."""
    delta = DELTA.clone()
    delta[0, 2] = 50.0
    swept = sweep_clamp(record(ratio_loss, LP.clone().requires_grad_(), LP - delta, ADV, MASK).snapshot())
    assert swept.largest == pytest.approx(2.5, abs=1e-5)


def test_a_kl_is_swept_as_a_kl() -> None:
    """The clamp of the objective is then the one on the input of the KL."""
    ref = LP + torch.tensor([[0.1, -0.2, 120.0], [0.3, 1.5, 0.0]])
    swept = sweep_clamp(record(kl_loss, LP.clone().requires_grad_(), LP - 0.1, ref, ADV, MASK).snapshot())
    assert swept.key is not None and "kl_input_clamp_value" in swept.key
    assert swept.largest == pytest.approx(1.5, abs=1e-5)
    assert swept.chosen is not None and 1.5 <= swept.chosen <= 1.51


def test_a_second_overflow_is_clamped_as_well() -> None:
    """Two exps that overflow need the clamp at both places."""
    ref = LP + torch.tensor([[0.0, 0.0, 150.0], [0.0, 0.0, 0.0]])
    swept = sweep_clamp(record(two_exps, LP.clone().requires_grad_(), LP - DELTA, ref, ADV, MASK).snapshot())
    assert swept.chosen is not None and all(point.before.works for point in usable(swept))


def test_one_may_name_the_objective() -> None:
    """The key of another framework's loss; what it has of its own is replaced by the bound that is tried."""
    swept = sweep_clamp(of_ratio(), "verl.vanilla")
    assert swept.key == "verl.vanilla, log_ratio_clamp_value"
    tight = swept.points[0]
    assert tight.objective_before is not None and tight.objective_before.distortion not in (None, 0)


def no_exp(logps, old_logps, advantages, mask):
    weight = advantages[:, None] / (old_logps - old_logps)
    return (logps * weight * mask).sum()


def nameless(x, y, a):
    return (torch.exp(x - y) * a).sum() * 0.0


@pytest.mark.parametrize("stale", [0.0, None], ids=["finite", "division"])
def test_without_an_exp_that_overflows_there_is_nothing_to_sweep(stale: float | None) -> None:
    """One clear error that says what the step has instead."""
    inputs = LP.clone().requires_grad_(), LP - 0.1, ADV, MASK
    snapshot = of_ratio(stale=stale) if stale is not None else record(no_exp, *inputs).snapshot()
    with pytest.raises(NanscopeError, match="finite" if stale is not None else "div") as caught:
        sweep_clamp(snapshot)
    assert caught.value.slug == "nothing-to-sweep"


def test_a_batch_that_cannot_be_read_leaves_the_program_alone() -> None:
    """The sweep of the recorded program needs no roles; why there is no objective beside it is said."""
    swept = sweep_clamp(record(nameless, LP.clone().requires_grad_(), LP - DELTA, MASK).snapshot())
    assert swept.key is None and "scope.tag" in swept.no_objective
    assert all(point.objective_before is None for point in swept.points) and swept.chosen is not None
    assert swept.to_json()["chosen"] == swept.chosen
