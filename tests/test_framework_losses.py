"""The losses of the frameworks, by their own names: the recorded figures of the real functions, what is known of each path, and errors."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nanscope
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_loss, framework_settings, live_options
from nanscope.objective.bounds import Bounds
from nanscope.objective.evaluate import LossTrace, objective
from nanscope.objective.reduction import Masking, Over
from nanscope.objective.settings import LossInputs, LossSettings

HERE = Path(__file__).parent
PATHS: dict[str, dict[str, Any]] = json.loads((HERE / "parity" / "paths.json").read_text(encoding="utf-8"))
# What the frameworks' own functions answered on one small batch, in float32 on a CPU: for each path the loss, and its gradient row by row.
FIGURES: dict[str, dict[str, Any]] = json.loads((HERE / "parity" / "figures.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-6  # fp32, absolute or relative
NAN, INF = float("nan"), float("inf")


def recorded_batch(path: dict[str, Any]) -> LossInputs:
    """The batch of the figures; the entropy titles add an entropy with one NaN."""
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in FIGURES["inputs"].items()}
    entropy = None
    if "entropy" in path:
        entropy = torch.full_like(tensors["mask"], path["entropy"]["value"])
        row, column = path["entropy"]["nan_at"]
        entropy[row, column] = NAN
    tensors["log_probs"].requires_grad_()
    return LossInputs(**tensors, entropy=entropy)


def gradient(trace: LossTrace, inputs: LossInputs) -> Tensor:
    return torch.autograd.grad(trace.loss, inputs.log_probs, retain_graph=True)[0]


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, absolute or relative, whichever is smaller; NaN equals NaN only."""
    if not torch.equal(found.isnan(), wanted.isnan()):
        return INF
    apart = (found - wanted).abs().nan_to_num(nan=0.0)
    return torch.minimum(apart, apart / wanted.abs().nan_to_num(nan=1.0).clamp(min=1e-12)).max().item()


def disagreement(settings: LossSettings, inputs: LossInputs, title: str) -> float:
    trace = objective(inputs, settings)
    wanted = torch.tensor([NAN if value is None else value for value in FIGURES["paths"][title]])
    return distance(torch.cat([trace.loss.detach().reshape(1), gradient(trace, inputs).reshape(-1)]), wanted)


@pytest.mark.parametrize("title", PATHS)
def test_a_path_gives_the_loss_and_gradient_of_the_real_function(title: str) -> None:
    """What the framework's own function answered on the recorded batch."""
    path = PATHS[title]
    settings = framework_settings(path["loss"], **path["settings"])
    assert disagreement(settings, recorded_batch(path), title) <= TOLERANCE


def test_every_recorded_path_is_listed() -> None:
    """Every figure has its path, and every path is one of a known loss."""
    assert set(PATHS) == set(FIGURES["paths"])
    assert {path["loss"] for path in PATHS.values()} <= set(LOSSES)


