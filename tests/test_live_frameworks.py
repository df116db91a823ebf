"""The frameworks' own loss functions under `nanscope.watch()`: roles are named, settings read, the batch recorded, the verdict is right.

The log-probs come from a tiny real model; what is called are the installed frameworks' functions, as their trainers call them. A framework
that does not import here is skipped by name.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.frameworks.losses import framework_loss
from nanscope.locate.names import Names
from nanscope.native import liger as liger_adapter
from nanscope.native import openrlhf as openrlhf_adapter
from nanscope.native import skyrl as skyrl_adapter
from nanscope.native import verl as verl_adapter
from nanscope.objective.settings import LossInputs
from nanscope.replay.batch import loss_inputs
from nanscope.snapshot.step import Snapshot

ROWS, TOKENS, WORDS = 3, 6, 11
MASKED, VALID = (0, 5), (2, 2)  # a token after the end of a row of positive advantage, and one that counts


class Policy(nn.Module):
    """Logits of a random model with a vocabulary of eleven words; `hidden` is what its head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, ids: Tensor, *, hidden: bool = False) -> Tensor:
        mixed = torch.tanh(self.mix(self.words(ids)))
        return mixed if hidden else self.head(mixed)


@dataclass(frozen=True)
class Batch:
    """What a trainer hands to its loss; [B, T], advantages [B, T]. policy, ids: for losses that compute log-probs themselves."""

    policy: Policy
    ids: Tensor
    log_probs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor


def log_probs_of(policy: Policy, ids: Tensor) -> Tensor:
    return torch.log_softmax(policy(ids), -1).gather(-1, ids[..., None])[..., 0]


def make_batch(policy: Policy) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, WORDS, (ROWS, TOKENS), generator=generator)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[0, 4:] = False
    log_probs = log_probs_of(policy, ids)
    near = [log_probs.detach() + 0.1 * torch.randn(ROWS, TOKENS, generator=generator) for _ in range(3)]
    advantages = torch.tensor([1.0, -0.5, 0.25])[:, None].expand(ROWS, TOKENS).contiguous()
    return Batch(policy, ids, log_probs, *near, advantages, mask)


def changed(field: str, place: tuple[int, int], by: float) -> Callable[[Batch], Batch]:
    """A fault: something is added to one element."""

    def plant(batch: Batch) -> Batch:
        tensor = getattr(batch, field).clone()
        tensor[place] += by
        return replace(batch, **{field: tensor})

    return plant


FAULTS: dict[str, Callable[[Batch], Batch]] = {
    "healthy": lambda batch: batch,
    "masked_overflow": changed("old", MASKED, -200.0),
    "overflow": changed("old", VALID, -200.0),
    "masked_nan": changed("old", MASKED, math.nan),
    "nan": changed("old", VALID, math.nan),
    "ref_overflow": changed("ref", MASKED, 200.0),
    "nothing_counts": lambda batch: replace(batch, mask=torch.zeros_like(batch.mask)),
}

Call = Callable[[Batch, dict[str, Any]], Tensor]


def verl_config(settings: dict[str, Any]) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    own = {name: value for name, value in settings.items() if name != "loss_mode"}
    loss = PolicyLossConfig(loss_mode=settings.get("loss_mode", "vanilla"))
    return FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss, **own)


def verl_policy(batch: Batch, settings: dict[str, Any]) -> Tensor:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = verl_config(settings)
    function = get_policy_loss_fn(config.policy_loss.loss_mode)
    loss: Tensor = function(batch.old, batch.log_probs, batch.advantages, batch.mask, config.loss_agg_mode, config)[0]
    return loss


def verl_site(batch: Batch, settings: dict[str, Any]) -> Tensor:
    """`ppo_loss` with a prompt of one token, on the model's output without padding."""
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.utils.losses import ppo_loss

    flat = torch.cat([batch.log_probs, torch.zeros_like(batch.log_probs[:, :1])], 1).reshape(-1)
    tensors = {
        "prompts": batch.ids[:, :1],
        "responses": batch.ids,
        "attention_mask": torch.ones(ROWS, 1 + TOKENS, dtype=torch.long),
        "response_mask": batch.mask,
        "old_log_probs": batch.old,
        "advantages": batch.advantages,
        "ref_log_prob": batch.ref,
        "rollout_log_probs": batch.rollout,
        **({"rollout_is_weights": settings.pop("weights")} if "weights" in settings else {}),
    }
    data = get_tensordict(tensors, {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None})
    loss: Tensor = ppo_loss(verl_config(settings), {"log_probs": flat}, data)[0]
    return loss


