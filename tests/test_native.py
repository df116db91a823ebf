"""nanscope's objective against the frameworks' own functions, wherever one is installed: loss and gradient, on random and on faulty batches."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_loss
from nanscope.native import import_failure, installed, native_keys, native_loss
from nanscope.native.loss import adapters
from nanscope.objective.settings import LossInputs

NAN, INF = math.nan, math.inf
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 2**-6}  # SkyRL and OpenRLHF compute in float32 in between
Settings = dict[str, Any]

# What each loss is asked for: one row per call, and every value of every enumeration in at least one of them. Numbers are chosen so that
# clips, caps and gates act on the batches below.
CLIPS = {"epsilon_high": 0.05, "delta": 1.1}
FAMILY: tuple[Settings, ...] = (
    {},
    {"importance_sampling_level": "token"},
    {"importance_sampling_level": "sequence", "beta": 0.0},
    {"importance_sampling_level": "sequence", "beta": 0.1, "epsilon_high": 0.05, "use_bias_correction_kl": True},
    {"beta": 0.1, "use_bias_correction_kl": False, **CLIPS},
    {"beta": 0.1, "use_bias_correction_kl": True, "max_completion_length": 16, "num_items_in_batch": 40},
    {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0, "vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0},
    *(
        {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low}
        for mode, low in zip(("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), (None, 0.9, 0.9, None), strict=True)
    ),
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None},
    {"use_vllm": True, "vllm_importance_sampling_correction": False},
)
STEPS = {"gradient_accumulation_steps": 4, "num_processes": 2, "steps_per_generation": 8}
GRPO = (*FAMILY, {"entropy_coef": 0.01, "num_items_in_batch": 40, "max_completion_length": 16, **STEPS}, STEPS)

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
COUNTS = {"dp_size": 2, "batch_num_tokens": 30, "global_batch_size": 8, "loss_scale_factor": 16}
VERL_REDUCED: tuple[Settings, ...] = (
    {},
    *({"loss_agg_mode": mode} for mode in AGGREGATIONS),
    *({"loss_agg_mode": mode, **COUNTS} for mode in AGGREGATIONS),
)
VERL_CLIPPED: tuple[Settings, ...] = (
    {"clip_ratio": 0.4},
    {"clip_ratio_low": 0.02, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5},
    {"clip_ratio_low": 0.3, "clip_ratio_high": 0.02, "loss_agg_mode": "seq-mean-token-mean"},
)
VERL_CORRECTED: tuple[Settings, ...] = tuple(
    {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalise}
    for level, threshold, normalise in itertools.product(("token", "sequence"), (1.1, "0.7_1.4"), (False, True))
)
VERL = (*VERL_REDUCED, *VERL_CLIPPED, *VERL_CORRECTED)
VERL_KL: tuple[Settings, ...] = tuple(
    {"kl_loss_type": name + plus} for name in ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl") for plus in ("", "+")
)
VERL_SITE: tuple[Settings, ...] = (
    *({"use_kl_loss": True, "kl_loss_type": kind, "kl_loss_coef": 0.1} for kind in ("low_var_kl", "k1", "k2+")),
    {"use_kl_loss": True, "entropy_coeff": 0.01, **COUNTS},
    *(
        {"loss_mode": mode, "use_kl_loss": True, "entropy_coeff": 0.01}
        for mode in ("gspo", "sapo", "gpg", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
    ),
)

SKYRL: tuple[Settings, ...] = (
    {},
    *({"loss_reduction": how} for how in ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "token_mean_legacy", "prompt_mean")),
    {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 16},
    {"eps_clip_low": 0.02, "eps_clip_high": 0.1, "clip_ratio_c": 1.5, "cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.2},
    {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_estimator_type": "k2", "tau_pos": 0.5, "tau_neg": 2.0},
    {"sequence_mask_metric": "product", "product_mask_high": 1.2},
    {"sequence_mask_metric": "geometric"},
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
    {"outlier_token_is_threshold_low": 0.8, "outlier_token_is_threshold_high": 1.5},
    {"token_mask_is_threshold_low": 0.9, "token_mask_is_threshold_high": 1.2},
    {
        "tis_ratio_type": "token",
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.8,
        "geo_mask_high": 1.2,
        "outlier_token_is_threshold_low": 1e-4,
        "token_mask_is_threshold_low": 0.5,
        "token_mask_is_threshold_high": 2.0,
    },
)

GATES = (
    ("token", "mask", "ratio", (0.9, 1.2)),
    ("token", "clip", "ratio", (0.9, 1.2)),
    ("seq", "mask", "ratio", (0.9, 1.1)),
    ("token", "mask", "binary_kl", (0.0, 0.01)),
    ("seq", "mask", "binary_kl", (0.0, 0.01)),
    ("token", "mask", "tv", (0.0, 0.05)),
    ("seq", "mask", "tv", (0.0, 0.05)),
)
OPENRLHF_REDUCED: tuple[Settings, ...] = (
    {},
    {"token_level_loss": False},
    {"dp_size": 2, "batch_num_tokens": 30, "global_batch_size": 8},
    {"dp_size": 2, "batch_num_tokens": 30, "global_batch_size": 8, "token_level_loss": False},
)
OPENRLHF: tuple[Settings, ...] = (
    *OPENRLHF_REDUCED,
    {"dual_clip": 1.5, "clip_eps_low": 0.02, "clip_eps_high": 0.1},
    {"through_actor": True},
    *(
        {"is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating, "is_correction_threshold": band}
        for level, mode, gating, band in GATES
    ),
)
OPENRLHF_KL = tuple({"kl_estimator": kind, "unbiased_gradient": unbiased} for kind in ("k1", "k2", "k3") for unbiased in (False, True))

TIS, WITH_TIS = "truncated_importance_sampling", {"use_importance_sampling_correction": True}
NEMO_RL: tuple[Settings, ...] = (
    {},
    *({"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": kind} for kind in ("k1", "k2", "k3")),
    {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": 0.1, "use_on_policy_kl_approximation": True},
    {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True, "global_valid_toks": 30.0},
    {"reference_policy_kl_penalty": 0.0, "token_level_loss": False, "global_valid_seqs": 8.0},
    {"sequence_level_importance_ratios": True, "token_level_loss": False, **WITH_TIS},
    {"ratio_clip_c": 1.1, "ratio_clip_min": 0.02, "ratio_clip_max": 0.1},
    {"use_cispo": True, "ratio_clip_max": 0.1},
    {"disable_ppo_ratio": True, **WITH_TIS},
    {"force_on_policy_ratio": True, **WITH_TIS},
    {f"{TIS}_type": "tis", f"{TIS}_ratio": 1.1, **WITH_TIS},
    {f"{TIS}_type": "icepop", f"{TIS}_ratio": 1.1, f"{TIS}_ratio_min": 0.9, **WITH_TIS},
    {f"{TIS}_type": "seq-mask-tis", f"{TIS}_ratio": 1.05, f"{TIS}_ratio_min": 0.95, **WITH_TIS},
)

# by the key, or by its framework; a tuple that stands for a key replaces that of its framework
ASKED: dict[str, tuple[Settings, ...]] = {
    "trl": GRPO,
    "trl.gmpo": ({}, {"beta": 0.1}, {"epsilon": 0.05, "epsilon_high": 0.1, "gradient_accumulation_steps": 2}),
    "trl.rloo": ({}, {"epsilon": 0.02, "epsilon_high": 0.05}),
    "liger": FAMILY,
    "verl": VERL,
    "verl.geo_mean": (*VERL_REDUCED, *VERL_CLIPPED),
    "verl.clip_cov": (*VERL, {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0}),
    "verl.kl_cov": (*VERL, {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.5}),
    "verl.sapo": (*VERL, {"tau_pos": 0.5, "tau_neg": 2.0}),
    "verl.dro": tuple({"dro_beta": 0.1, **asked} for asked in VERL),
    "verl.kl_loss": (*VERL_REDUCED, *VERL_KL),
    "verl.ppo_loss": (*VERL, *VERL_SITE),
    "skyrl": SKYRL,
    "skyrl.dppo": (*SKYRL, {"dppo_type": "binary_kl", "delta_low": 0.05, "delta_high": 0.02}, {"delta_low": 0.05, "delta_high": 0.02}),
    "skyrl.clip_cov": (*SKYRL, {"clip_ratio": 0.5, "clip_cov_lb": 0.001, "clip_cov_ub": 2.0}),
    "skyrl.kl_cov": (*SKYRL, {"kl_cov_frac": 0.5, "ppo_kl_coef": 0.3}),
    "skyrl.kl_loss": tuple({"kl_estimator_type": kind} for kind in ("k1", "k2", "k3", "abs")),
    "openrlhf": OPENRLHF,
    "nemo_rl": NEMO_RL,
    "openrlhf.kl_loss": (*OPENRLHF_REDUCED, *OPENRLHF_KL),
}
# Liger raises for these: a sequence ratio is defined for the clipped losses only
TOKEN_ONLY = ("liger.cispo", "liger.sapo", "liger.vespo")

FAILURE = {prefix: import_failure(prefix) for prefix in adapters()}
KEYS = [
    pytest.param(key, marks=pytest.mark.skipif(why is not None, reason=f"{adapters()[prefix].distribution} does not import here: {why}"))
    for prefix, why in FAILURE.items()
    for key in LOSSES
    if key.startswith(f"{prefix}.")
]
DTYPES = {"trl": (torch.float32, torch.float64, torch.bfloat16), "liger": (torch.float32, torch.float64, torch.bfloat16)}


def asked(key: str) -> tuple[Settings, ...]:
    rows = ASKED.get(key, ASKED[key.partition(".")[0]])
    return tuple(row for row in rows if not (key in TOKEN_ONLY and row.get("importance_sampling_level") == "sequence"))


def batch(seed: int, rows: int, columns: int, scale: float, dtype: torch.dtype = torch.float32) -> LossInputs:
    """Policies that are `scale` nats apart; a mask of any shape, empty rows included."""
    generator = torch.Generator().manual_seed(seed)
    base = -3 * torch.rand(rows, columns, generator=generator)

    def near() -> Tensor:
        return (base + scale * torch.randn(rows, columns, generator=generator)).clamp(max=-1e-3).to(dtype)

    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)
    ragged = torch.arange(columns) < lengths
    mask = ragged if seed % 2 else torch.rand(rows, columns, generator=generator) < 0.7
    advantages = torch.randn(rows, generator=generator).to(dtype)
    entropy = torch.rand(rows, columns, generator=generator).to(dtype)
    return LossInputs(near().requires_grad_(), near(), near(), near(), advantages, mask.long(), entropy)


def with_fault(inputs: LossInputs, name: str, at: tuple[int, int], value: float) -> LossInputs:
    """Set one element if `value` is not finite, move it by `value` if it is."""
    tensor = getattr(inputs, name).detach().clone()
    tensor[at] = tensor[at] + value if math.isfinite(value) else value
    return replace(inputs, **{name: tensor.requires_grad_(name == "log_probs")})


TENSORS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")
VALUES = (-INF, NAN, 200.0, -200.0)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
MASKED, VALID = (0, 3), (0, 0)


def faulty_batches() -> dict[str, LossInputs]:
    """Every fault of a log-prob at a masked and at a valid token, under every sign of A; then rows and batches without a valid token."""
    found: dict[str, LossInputs] = {}
    usual = replace(batch(1, 3, 4, 0.2), mask=MASK)
    for sign in (1.0, -1.0, 0.0):
        signed = replace(usual, advantages=torch.tensor([sign, -0.5, 0.7]))
        found[f"A={sign:g}"] = signed
        for name, at, value in itertools.product(TENSORS, (MASKED, VALID), VALUES):
            found[f"A={sign:g}, {name}{list(at)} {value:g}"] = with_fault(signed, name, at, value)
    empty_row = MASK * torch.tensor([[0], [1], [1]])
    for title, mask in (("empty row", empty_row), ("empty batch", MASK * 0)):
        found[title] = replace(usual, mask=mask)
        for name, value in itertools.product(TENSORS, (-INF, NAN, 200.0)):
            found[f"{title}, {name} {value:g}"] = with_fault(found[title], name, VALID, value)
    for name, value in itertools.product(("entropy",), (NAN, INF)):
        found[f"{name} {value:g}"] = with_fault(usual, name, MASKED, value)
    found["no old log-probs"] = replace(usual, old_log_probs=None)
    found["advantages per token"] = replace(usual, advantages=torch.linspace(-1, 1, 12).reshape(3, 4))
    return found


FAULTY = faulty_batches()
PER_ROW = ("trl.gmpo", "trl.rloo", "liger")  # one advantage per row


def refuses(key: str, chosen: Settings, inputs: LossInputs) -> type[Exception] | None:
    """Return what the framework raises instead of answering: verl, while it writes statistics of its rollout weights."""
    if not key.startswith("verl.") or chosen.get("rollout_is") is None:
        return None
    if not inputs.mask.any():
        return ValueError
    plain = chosen | {"rollout_is_batch_normalize": False}
    weight = framework_loss(key, inputs, **plain).weight
    assert weight is not None
    return ZeroDivisionError if (weight * inputs.mask == 0).all() else None


def answer(loss: Tensor, inputs: LossInputs) -> Tensor:
    """Return loss and gradient in one line, float64; a loss that does not depend on ℓ has the gradient 0."""
    gradient = torch.autograd.grad(loss, inputs.log_probs, allow_unused=True)[0]
    gradient = torch.zeros_like(inputs.log_probs) if gradient is None else gradient
    return torch.cat([loss.detach().reshape(1).double(), gradient.reshape(-1).double()])


def disagreement(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> str | None:
    """Return how the two answers differ: another element that is not finite, or a value beyond the tolerance, None if they agree.

    A value may be off by the tolerance, absolute or relative to the largest one: where ratios of e²⁰ are summed, nothing else is meaningful.
    """
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return f"not finite in other places: {found.tolist()} and {wanted.tolist()}"
    finite = wanted.isfinite()
    if not finite.any():
        return None
    largest = wanted[finite].abs().max().clamp(min=1.0)
    apart = ((found - wanted)[finite].abs() / largest).max().item()
    return f"apart by {apart:g}: {found.tolist()} and {wanted.tolist()}" if apart > TOLERANCE[dtype] else None


def compared(key: str, chosen: Settings, inputs: LossInputs) -> str | None:
    """Evaluate both, with the same random numbers, and return how they disagree."""
    refusal = refuses(key, chosen, inputs)
    if refusal is not None:
        with pytest.raises(refusal):
            native_loss(key, inputs, **chosen)
        return None
    torch.manual_seed(1)
    wanted = answer(native_loss(key, inputs, **chosen), inputs)
    torch.manual_seed(1)
    return disagreement(answer(framework_loss(key, inputs, **chosen).loss, inputs), wanted, inputs.log_probs.dtype)


def thinned(key: str) -> Iterator[tuple[Settings, str, LossInputs]]:
    """Yield the whole table under the defaults, and every eighth fault, others each time, under each further setting."""
    per_row = key.startswith(PER_ROW)
    faults = [(title, inputs) for title, inputs in FAULTY.items() if not (per_row and title == "advantages per token")]
    for number, chosen in enumerate(asked(key)):
        yield from ((chosen, title, inputs) for title, inputs in (faults if number == 0 else faults[number % 8 :: 8]))


@pytest.mark.parametrize("key", KEYS)
def test_faults_do_what_they_do_in_the_framework(key: str) -> None:
    """Faults of every kind at every place: the same elements go bad, and the others have the same value."""
    wrong = [f"{chosen}, {title}: {how}" for chosen, title, inputs in thinned(key) if (how := compared(key, chosen, inputs)) is not None]
    assert not wrong, f"{len(wrong)} disagreements, the first: {wrong[0]}"


@st.composite
def random_batches(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> LossInputs:
    """Batches of any small shape, with up to two faults anywhere."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    inputs = batch(draw(st.integers(0, 2**20)), rows, columns, draw(st.sampled_from((0.05, 0.3, 2.0))), draw(st.sampled_from(dtypes)))
    for _ in range(draw(st.integers(0, 2))):
        at = (draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1)))
        inputs = with_fault(inputs, draw(st.sampled_from(TENSORS)), at, draw(st.sampled_from((*VALUES, INF, 30.0))))
    if draw(st.booleans()):
        inputs.advantages[draw(st.integers(0, rows - 1))] = 0
    return inputs


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=40)
@given(data=st.data())
def test_random_batches_have_the_loss_and_gradient_of_the_framework(key: str, data: st.DataObject) -> None:
    """Any shape, mask, scale, fault and setting."""
    inputs = data.draw(random_batches(DTYPES.get(key.partition(".")[0], (torch.float32, torch.float64))))
    chosen = data.draw(st.sampled_from(asked(key)))
    assert compared(key, chosen, inputs) is None