# What is changed, and how many paths must notice at least: a comparison that sees nothing would prove nothing.
PLANTED = {
    "clip": (lambda s: replace(s, surrogate=replace(s.surrogate, clip=Bounds(0.95, 1.05))), lambda s: hasattr(s.surrogate, "clip"), 40),
    "denominator": (lambda s: replace(s, reduction=replace(s.reduction, factor=1.001)), lambda s: True, 110),
    "mask": (lambda s: replace(s, reduction=replace(s.reduction, mask=Masking.NONE)), lambda s: s.reduction.over is not Over.VALUES, 70),
    "estimator": (lambda s: replace(s, kl=replace(s.kl, coef=s.kl.coef * 1.01)), lambda s: s.kl is not None and s.kl.coef > 0.01, 20),
    "weight": (lambda s: replace(s, correction=None), lambda s: s.correction is not None and s.correction.weigh, 12),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_change_is_seen(name: str) -> None:
    """A wrong clip, denominator, mask, coefficient or weight is red on the paths that have one."""
    change, applies, at_least = PLANTED[name]
    red = 0
    for title, path in PATHS.items():
        settings = framework_settings(path["loss"], **path["settings"])
        if applies(settings):
            red += disagreement(change(settings), recorded_batch(path), title) > TOLERANCE
    assert red >= at_least


def batch(seed: int = 0, rows: int = 3, columns: int = 5, dtype: torch.dtype = torch.float32) -> LossInputs:
    """Random log-probs of policies that are near each other; the last columns of a row are masked."""
    generator = torch.Generator().manual_seed(seed)

    def near(base: Tensor) -> Tensor:
        return (base + 0.3 * torch.randn(rows, columns, generator=generator, dtype=dtype)).clamp(max=-1e-3)

    base = -3 * torch.rand(rows, columns, generator=generator, dtype=dtype)
    lengths = torch.randint(1, columns, (rows, 1), generator=generator)
    mask = (torch.arange(columns) < lengths).to(dtype)
    advantages = torch.randn(rows, generator=generator, dtype=dtype)
    return LossInputs(near(base).requires_grad_(), near(base), near(base), near(base), advantages, mask)


def with_value(inputs: LossInputs, name: str, at: tuple[int, int], value: float) -> LossInputs:
    """The batch with one element of one tensor replaced."""
    tensor = getattr(inputs, name).detach().clone()
    tensor[at] = value
    return replace(inputs, **{name: tensor.requires_grad_(name == "log_probs")})


# The same objective under different names: key, settings. On one rank and one micro-batch they are one number.
PPO_TOKEN_MEAN = (
    ("trl.dapo", {}),
    ("trl.bnpo", {}),
    ("liger.dapo", {"beta": 0.0}),
    ("unsloth.dapo", {}),
    ("verl.vanilla", {"clip_ratio_c": 1e9}),
    ("nemo_rl.clipped_pg", {"reference_policy_kl_penalty": 0.0}),
    ("skyrl.regular", {}),
    ("skyrl.regular", {"loss_reduction": "prompt_mean"}),
    ("openrlhf.ppo", {}),
    ("areal.ppo_actor", {}),
    ("torchtitan.dapo", {}),
    ("slime.policy", {}),
)
PPO_ROW_MEANS = (
    ("trl.grpo", {}),
    ("liger.grpo", {"beta": 0.0}),
    ("unsloth.grpo", {}),
    ("verl.vanilla", {"clip_ratio_c": 1e9, "loss_agg_mode": "seq-mean-token-mean"}),
    ("nemo_rl.clipped_pg", {"reference_policy_kl_penalty": 0.0, "token_level_loss": False}),
    ("skyrl.regular", {"loss_reduction": "sequence_mean"}),
    ("openrlhf.ppo", {"token_level_loss": False}),
)
GSPO = (
    ("trl.grpo", {"importance_sampling_level": "sequence"}),
    ("liger.grpo", {"importance_sampling_level": "sequence", "beta": 0.0}),
    ("unsloth.grpo", {"importance_sampling_level": "sequence"}),
    ("verl.gspo", {"loss_agg_mode": "seq-mean-token-mean"}),
    (
        "nemo_rl.clipped_pg",
        {"sequence_level_importance_ratios": True, "token_level_loss": False, "reference_policy_kl_penalty": 0.0},
    ),
    ("skyrl.gspo", {"loss_reduction": "sequence_mean"}),
    ("openrlhf.gspo", {}),
)
SAPO = (("trl.sapo", {}), ("liger.sapo", {"beta": 0.0}), ("verl.sapo", {}), ("skyrl.sapo", {"loss_reduction": "sequence_mean"}))


@pytest.mark.parametrize("family", [PPO_TOKEN_MEAN, PPO_ROW_MEANS, GSPO, SAPO], ids=["token-mean", "row-means", "gspo", "sapo"])
@pytest.mark.parametrize("seed", range(4))
def test_one_objective_has_one_value_under_all_its_names(family: tuple[tuple[str, dict[str, Any]], ...], seed: int) -> None:
    """Frameworks that compute the same thing agree on it, loss and gradient, whatever they call it."""
    inputs = batch(seed)
    (first, settings), *others = family
    wanted = framework_loss(first, inputs, **settings)
    for key, own in others:
        found = framework_loss(key, inputs, **own)
        assert distance(found.loss.detach(), wanted.loss.detach()) <= TOLERANCE, key
        assert distance(gradient(found, inputs), gradient(wanted, inputs)) <= TOLERANCE, key


MASKED, VALID = (0, 4), (0, 0)  # in `batch` with a first row that is shorter than its columns


# L: the loss is not finite. V: a gradient of a valid token. M: the gradient of a masked one. Empty: clean.
# Each row: loss, settings, the sign of A in the faulty row, tensor, place, value, harm.
FAULTS = (
    ("trl.dapo", {}, 1, "old_log_probs", MASKED, -200.0, "M"),
    ("trl.dapo", {}, -1, "old_log_probs", MASKED, -200.0, "LM"),
    ("trl.dapo", {}, 1, "old_log_probs", VALID, -200.0, "V"),
    ("trl.dapo", {}, -1, "old_log_probs", VALID, -200.0, "LV"),
    ("trl.dapo", {}, 0, "old_log_probs", VALID, -200.0, "LV"),
    ("trl.cispo", {"epsilon_high": 5.0}, 0, "old_log_probs", VALID, -200.0, ""),
    ("trl.cispo", {"epsilon_high": 5.0}, -1, "old_log_probs", VALID, -200.0, ""),
    ("trl.sapo", {}, 1, "old_log_probs", VALID, -200.0, "V"),
    ("trl.vespo", {}, 1, "old_log_probs", VALID, NAN, ""),
    ("trl.dapo", {}, 1, "old_log_probs", MASKED, NAN, "LM"),
    ("trl.dapo", {"beta": 0.04}, 1, "log_probs", MASKED, -INF, "LM"),
    ("trl.dapo", {}, 1, "log_probs", MASKED, -INF, ""),
    ("trl.grpo", {"delta": 4.0}, -1, "old_log_probs", VALID, -200.0, "V"),
    ("trl.grpo", {"importance_sampling_level": "sequence"}, 1, "old_log_probs", MASKED, NAN, "LVM"),
    ("trl.gmpo", {}, 0, "old_log_probs", VALID, INF, ""),
    ("verl.geo_mean", {}, 0, "old_log_probs", VALID, INF, "LVM"),
    ("liger.dapo", {"beta": 0.0}, 1, "old_log_probs", MASKED, -200.0, "M"),
    ("liger.dapo", {}, 1, "log_probs", MASKED, -INF, "LM"),
    ("unsloth.grpo", {}, -1, "old_log_probs", MASKED, -200.0, ""),
    ("unsloth.grpo", {"importance_sampling_level": "sequence"}, 1, "old_log_probs", MASKED, NAN, ""),
    ("unsloth.grpo", {}, -1, "old_log_probs", VALID, -200.0, "LV"),
    ("verl.vanilla", {}, -1, "old_log_probs", MASKED, -200.0, ""),
    ("verl.vanilla", {}, -1, "old_log_probs", MASKED, NAN, ""),
    ("verl.vanilla", {"loss_agg_mode": "seq-mean-token-mean"}, -1, "old_log_probs", MASKED, NAN, "L"),
    ("verl.vanilla", {}, 1, "old_log_probs", VALID, NAN, "L"),
    ("verl.clip_cov", {}, 1, "old_log_probs", VALID, -200.0, "V"),
    ("verl.cispo", {}, 1, "old_log_probs", MASKED, NAN, "M"),
    ("verl.dro", {"dro_beta": 0.1}, 1, "old_log_probs", MASKED, NAN, "M"),
    ("verl.kl_loss", {"kl_loss_type": "low_var_kl"}, 1, "ref_log_probs", VALID, 200.0, ""),
    ("verl.kl_loss", {"kl_loss_type": "k2"}, 1, "log_probs", MASKED, NAN, "M"),
    ("nemo_rl.clipped_pg", {"reference_policy_kl_penalty": 0.0}, 1, "old_log_probs", MASKED, -200.0, "M"),
    ("nemo_rl.clipped_pg", {}, 1, "log_probs", MASKED, -INF, "M"),
    ("nemo_rl.clipped_pg", {"kl_input_clamp_value": None}, 1, "ref_log_probs", VALID, 200.0, "V"),
    ("skyrl.regular", {}, -1, "old_log_probs", MASKED, -200.0, ""),
    ("skyrl.regular", {}, -1, "old_log_probs", MASKED, NAN, "L"),
    ("skyrl.importance_sampling", {}, 1, "old_log_probs", VALID, -200.0, "LV"),
    ("openrlhf.ppo", {}, -1, "old_log_probs", MASKED, -200.0, ""),
    ("openrlhf.ppo", {"through_actor": True}, 1, "log_probs", MASKED, -INF, "L"),
    ("openrlhf.kl_loss", {"kl_estimator": "k2"}, 1, "log_probs", VALID, -INF, "V"),
    ("openrlhf.kl_loss", {"kl_estimator": "k3"}, 1, "log_probs", VALID, -200.0, ""),
    ("areal.ppo_actor", {}, -1, "old_log_probs", MASKED, -200.0, "M"),
    ("areal.ppo_actor", {"importance_sampling_level": "sequence"}, 1, "old_log_probs", MASKED, NAN, ""),
    ("torchtitan.dapo", {}, -1, "old_log_probs", MASKED, -200.0, ""),
    ("torchtitan.dapo", {}, -1, "old_log_probs", VALID, -INF, ""),
    ("slime.policy", {}, 1, "old_log_probs", MASKED, -200.0, "M"),
    ("slime.kl_loss", {"kl_loss_type": "low_var_kl"}, 1, "ref_log_probs", VALID, 200.0, "V"),
    ("slime.kl_loss", {"kl_loss_type": "k3"}, 1, "ref_log_probs", VALID, 200.0, "LV"),
    ("prime_rl.default", {}, 1, "old_log_probs", MASKED, -200.0, "LM"),
)


@pytest.mark.parametrize(("key", "settings", "sign", "name", "at", "value", "harm"), FAULTS)
def test_a_fault_harms_what_it_harms_in_the_framework(
    key: str, settings: dict[str, Any], sign: int, name: str, at: tuple[int, int], value: float, harm: str
) -> None:
    """Which of loss, valid gradient and masked gradient a fault reaches, path by path."""
    inputs = batch(1)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 0.0]])
    inputs = with_value(replace(inputs, mask=mask, advantages=torch.tensor([sign * 1.0, -0.5, 0.7])), name, at, value)
    trace = framework_loss(key, inputs, **settings)
    bad = ~gradient(trace, inputs).isfinite()
    found = (
        ("L" if not trace.loss.isfinite() else "") + ("V" if (bad & (mask > 0)).any() else "") + ("M" if (bad & (mask == 0)).any() else "")
    )
    assert found == harm