def skyrl_policy(batch: Batch, settings: dict[str, Any]) -> Tensor:
    utils = skyrl_adapter.load()
    correction = utils.AlgorithmConfig().off_policy_correction
    correction.tis_ratio_type = settings.get("tis_ratio_type")
    own = {name: value for name, value in settings.items() if name != "tis_ratio_type"}
    config = utils.AlgorithmConfig(off_policy_correction=correction, **own)
    mask = batch.mask.float()
    scaled = batch.advantages * mask / mask.sum()
    function = utils.PolicyLossRegistry.get(config.policy_loss_type)
    loss: Tensor = function(batch.log_probs, batch.old, scaled, config=config, loss_mask=mask, rollout_logprobs=batch.rollout)[0]
    return loss


def openrlhf_policy(batch: Batch, settings: dict[str, Any]) -> Tensor:
    losses = openrlhf_adapter.load()[0]
    counts = {"dp_size": 1, "batch_num_tokens": float(batch.mask.sum()), "global_batch_size": float(ROWS)}
    loss: Tensor = losses.PolicyLoss(**settings)(
        batch.log_probs, batch.old, batch.advantages, action_mask=batch.mask.long(), rollout_log_probs=batch.rollout, **counts
    )[0]
    return loss


def nemo_rl_policy(batch: Batch, settings: dict[str, Any]) -> Tensor:
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    pad = torch.nn.functional.pad  # the prompt, of one token
    data = {
        "token_mask": pad(batch.mask.float(), (1, 0)),
        "sample_mask": torch.ones(ROWS),
        "advantages": pad(batch.advantages, (1, 0)),
        "prev_logprobs": pad(batch.old, (1, 0)),
        "generation_logprobs": pad(batch.rollout, (1, 0)),
        "reference_policy_logprobs": pad(batch.ref, (1, 0)),
    }
    counts = {"global_valid_seqs": torch.tensor(float(ROWS)), "global_valid_toks": batch.mask.sum().float()}
    loss: Tensor = ClippedPGLossFn(ClippedPGLossConfig(**settings))(batch.log_probs, data, **counts)[0]
    return loss


def liger_policy(batch: Batch, settings: dict[str, Any]) -> Tensor:
    """The fused loss: it is given hidden states and the head, and computes log-probs, loss and gradients itself."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(use_ref_model="beta" in settings, **{"beta": 0.0, **settings})
    result: Tensor = loss(
        batch.policy(batch.ids, hidden=True),
        batch.policy.head.weight,
        batch.ids,
        batch.mask.long(),
        batch.advantages[:, 0].contiguous(),
        old_per_token_logps=batch.old,
        ref_per_token_logps=batch.ref if "beta" in settings else None,
    )[0]
    return result


@dataclass(frozen=True, slots=True)
class Framework:
    """How a framework's loss is called; where it comes from is told by a function that raises ImportError where it is not there."""

    name: str
    call: Call
    needs: Callable[[], object]


FRAMEWORKS = {
    "verl": Framework("verl", verl_policy, verl_adapter.load),
    "verl site": Framework("verl", verl_site, verl_adapter.load),
    "skyrl": Framework("SkyRL", skyrl_policy, skyrl_adapter.load),
    "openrlhf": Framework("OpenRLHF", openrlhf_policy, openrlhf_adapter.load),
    "nemo_rl": Framework("NeMo-RL", nemo_rl_policy, lambda: __import__("nemo_rl.algorithms.loss.loss_functions")),
    "liger": Framework("Liger-Kernel", liger_policy, liger_adapter.load),
}


def of(name: str) -> Framework:
    """Return a framework; the test is skipped by its name where it does not import."""
    framework = FRAMEWORKS[name]
    try:
        framework.needs()
    except Exception as error:
        pytest.skip(f"{framework.name} does not import here ({type(error).__name__}: {str(error).splitlines()[0][:80]})")
    return framework