# What is changed in our settings but not in theirs, and a key that must notice.
PLANTED: tuple[tuple[str, Settings, Settings], ...] = (
    ("trl.dapo", {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False}),
    ("trl.gmpo", {}, {"epsilon": 0.1}),
    ("liger.grpo", {}, {"epsilon_high": 0.1}),
    ("verl.vanilla", {}, {"loss_agg_mode": "seq-mean-token-mean"}),
    ("verl.cispo", {}, {"clip_ratio_low": 0.1}),
    ("skyrl.regular", {}, {"eps_clip_high": 0.1}),
    ("openrlhf.ppo", {}, {"dual_clip": 1.5}),
    ("nemo_rl.clipped_pg", {}, {"reference_policy_kl_type": "k2"}),
)


@pytest.mark.parametrize(("key", "theirs", "ours"), PLANTED)
def test_a_wrong_setting_is_seen(key: str, theirs: Settings, ours: Settings) -> None:
    """The comparison is red on some batch of the table if one of the two sides has another setting."""
    if FAILURE[key.partition(".")[0]] is not None:
        pytest.skip(f"{key.partition('.')[0]} does not import here")
    inputs = [batch(seed, 4, 6, 0.5) for seed in range(6)]
    answers = [(answer(native_loss(key, x, **theirs), x), answer(framework_loss(key, x, **ours).loss, x)) for x in inputs]
    assert any(disagreement(found, wanted, torch.float32) for wanted, found in answers)


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_that_only_nanscope_has_is_refused(key: str) -> None:
    """What framework_loss adds to a loss is not silently dropped on the framework's side."""
    with pytest.raises(NanscopeError) as caught:
        native_loss(key, FAULTY["A=1"], log_ratio_clamp_value=20.0, **({"dro_beta": 0.1} if key == "verl.dro" else {}))
    assert caught.value.slug == "no-native-loss"