def dapo(inputs: LossInputs, count: float) -> Tensor:
    """`DAPOLoss.__call__` of torchtitan 0.3.0, from the log-probs on. count: `global_valid_tokens`."""
    assert inputs.old_log_probs is not None
    loss_mask = inputs.mask.bool() & torch.isfinite(inputs.old_log_probs)
    raw = inputs.log_probs - inputs.old_log_probs
    ratio = torch.where(loss_mask, raw, torch.zeros_like(raw)).clamp(-10.0, 10.0).exp()
    advantages = inputs.advantages[:, None] * inputs.mask
    token_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (token_loss * loss_mask).sum() / max(count, 1)


@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_torchtitan_divides_by_what_was_counted_before_it_drops(value: float) -> None:
    """A counted token without a finite generator log-prob is out of the sum and not of the count, unless the caller's count says so."""
    inputs = replace(batch(1), mask=torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 5, [1.0, 1.0, 0.0, 0.0, 0.0]]))
    inputs = with_value(inputs, "old_log_probs", (1, 3), value)
    own, handed = framework_loss("torchtitan.dapo", inputs), framework_loss("torchtitan.dapo", inputs, global_valid_tokens=9)
    for trace, count in ((own, 10), (handed, 9)):
        wanted = dapo(inputs, count)
        assert distance(trace.loss.detach(), wanted.detach()) <= TOLERANCE
        assert distance(gradient(trace, inputs), torch.autograd.grad(wanted, inputs.log_probs)[0]) <= TOLERANCE


