"""Three clamps for every loss that has a ratio or a KL, under one name each, before exp or after it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.clamps import AFTER, CLAMPS, NAMES, own_clamps
from nanscope.frameworks.losses import LOSSES, framework_loss, framework_settings
from nanscope.objective.bounds import Bounds
from nanscope.objective.settings import LossInputs, LossSettings

# What a loss needs before it has a KL at all.
WITH_KL = {
    "trl.": {"beta": 0.04}, "unsloth.": {"beta": 0.04}, "skyrl.": {"use_kl_loss": True}, "verl.ppo_loss": {"use_kl_loss": True},
    "slime.policy": {"use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.04},
}  # fmt: skip
NEEDED = {"verl.dro": {"dro_beta": 0.1}, "tinker.dro": {"beta": 0.1}}


def given(key: str, **more: object) -> LossSettings:
    wanted: dict[str, object] = dict(NEEDED.get(key, {}))
    for prefix, with_kl in WITH_KL.items():
        if key.startswith(prefix) and set(with_kl) <= set(LOSSES[key].names()):
            wanted |= with_kl
    return framework_settings(key, **wanted, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", LOSSES)
@pytest.mark.parametrize("name", CLAMPS)
def test_every_loss_takes_a_clamp_of_what_it_has(key: str, name: str) -> None:
    """A number puts the bounds there, None opens them, and a loss without that term stays as it is."""
    own = own_clamps(given(key))
    if name not in own:
        assert given(key, **{name: 7.0}) == given(key, **{name: None}) == given(key)
        return
    assert own_clamps(given(key, **{name: 7.0}))[name] == Bounds(-7.0, 7.0)
    assert own_clamps(given(key, **{name: None}))[name] == Bounds()
    others = {other: bounds for other, bounds in own_clamps(given(key, **{name: 7.0})).items() if other != name}
    assert others == {other: bounds for other, bounds in own.items() if other != name}


OWN = {  # (loss, clamp): what the framework does when nobody asks
    ("verl.vanilla", "log_ratio_clamp_value"): Bounds(-20.0, 20.0),
    ("verl.gspo", "log_ratio_clamp_value"): Bounds(None, 10.0),
    ("verl.clip_cov", "log_ratio_clamp_value"): Bounds(),
    ("trl.grpo", "log_ratio_clamp_value"): Bounds(),
    ("trl.grpo", "kl_input_clamp_value"): Bounds(),
    ("nemo_rl.clipped_pg", "log_ratio_clamp_value"): Bounds(),
    ("nemo_rl.clipped_pg", "kl_input_clamp_value"): Bounds(-20.0, 20.0),
    ("nemo_rl.clipped_pg", "kl_output_clamp_value"): Bounds(-10.0, 10.0),
    ("unsloth.grpo", "kl_input_clamp_value"): Bounds(-20.0, 20.0),
    ("openrlhf.ppo", "log_ratio_clamp_value"): Bounds(-20.0, 20.0),
    ("torchtitan.dapo", "log_ratio_clamp_value"): Bounds(-10.0, 10.0),
}


@pytest.mark.parametrize(("key", "name"), OWN, ids=lambda value: str(value))
def test_not_asked_for_is_as_the_framework_has_it(key: str, name: str) -> None:
    """The default is the framework's own."""
    assert own_clamps(given(key))[name] == OWN[key, name]


def batch(stale: float, at: tuple[int, int] = (0, 2)) -> LossInputs:
    """Two rows of three tokens; the last of each is masked. stale: Δ and d at one of them, in nat."""
    log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]])
    old, ref = log_probs - 0.1, log_probs + 0.2
    old[at], ref[at] = log_probs[at] - stale, log_probs[at] + stale
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    return LossInputs(log_probs.requires_grad_(), old, ref, old.clone(), torch.tensor([-0.5, 1.5]), mask)


def gradient(key: str, inputs: LossInputs, **settings: object) -> tuple[float, Tensor]:
    trace = framework_loss(key, inputs, **settings)  # type: ignore[arg-type]
    return trace.loss.item(), torch.autograd.grad(trace.loss, inputs.log_probs)[0]


@pytest.mark.parametrize("key", ("trl.grpo", "trl.dapo", "verl.clip_cov", "nemo_rl.clipped_pg", "slime.policy"))
def test_a_clamp_before_exp_saves_the_step_and_one_after_it_does_not(key: str) -> None:
    """The loss is finite in both orders; the gradient only where the exponent is what is clamped."""
    with_kl = {"beta": 0.0} if key.startswith("trl") else {"reference_policy_kl_penalty": 0.0} if key.startswith("nemo") else {}
    loss, bare = gradient(key, batch(200.0), **with_kl)
    assert not bare.isfinite().all()
    loss, before = gradient(key, batch(200.0), log_ratio_clamp_value=20.0, **with_kl)
    assert math.isfinite(loss) and before.isfinite().all()
    loss, after = gradient(key, batch(200.0), log_ratio_clamp_value=20.0, clamp_after_exp=True, **with_kl)
    assert math.isfinite(loss) and after.isnan().any()


@pytest.mark.parametrize("key", ("trl.grpo", "unsloth.grpo"))
def test_the_kl_is_clamped_in_either_order_too(key: str) -> None:
    """k3 has an exp of its own, and the same two orders."""
    quiet = batch(0.1)
    inputs = LossInputs(quiet.log_probs, None, batch(200.0, (0, 1)).ref_log_probs, None, quiet.advantages, quiet.mask)
    how = {"beta": 0.04, "kl_output_clamp_value": None}
    assert not gradient(key, inputs, kl_input_clamp_value=None, **how)[1].isfinite().all()
    loss, before = gradient(key, inputs, kl_input_clamp_value=20.0, **how)
    assert math.isfinite(loss) and before.isfinite().all()
    loss, after = gradient(key, inputs, kl_input_clamp_value=20.0, clamp_after_exp=True, **how)
    assert math.isfinite(loss) and after.isnan().any()


def test_healthy_tokens_do_not_notice_a_wide_clamp() -> None:
    """Where nothing reaches the bounds, the loss and its gradient are the same bits in both orders."""
    for key in ("trl.grpo", "verl.vanilla", "nemo_rl.clipped_pg"):
        loss, plain = gradient(key, batch(0.3))
        for more in ({}, {AFTER: True}):
            other, clamped = gradient(key, batch(0.3), log_ratio_clamp_value=20.0, **more)
            assert other == loss and torch.equal(clamped, plain)


@pytest.mark.parametrize(
    ("settings", "slug"),
    [
        ({"log_ratio_clamp_value": -1.0}, "unknown-setting-value"),
        ({"log_ratio_clamp_value": 0}, "unknown-setting-value"),
        ({"log_ratio_clamp_value": "20"}, "unknown-setting-value"),
        ({"kl_input_clamp_value": True}, "unknown-setting-value"),
        ({"clamp_after_exp": 1}, "unknown-setting-value"),
        ({"log_ratio_clamp": 20.0}, "unknown-setting"),
    ],
    ids=str,
)
def test_bad_values_are_one_clear_error(settings: dict[str, object], slug: str) -> None:
    """A clamp is a positive number or None, and a name that is not known lists those that are."""
    with pytest.raises(NanscopeError) as caught:
        given("trl.grpo", **settings)
    assert caught.value.slug == slug
    if slug == "unknown-setting":
        assert all(name in str(caught.value) for name in NAMES)