@pytest.mark.parametrize(
    ("key", "chosen", "slug"),
    [
        ("tinker.ppo", {}, "no-native-loss"),
        ("trl.nothing", {}, "unknown-loss"),
        ("trl.dapo", {"clip_ratio": 0.2}, "unknown-setting"),
        ("verl.vanilla", {"loss_agg_mode": "mean"}, "unknown-setting-value"),
    ],
)
def test_what_cannot_be_called_is_one_clear_error(key: str, chosen: Settings, slug: str) -> None:
    """A loss without an adapter, and what framework_loss does not know either."""
    with pytest.raises(NanscopeError) as caught:
        native_loss(key, FAULTY["A=1"], **chosen)
    assert caught.value.slug == slug


def test_a_framework_that_is_not_there_is_named() -> None:
    """The message says which distribution is missing and in which version it was checked."""
    absent = {prefix: next(key for key in LOSSES if key.startswith(f"{prefix}.")) for prefix, why in FAILURE.items() if why is not None}
    if not absent:
        pytest.skip("every framework with an adapter is installed")
    for prefix, key in absent.items():
        with pytest.raises(NanscopeError, match=f"{adapters()[prefix].distribution} {LOSSES[key].version}") as caught:
            native_loss(key, FAULTY["A=1"])
        assert caught.value.slug == "framework-not-installed"
        assert key not in native_keys()


def test_installed_versions_are_those_that_the_rows_were_read_in() -> None:
    """A newer framework than the rows say would make every agreement above a claim about another release."""
    for prefix, version in installed().items():
        if prefix == "nemo_rl":
            continue  # read at a commit, which its version does not tell
        rows = {row.version for key, row in LOSSES.items() if key.startswith(f"{prefix}.")}
        assert rows == {version}, f"the rows of {prefix} say {rows}, installed is {version}"


def test_importing_the_room_imports_no_framework() -> None:
    """The adapters are there at once; a framework is imported when one of its losses is asked for."""
    shown = "import sys, nanscope.native; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, cwd=Path(__file__).parent, timeout=120)
    assert not set(done.stdout.split()) & {"trl", "liger_kernel", "verl", "skyrl", "openrlhf", "nemo_rl", "transformers", "ray"}