# Loss on a batch without a valid token, and whether its gradient is finite.
EMPTY = (
    *((key, 0.0, True) for key in ("trl.dapo", "trl.grpo", "liger.bnpo", "unsloth.grpo", "skyrl.regular", "torchtitan.dapo")),
    *((key, 0.0, True) for key in ("areal.ppo_actor", "prime_rl.default", "slime.policy", "nemo_rl.clipped_pg")),
    ("verl.vanilla", NAN, True),
    ("verl.kl_loss", NAN, True),
    ("openrlhf.ppo", NAN, False),
)


@pytest.mark.parametrize(("key", "loss", "finite"), EMPTY)
def test_a_fully_masked_batch(key: str, loss: float, finite: bool) -> None:
    """0/0 where no denominator has a floor, and exactly 0 elsewhere."""
    inputs = replace(batch(), mask=torch.zeros(3, 5))
    trace = framework_loss(key, inputs)
    assert trace.loss.item() == loss or (math.isnan(loss) and trace.loss.isnan())
    assert gradient(trace, inputs).isfinite().all() == finite


def test_a_fully_masked_row_dilutes_or_is_left_out() -> None:
    """TRL counts the empty row as 0; verl and OpenRLHF leave it out, verl only without a global_batch_size."""
    inputs = batch(2)
    inputs.mask[1] = 0
    counted = framework_loss("trl.grpo", inputs).loss.item()
    settings = {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_c": 1e9}
    assert framework_loss("verl.vanilla", inputs, **settings).loss.item() == pytest.approx(counted * 3 / 2)
    assert framework_loss("openrlhf.ppo", inputs, token_level_loss=False).loss.item() == pytest.approx(counted * 3 / 2)
    assert framework_loss("verl.vanilla", inputs, global_batch_size=3.0, **settings).loss.item() == pytest.approx(counted)


def test_verl_reads_clip_ratio_only_where_its_two_sides_are_unset() -> None:
    """verl's actor config gives both sides 0.2: clip_ratio alone changes nothing."""
    wide = {"clip_ratio": 5.0}
    inputs = with_value(batch(), "old_log_probs", VALID, -9.0)
    loss = framework_loss("verl.gspo", inputs).loss
    assert framework_loss("verl.gspo", inputs, **wide).loss == loss
    assert framework_loss("verl.gspo", inputs, clip_ratio_low=None, clip_ratio_high=None, **wide).loss != loss


def test_verl_normalises_sequence_weights_over_rows() -> None:
    """A long row counts no more than a short one in the mean weight, and an empty row not at all."""
    old = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(1.2), 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    zeros = torch.zeros(3, 4)
    inputs = LossInputs(zeros.clone().requires_grad_(), old - 1, None, zeros - 1, torch.ones(3), mask)
    settings = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True}
    weight = framework_loss("verl.gpg", inputs, **settings).weight
    assert weight is not None and weight[:2, 0].tolist() == pytest.approx([1 / 1.1, 1.2 / 1.1])