def run(tmp_path: Path, name: str, fault: str, settings: dict[str, Any]) -> tuple[nanscope.Scope, list[float], Batch, Batch]:
    """Return the watched run, its two losses, and the batch of the second step without and with the fault. Nothing is learnt before."""
    framework = of(name)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    losses = []
    healthy = make_batch(policy)  # data is made elsewhere, and comes in as it is
    batches = (healthy, FAULTS[fault](healthy))
    with nanscope.watch(policy, out=tmp_path / "run") as scope:
        for data in batches:
            batch = replace(data, log_probs=log_probs_of(policy, data.ids))
            loss = framework.call(batch, settings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return scope, losses, healthy, batch


@dataclass(frozen=True, slots=True)
class Case:
    """A fault and what must be said of it. origin: variable, role, masked. settings: as the framework takes them; found: as read live."""

    framework: str
    fault: str
    settings: dict[str, Any]
    key: str
    cause: str
    origin: tuple[str, str, bool]
    found: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.key}-{self.fault}"


CASES = [
    Case("verl", "masked_nan", {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_high": 0.28}, "verl.vanilla", "nan_times_zero_mask",
         ("old_log_prob", "old_log_probs", True), {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}),
    Case("verl", "nan", {}, "verl.vanilla", "bad_input", ("old_log_prob", "old_log_probs", False), {"loss_agg_mode": "token-mean", "rollout_is": None}),
    Case("verl", "masked_overflow", {"loss_mode": "kl_cov"}, "verl.kl_cov", "where_grad_trap", ("ratio", "ratio", True), {"ppo_kl_coef": 0.1}),
    Case("verl", "overflow", {"loss_mode": "clip_cov", "clip_ratio": 0.3}, "verl.clip_cov", "where_grad_trap", ("ratio", "ratio", True),
         {"clip_ratio": 0.3}),
    Case("verl site", "masked_nan", {"loss_agg_mode": "seq-mean-token-sum", "use_kl_loss": True}, "verl.ppo_loss", "nan_times_zero_mask",
         ("old_log_prob", "old_log_probs", True), {"loss_mode": "vanilla", "use_kl_loss": True, "loss_agg_mode": "seq-mean-token-sum", "dp_size": 1}),
    Case("verl site", "nan", {"loss_mode": "cispo"}, "verl.cispo", "bad_input", ("old_log_prob", "old_log_probs", False),
         {"loss_agg_mode": "token-mean", "clip_ratio": 0.2}),
    Case("skyrl", "masked_nan", {"eps_clip_high": 0.28}, "skyrl.regular", "nan_times_zero_mask", ("old_log_probs", "old_log_probs", True),
         {"eps_clip_high": 0.28, "use_kl_loss": False, "tis_ratio_type": None}),
    Case("skyrl", "masked_overflow", {"policy_loss_type": "importance_sampling"}, "skyrl.importance_sampling", "inf_times_zero_mask",
         ("prob_ratio", "ratio", True), {}),
    Case("skyrl", "nan", {"policy_loss_type": "dual_clip", "tis_ratio_type": "token"}, "skyrl.dual_clip", "bad_input",
         ("old_log_probs", "old_log_probs", False), {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}),
    Case("openrlhf", "masked_nan", {"clip_eps_high": 0.28}, "openrlhf.ppo", "nan_times_zero_mask", ("old_log_probs", "old_log_probs", True),
         {"clip_eps_high": 0.28, "batch_num_tokens": 16.0, "dp_size": 1}),
    Case("openrlhf", "nan", {"policy_loss_type": "gspo"}, "openrlhf.gspo", "bad_input", ("old_log_probs", "old_log_probs", False), {"global_batch_size": 3.0}),
    Case("openrlhf", "nothing_counts", {"is_correction_level": "token"}, "openrlhf.ppo", "empty_mask_mean", ("aggregate_loss", "loss", False),
         {"is_correction_level": "token", "is_correction_mode": "mask"}),
    Case("nemo_rl", "masked_overflow", {}, "nemo_rl.clipped_pg", "where_grad_trap", ("ratios", "ratio", True), {"token_level_loss": True}),
    Case("nemo_rl", "nan", {"kl_input_clamp_value": None}, "nemo_rl.clipped_pg", "bad_input", ("old", "old_log_probs", False),
         {"kl_input_clamp_value": None, "global_valid_toks": 16.0}),
    Case("liger", "masked_overflow", {"compiled": False}, "liger.dapo", "where_grad_trap", ("coef_1", "ratio", True), {"beta": 0.0}),
    Case("liger", "masked_overflow", {"compiled": True}, "liger.dapo", "where_grad_trap", ("coef_1", "ratio", True), {"beta": 0.0}),
    Case("liger", "nan", {"compiled": False, "loss_type": "grpo", "epsilon_high": 0.28}, "liger.grpo", "bad_input",
         ("old_per_token_logps", "old_log_probs", False), {"epsilon_high": 0.28}),
    Case("liger", "ref_overflow", {"compiled": False, "beta": 0.1}, "liger.dapo", "inf_times_zero_mask", ("k3_loss_fn", "kl", True), {"beta": 0.1}),
]  # fmt: skip


SAMPLED: dict[str, tuple[str, dict[str, Any]]] = {
    "verl.ppo_loss": ("verl site", {}),
    "skyrl.regular": ("skyrl", {}),
    "skyrl.regular, tis": ("skyrl", {"tis_ratio_type": "token"}),
    "openrlhf.ppo": ("openrlhf", {}),
    "openrlhf.ppo, corrected": ("openrlhf", {"is_correction_level": "token"}),
    "nemo_rl.clipped_pg": ("nemo_rl", {}),
    "nemo_rl.clipped_pg, corrected": ("nemo_rl", {"use_importance_sampling_correction": True}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_the_distance_of_the_sampler_is_read_where_the_batch_has_its_log_probs(tmp_path: Path, name: str) -> None:
    """Whether or not the loss reads them: over the tokens that count, between the old policy and the sampler; a saved step has them, too."""
    framework, settings = SAMPLED[name]
    scope, _, batch, _ = run(tmp_path, framework, "healthy", settings)
    delta = (batch.old - batch.rollout)[batch.mask]
    for entry in scope.history.entries:
        assert entry.mismatch_mean == pytest.approx(float(delta.abs().mean()), rel=1e-4)
        assert entry.mismatch_k1 == pytest.approx(float(-delta.mean()), rel=1e-3, abs=1e-6)
        corrected = "corrected" in name or "tis" in name
        assert (entry.mismatch_dropped is not None) is corrected, entry


def test_what_the_weight_takes_out_is_told(tmp_path: Path) -> None:
    """verl's weights are made in another process, under options that the actor need not have: a token of weight 0 is left out."""
    weights = torch.ones(ROWS, TOKENS)
    weights[1, 2] = 0.0
    scope = run(tmp_path, "verl site", "healthy", {"weights": weights})[0]
    assert scope.history.entries[0].mismatch_dropped == pytest.approx(1 / float(make_batch(Policy()).mask.sum()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_in_a_real_loss_is_told_in_the_frameworks_words(tmp_path: Path, case: Case) -> None:
    """The verdict names cause, variable, role and mask; the objective is known with its live settings; the file alone says the same."""
    scope, _, _, _ = run(tmp_path, case.framework, case.fault, case.settings)
    (incident,) = scope.verdict.incidents
    origin = incident.origin
    variable, role, masked = case.origin
    assert (str(incident.cause), origin.role, bool(origin.masked)) == (case.cause, role, masked)
    assert variable in (origin.variable, str(origin.function)), (origin.variable, origin.function)
    assert incident.framework == FRAMEWORKS[case.framework].name
    assert incident.objective["key"] == case.key
    settings = incident.objective["settings"]
    assert case.found.items() <= settings.items(), {name: settings.get(name) for name in case.found}
    assert incident.loss_words.startswith(case.key)
    assert incident.snapshot is not None
    again = nanscope.load(incident.snapshot)
    assert again.objective == scope.snapshots[0].objective


@pytest.mark.parametrize("case", [case for case in CASES if case.fault != "nothing_counts"], ids=str)
def test_the_recorded_batch_replays_under_the_settings_that_were_read(tmp_path: Path, case: Case) -> None:
    """`framework_loss` gives the loss of the step from the file alone: as recorded, and, with the fault undone, as a healthy step."""
    scope, losses, healthy, batch = run(tmp_path, case.framework, case.fault, case.settings)
    snapshot = nanscope.load(str(scope.paths[0]))
    inputs = loss_inputs(snapshot)
    assert torch.allclose(inputs.log_probs, batch.log_probs, atol=1e-6)
    assert inputs.old_log_probs is not None and torch.allclose(inputs.old_log_probs, batch.old, equal_nan=True)
    assert bool((inputs.mask.bool() == batch.mask).all())
    assert same(objective(snapshot, inputs), losses[1])
    mended = {"old_log_probs": healthy.old}
    mended |= {} if inputs.ref_log_probs is None else {"ref_log_probs": healthy.ref}
    mended |= {} if inputs.rollout_log_probs is None else {"rollout_log_probs": healthy.rollout}
    assert same(objective(snapshot, replace(inputs, **mended)), losses[0])


def objective(snapshot: Snapshot, inputs: LossInputs) -> float:
    """The loss of a batch under the objective that a snapshot names. SkyRL's advantages are scaled already when its loss receives them."""
    settings = dict(snapshot.objective["settings"])
    if snapshot.objective["key"].startswith("skyrl."):
        inputs = replace(inputs, advantages=inputs.advantages * float(inputs.mask.sum()))
    return float(framework_loss(snapshot.objective["key"], inputs, **settings).loss)


def same(ours: float, theirs: float) -> bool:
    """Equal up to the order of additions, and alike where not finite."""
    return math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-6) or (math.isnan(ours) and math.isnan(theirs)) or ours == theirs


NAMED: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("verl", "masked_nan", {"loss_agg_mode": "seq-mean-token-mean"},
     {"negative_approx_kl": "log_ratio", "ratio": "ratio", "pg_losses1": "loss", "advantages": "advantages", "seq_mask": "mask"}),
    ("verl site", "masked_nan", {"loss_agg_mode": "seq-mean-token-sum", "use_kl_loss": True},
     {"kl": "log_ratio", "ref_logprob": "ref_log_probs", "kld": "kl", "policy_loss": "loss", "loss_mask": "mask"}),
    ("skyrl", "masked_overflow", {"policy_loss_type": "kl_cov"}, {"negative_approx_kl": "log_ratio", "ratio": "ratio", "pg_losses1": "loss"}),
    ("openrlhf", "nan", {}, {"raw_policy_log_ratio": "log_ratio", "policy_log_ratio": "log_ratio", "ratio": "ratio", "surr1": "loss"}),
    ("openrlhf", "nan", {"policy_loss_type": "gspo"}, {"raw_policy_log_ratio": "log_ratio", "surr2": "loss"}),
    ("nemo_rl", "masked_overflow", {}, {"log_ratios": "log_ratio", "ratios": "ratio", "logr": "log_ratio", "kl": "kl", "clip_loss": "loss"}),
    ("liger", "masked_overflow", {"compiled": False},
     {"per_token_logps": "log_probs", "log_ratio": "log_ratio", "coef_1": "ratio", "clipped_coef": "ratio", "attention_mask": "mask"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "settings", "roles"), NAMED, ids=lambda part: part if isinstance(part, str) else "")
def test_variables_have_the_roles_of_the_rows(
    tmp_path: Path, name: str, fault: str, settings: dict[str, Any], roles: dict[str, str]
) -> None:
    """Every value of the recorded loss is named by what the framework's own function calls it, and means what the row says."""
    scope, _, _, _ = run(tmp_path, name, fault, settings)
    program = scope.snapshots[0].program
    namer = Names(program)
    values = [leaf.id for leaf in program.leaves] + [out for call in program.calls for out in call.outs if out is not None]
    found: dict[str, set[str]] = {}
    for value in values:
        found.setdefault((namer.name(value) or "").rsplit(".", 1)[-1], set()).add(str(namer.role(value)))
    assert {variable: found.get(variable) for variable in roles} == {variable: {role} for variable, role in roles.items()}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_healthy_step_is_left_alone(tmp_path: Path, name: str) -> None:
    """A healthy step has no incident, and its gradients are the same, bit for bit, as without nanscope."""
    scope, losses, _, batch = run(tmp_path, name, "healthy", {})
    assert scope.verdict.healthy and losses[0] == losses[1]
    alone = Policy()
    alone.load_state_dict(batch.policy.state_dict())
    data = replace(batch, policy=alone, log_probs=log_probs_of(alone, batch.ids))
    FRAMEWORKS[name].call(data, {}).backward()
    for ours, theirs in zip(batch.policy.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


TRITON = """
import sys
import torch
from test_live_frameworks import Policy, FAULTS, make_batch, log_probs_of, replace
import nanscope
from liger_kernel.transformers.grpo_loss import triton_grpo_loss

torch.set_num_threads(1)
torch.manual_seed(0)
policy = Policy()
batch = FAULTS[sys.argv[1]](make_batch(policy))
with nanscope.watch(policy, out=sys.argv[3]) as scope:
    prompted = torch.cat([batch.ids[:, :1], batch.ids], 1)
    loss, _ = triton_grpo_loss(
        policy(prompted), batch.old, None, batch.ids, batch.advantages[:, 0].contiguous(), batch.mask.long(),
        temperature=1.0, beta=0.0, loss_type=sys.argv[2], reduce=True,
    )
    loss.backward()
for incident in scope.verdict.incidents:
    print(scope.verdict.status, incident.cause, incident.origin.role, list(incident.origin.index), incident.objective["key"])
    print([note.slug for note in incident.notes], incident.sentence)
print("end", float(loss.detach()))
"""


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("overflow", "dapo", ["non-finite where_grad_trap ratio [2, 2] liger.dapo", "kernel_opened"]),
        ("nan", "dapo", ["non-finite bad_input old_log_probs [2, 2] liger.dapo", "kernel_swallows"]),
        ("nan", "cispo", ["suspect bad_input old_log_probs [2, 2] liger.cispo", "kernel_swallows", "learnt from the wrong ratio"]),
        ("masked_nan", "cispo", []),
        ("healthy", "dapo", []),
    ],
)
def test_what_a_triton_kernel_swallows_is_told(tmp_path: Path, fault: str, kind: str, said: list[str]) -> None:
    """A NaN that Liger's Triton kernel drops is found in the batch, at tokens that count; what it never reads is no finding."""
    of("liger")
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", TRITON, fault, kind, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert "\nend " in "\n" + done.stdout, done.stderr
    for words in said:
        assert words in done.stdout, done.stdout
    assert bool(said) == (len(done.stdout.splitlines()) > 1), done.stdout


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dapo", {"beta": 0.04}), ("grpo", {"epsilon_high": 0.3}), ("dr_grpo", {"max_completion_length": 12}), ("bnpo", {"delta": 4.0})],
)
def test_a_real_trl_step_replays_under_the_settings_that_were_read(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """A GRPOTrainer trains: its loss is known by name and live settings, and the file alone gives the loss that it logged."""
    pytest.importorskip("trl")
    from trl_runs import Fault, FaultyTrainer, make_trainer

    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", 1), max_steps=2, loss_type=kind, **options)
    with nanscope.watch(trainer, out=tmp_path / "run") as scope:
        trainer.train()
    (incident,) = scope.verdict.incidents
    settings = incident.objective["settings"]
    assert incident.objective["key"] == f"trl.{kind}" and incident.loss_words.startswith(f"trl.{kind}")
    assert options.items() <= settings.items() and settings["num_processes"] == 1
    assert settings["gradient_accumulation_steps"] == trainer.args.gradient_accumulation_steps
    snapshot = nanscope.load(str(incident.snapshot))
    ours = framework_loss(snapshot.objective["key"], loss_inputs(snapshot), **settings).loss
    assert snapshot.loss is not None and same(float(ours), float(snapshot.loss))
    assert any(setting in " ".join(incident.remedies) for setting in ('loss_type="cispo"', "beta=0.0"))