def test_a_zero_coefficient_keeps_the_nan_of_an_entropy() -> None:
    """verl and slime form the entropy term whatever its coefficient; TRL asks for none at 0."""
    entropy = torch.ones(3, 5)
    entropy[0, 0] = NAN
    inputs = replace(batch(), entropy=entropy)
    assert framework_loss("verl.ppo_loss", inputs).loss.isnan()
    assert framework_loss("slime.policy", inputs).loss.isnan()
    assert framework_loss("trl.dapo", inputs).loss.isfinite()
    assert framework_loss("trl.dapo", inputs, entropy_coef=0.01).loss.isnan()


def test_tinker_sums_where_others_take_a_mean() -> None:
    """The factor between tinker's loss and a token mean is the number of tokens."""
    inputs = batch(3)
    tokens = inputs.mask.sum().item()
    assert framework_loss("tinker.ppo", inputs).loss.item() == pytest.approx(
        framework_loss("trl.dapo", inputs).loss.item() * tokens, rel=1e-5
    )


def test_counts_of_the_whole_batch_replace_those_of_the_micro_batch() -> None:
    """With global counts and the data-parallel size, micro-batches add up to the loss of the batch."""
    inputs = batch(4, rows=4)
    tokens = inputs.mask.sum().item()
    whole = framework_loss("verl.vanilla", inputs).loss.item()
    parts = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        part = LossInputs(
            inputs.log_probs[rows], inputs.old_log_probs[rows], None, None, inputs.advantages[rows], inputs.mask[rows]
        )  # fmt: skip
        parts += framework_loss("verl.vanilla", part, batch_num_tokens=tokens, dp_size=2).loss.item() / 2
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("key", LOSSES)
def test_every_loss_runs_and_has_names_of_its_own(key: str) -> None:
    """A row evaluates with its defaults (dro needs a beta), says where it was read, and never lists what its key decides."""
    row = LOSSES[key]
    needed = {"verl.dro": {"dro_beta": 0.1}, "tinker.dro": {"beta": 0.1}}.get(key, {})
    trace = nanscope.framework_loss(key, batch(), **needed)
    assert trace.loss.shape == () and trace.loss.isfinite() and trace.loss.requires_grad
    assert row.site and row.version
    assert set(row.names()) | {name for name, _ in row.fixed} == {option.name for option in fields(row.options)}  # type: ignore[arg-type]


def test_settings_are_read_from_live_configurations() -> None:
    """Attributes, mappings, and what lies one level inside; the first that holds a name wins, and the rest are defaults."""
    actor = SimpleNamespace(clip_ratio_high=0.28, loss_agg_mode="token-sum", policy_loss=SimpleNamespace(dro_beta=0.2), optim=None)
    wanted = framework_settings("verl.dro", clip_ratio_high=0.28, loss_agg_mode="token-sum", dro_beta=0.2, rollout_is="token")
    assert (
        framework_settings(
            "verl.dro", **live_options("verl.dro", actor, {"rollout_correction": {"rollout_is": "token"}, "loss_agg_mode": "token-mean"})
        )
        == wanted
    )
    assert live_options("nemo_rl.clipped_pg", {}) == {}


def test_settings_are_read_from_trl_itself(tmp_path: Path) -> None:
    """TRL's own configuration object, where it is installed: its names and defaults are the row's."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    defaults = {option.name: option.default for option in fields(trl.GRPOConfig)}
    counted = {"num_items_in_batch", "num_processes"}  # by the trainer
    for option in fields(LOSSES["trl.dapo"].options):  # type: ignore[arg-type]
        assert option.name in counted or defaults[option.name] == option.default, option.name
    config = trl.GRPOConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        beta=0.02,
        epsilon_high=0.28,
        gradient_accumulation_steps=2,
        num_generations=2,
    )
    wanted = framework_settings("trl.dr_grpo", beta=0.02, epsilon_high=0.28, gradient_accumulation_steps=2, steps_per_generation=2)
    assert framework_settings("trl.dr_grpo", **live_options("trl.dr_grpo", config)) == wanted


# What is asked for, the slug, and what the message must name.
WRONG = (
    ("verl.vanila", {}, "unknown-loss", "verl.vanilla"),
    ("rlx.ppo", {}, "unknown-loss", "trl.dapo"),
    ("verl.vanilla", {"loss_agg": "token-mean"}, "unknown-setting", "loss_agg_mode"),
    ("verl.vanilla", {"loss_mode": "gspo"}, "unknown-setting", "loss_mode"),
    ("verl.vanilla", {"loss_agg_mode": "token_mean"}, "unknown-setting-value", "token-mean"),
    ("verl.dro", {}, "unknown-setting-value", "dro_beta"),
    ("trl.grpo", {"beta": "x"}, "unknown-setting-value", "float"),
    ("trl.grpo", {"epsilon": None}, "unknown-setting-value", "epsilon=None"),
    ("trl.grpo", {"gradient_accumulation_steps": 0}, "unknown-setting-value", "division by zero"),
    ("verl.vanilla", {"clip_ratio_high": math.nan}, "unknown-setting-value", "nan"),
    ("verl.vanilla", {"dp_size": "all"}, "unknown-setting-value", "int"),
    ("verl.geo_mean", {"rollout_is": "token"}, "unknown-setting-value", "rollout_is"),
    ("trl.grpo", {"importance_sampling_level": "row"}, "unknown-setting-value", "sequence"),
    ("nemo_rl.clipped_pg", {"sequence_level_importance_ratios": True}, "unknown-setting-value", "token_level_loss"),
    ("openrlhf.ppo", {"is_correction_level": "seq", "is_correction_mode": "clip"}, "unknown-setting-value", "token"),
)


@pytest.mark.parametrize(("key", "settings", "slug", "named"), WRONG)
def test_what_is_not_known_is_one_clear_error(key: str, settings: dict[str, Any], slug: str, named: str) -> None:
    """The error says what is wrong and what there is instead."""
    with pytest.raises(NanscopeError, match=named) as caught:
        framework_loss(key, batch(), **settings)
    assert caught.value.slug == slug


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("grpo", {"beta": 0.0}),
        ("dapo", {"beta": 0.04}),
        ("bnpo", {"beta": 0.04, "use_bias_correction_kl": True}),
        ("dr_grpo", {"beta": 0.0, "max_completion_length": 7}),
        ("luspo", {"beta": 0.04}),
        ("luspo", {"beta": 0.0, "importance_sampling_level": "sequence"}),
        ("grpo", {"beta": 0.04, "importance_sampling_level": "sequence", "delta": 1.1}),
        ("cispo", {"beta": 0.0, "epsilon_high": 1.1}),
        ("sapo", {"beta": 0.04}),
        ("vespo", {"beta": 0.0}),
    ],
)
@pytest.mark.parametrize("fault", [None, ("old_log_probs", -INF), ("log_probs", -INF), ("old_log_probs", NAN), ("old_log_probs", -200.0), ("ref_log_probs", 200.0)])  # fmt: skip
def test_liger_itself_answers_the_same(kind: str, settings: dict[str, Any], fault: tuple[str, float] | None) -> None:
    """Liger's own loss, where it is installed: the same values where finite, and the same elements that are not."""
    grpo = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", reason="liger-kernel is not installed")
    for seed in range(3):
        for at in ((0, 0), (0, 4)):
            inputs = batch(seed) if fault is None else with_value(batch(seed), fault[0], at, fault[1])
            inputs.mask[:, -1] = 0
            own, *_ = grpo.LigerFusedLinearGRPOFunction.ppo_loss_fn(
                inputs.log_probs,
                inputs.mask,
                inputs.advantages,
                inputs.mask,
                ref_per_token_logps=inputs.ref_log_probs,
                old_per_token_logps=inputs.old_log_probs,
                loss_type=kind,
                **settings,
            )
            found = framework_loss(f"liger.{kind}", inputs, **settings)
            pair = [torch.cat([x.detach().reshape(1), torch.autograd.grad(x, inputs.log_probs)[0].reshape(-1)]) for x in (found.loss, own)]
            assert torch.equal(pair[0].isfinite(), pair[1].isfinite())
            assert distance(*(torch.where(x.isfinite(), x, 0.0) for x in pair)) <= TOLERANCE
