"""Roles: which meaning a variable name tells, on the names that real frameworks use."""

from __future__ import annotations

import pytest

from nanscope.roles import ROLES, Role, last_word, role_of

# Local names as the frameworks write them (losses.md, 3.6 to 8.5), first match decides.
NAMES: dict[str, dict[str, Role | None]] = {
    "TRL": {
        "per_token_logps": Role.LOG_PROBS,
        "logps": Role.LOG_PROBS,
        "old_per_token_logps": Role.OLD_LOG_PROBS,
        "old_logps": Role.OLD_LOG_PROBS,
        'inputs["old_per_token_logps"]': Role.OLD_LOG_PROBS,
        "ref_per_token_logps": Role.REF_LOG_PROBS,
        'inputs["ref_per_token_logps"]': Role.REF_LOG_PROBS,
        'inputs["sampling_per_token_logps"]': Role.ROLLOUT_LOG_PROBS,
        'inputs["importance_sampling_ratio"]': Role.IS_WEIGHT,
        "importance_sampling_ratio": Role.IS_WEIGHT,
        "vllm_importance_sampling_ratio": Role.IS_WEIGHT,
        "log_ratio": Role.LOG_RATIO,
        "log_importance_weights": Role.LOG_RATIO,
        "clamped_log_ratio": Role.LOG_RATIO,
        "clipped_log_ratio": Role.LOG_RATIO,
        "coef_1": Role.RATIO,
        "coef_2": Role.RATIO,
        "coef": Role.RATIO,
        "per_token_kl": Role.KL,
        "seq_kl": Role.KL,
        "advantages": Role.ADVANTAGES,
        'inputs["advantages"]': Role.ADVANTAGES,
        "mask": Role.MASK,
        "completion_mask": Role.MASK,
        'inputs["completion_mask"]': Role.MASK,
        'inputs["tool_mask"]': Role.MASK,
        "per_token_loss": Role.LOSS,
        "per_token_loss1": Role.LOSS,
        "per_token_loss2": Role.LOSS,
        "per_sequence_loss": Role.LOSS,
        "loss": Role.LOSS,
        "policy_loss": Role.LOSS,
        "entropies": Role.ENTROPY,
        "rewards": Role.REWARDS,
        "rewards_per_func": Role.REWARDS,
        'inputs["completion_ids"]': Role.RESPONSE_IDS,
        "completion_ids": Role.RESPONSE_IDS,
        "logits": Role.LOGITS,
        "normalizer": None,
        "is_low_clipped": None,
    },
    "Liger": {
        "old_per_token_logps_chunk": Role.OLD_LOG_PROBS,
        "ref_per_token_logps_chunk": Role.REF_LOG_PROBS,
        "advantages_chunk": Role.ADVANTAGES,
        "attention_mask_chunk": Role.MASK,
        "attention_mask": Role.MASK,
        "kl_div": Role.KL,
        "vllm_is_ratio": Role.IS_WEIGHT,
        "log_importance_weights": Role.LOG_RATIO,
        "chunk_loss": Role.LOSS,
    },
    "verl": {
        "log_prob": Role.LOG_PROBS,
        "old_log_prob": Role.OLD_LOG_PROBS,
        "ref_log_prob": Role.REF_LOG_PROBS,
        "rollout_log_probs": Role.ROLLOUT_LOG_PROBS,
        'data["rollout_log_probs"]': Role.ROLLOUT_LOG_PROBS,
        "advantages": Role.ADVANTAGES,
        "response_mask": Role.MASK,
        "entropy": Role.ENTROPY,
        "kld": Role.KL,
        "rollout_is_weights": Role.IS_WEIGHT,
        "negative_approx_kl": Role.LOG_RATIO,
        "negative_approx_kl_seq": Role.LOG_RATIO,
        "negative_approx_kl_clamp": Role.LOG_RATIO,
        "log_seq_importance_ratio": Role.LOG_RATIO,
        "seq_importance_ratio": Role.RATIO,
        "ratio": Role.RATIO,
        "clipped_ratio": Role.RATIO,
        "clipped_ratio_sg": Role.RATIO,
        "ppo_kl": Role.LOG_RATIO,
        "pg_losses": Role.LOSS,
        "pg_losses1": Role.LOSS,
        "clip_pg_losses1": Role.LOSS,
        "pg_loss": Role.LOSS,
        "kl_loss": Role.KL,  # the term says more than that it is added to the loss
        "entropy_loss": Role.ENTROPY,
        "policy_loss": Role.LOSS,
        "token_level_rewards": Role.REWARDS,
        "responses": None,
    },
    "OpenRLHF": {
        "action_log_probs": Role.LOG_PROBS,
        "old_action_log_probs": Role.OLD_LOG_PROBS,
        "base_action_log_probs": Role.REF_LOG_PROBS,
        "rollout_log_probs": Role.ROLLOUT_LOG_PROBS,
        "raw_policy_log_ratio": Role.LOG_RATIO,
        "policy_log_ratio": Role.LOG_RATIO,
        "log_ratio": Role.LOG_RATIO,
        "ratio": Role.RATIO,
        "token_is": Role.IS_WEIGHT,
        "action_mask": Role.MASK,
        "kl": Role.KL,
        "loss": Role.LOSS,
        "actor_loss": Role.LOSS,
        "surr1": None,
        "surr2": None,
    },
    "NeMo-RL": {
        "curr_logprobs": Role.LOG_PROBS,
        "curr_logprobs_unfiltered": Role.LOG_PROBS,
        "next_token_logprobs": Role.LOG_PROBS,
        "prev_logprobs": Role.OLD_LOG_PROBS,
        "generation_logprobs": Role.ROLLOUT_LOG_PROBS,
        "reference_policy_logprobs": Role.REF_LOG_PROBS,
        'data["reference_policy_logprobs"]': Role.REF_LOG_PROBS,
        "token_mask": Role.MASK,
        "sample_mask": Role.MASK,
        "mask": Role.MASK,
        "log_ratios": Role.LOG_RATIO,
        "ratios": Role.RATIO,
        "ratios_clamped": Role.RATIO,
        "loss1": Role.LOSS,
        "clip_loss": Role.LOSS,
        "actor_loss": Role.LOSS,
        "kl_importance_weights": Role.IS_WEIGHT,
        "actor_importance_weights": Role.IS_WEIGHT,
        "importance_weights_to_use": Role.IS_WEIGHT,
        "logr": Role.LOG_RATIO,
        "global_valid_toks": None,  # counts, not masks
        "global_valid_seqs": None,
        "kl": Role.KL,
        "advantages": Role.ADVANTAGES,
    },
    "SkyRL": {
        "log_probs": Role.LOG_PROBS,
        "action_log_probs": Role.LOG_PROBS,
        "old_log_probs": Role.OLD_LOG_PROBS,
        "old_action_log_probs": Role.OLD_LOG_PROBS,
        "base_action_log_probs": Role.REF_LOG_PROBS,
        "rollout_logprobs": Role.ROLLOUT_LOG_PROBS,
        "rollout_action_logprobs": Role.ROLLOUT_LOG_PROBS,
        "loss_mask": Role.MASK,
        "advantages": Role.ADVANTAGES,
        "ratio": Role.RATIO,
        "log_ratio": Role.LOG_RATIO,
        "log_importance_weights": Role.LOG_RATIO,
        "clip_pg_losses1": Role.LOSS,
        "kl_loss": Role.KL,
        "policy_loss": Role.LOSS,
        "entropy_BS": Role.ENTROPY,
    },
    "torchtitan": {
        "masked_log_ratio": Role.LOG_RATIO,
        "log_ratio": Role.LOG_RATIO,
        "token_loss": Role.LOSS,
    },
    "AReaL and prime-rl": {
        "prox_logp": Role.OLD_LOG_PROBS,
        "proximal_logprobs": Role.OLD_LOG_PROBS,
        "inference_logprobs": Role.ROLLOUT_LOG_PROBS,
        "trainer_logprobs": Role.LOG_PROBS,
        "loss_mask": Role.MASK,
        "importance_weight": Role.IS_WEIGHT,
    },
    "plain PyTorch": {
        "new_logprobs": Role.LOG_PROBS,
        "logp": Role.LOG_PROBS,
        "logprobs_old": Role.OLD_LOG_PROBS,
        "logp_old": Role.OLD_LOG_PROBS,
        "logp_ref": Role.REF_LOG_PROBS,
        "behavior_logprobs": Role.OLD_LOG_PROBS,
        "behaviour_log_probs": Role.OLD_LOG_PROBS,
        "adv": Role.ADVANTAGES,
        "k3": Role.KL,
        "approx_kl": Role.LOG_RATIO,
        "logratio": Role.LOG_RATIO,
        "keep": Role.MASK,
        "valid": Role.MASK,
        "attn_weights": Role.ATTENTION,
        "attention_scores": Role.ATTENTION,
        "validation_loss": Role.LOSS,
        "router_logits": Role.LOGITS,
        "gate": Role.ROUTER,
        "hidden_states": Role.HIDDEN,
        "returns": Role.REWARDS,
        "grad_norm": Role.GRAD,
        "x": None,
        "tmp": None,
        "i": None,
    },
}


@pytest.mark.parametrize(
    ("name", "role"),
    [pytest.param(name, role, id=f"{framework}-{name}") for framework, names in NAMES.items() for name, role in names.items()],
)
def test_a_name_tells_its_role(name: str, role: Role | None) -> None:
    """The variable names of the frameworks' own loss functions tell what they hold, or tell nothing."""
    assert role_of(name) == role


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("old_logps", "old_logps"),
        ("self.old_logps", "old_logps"),
        ('inputs["old_logps"]', "old_logps"),
        ("inputs['old_logps']", "old_logps"),
        ('batch.data["old_logps"]', "old_logps"),
        ("old_logps[:, -1]", "old_logps"),
        ("old_logps.unsqueeze(-1)", "old_logps"),
        ("old_logps.detach().float()", "old_logps"),
        ('inputs["old_logps"].to(torch.float32)', "old_logps"),
        ("  old_logps ", "old_logps"),
        ("self.batch['mask'].bool()", "mask"),
        ("x[0][1]", "x"),
        ("layers.0.weight", "weight"),
        ("(logps - old_logps).float()", "logps - old_logps"),
        ("model(torch.randn(6, 4))", "model(torch.randn(6, 4))"),
        ("net(ids[:, :-1])", "net(ids[:, :-1])"),
        ("log_ratio.exp()", "log_ratio.exp()"),
        ("0.5", "0.5"),
        ("f(a.b", "f(a.b"),
        ("(" * 400 + "a.b" + ")" * 400, "(" * 400 + "a.b" + ")" * 400),
    ],
)
def test_a_name_is_its_last_word(expression: str, word: str) -> None:
    """Keys, attributes, indexing, casts and reshapes do not change what a tensor is called; what has no name is called as it is written."""
    assert last_word(expression) == word


@pytest.mark.parametrize(
    "name", [None, "", "   ", "a + b", "f(x)", "1.0", "logps - old_logps", "torch.exp(log_ratio)", "ratio * advantages"]
)
def test_arithmetic_has_no_role(name: str | None) -> None:
    """An expression that is not a name says nothing of its own."""
    assert role_of(name) is None


@pytest.mark.parametrize("name", ["logp" * 5000, "[" * 3000, "a" * 100_000, "x" + ".to(x)" * 300, "old_" * 4000 + "logps!"])
def test_a_hostile_name_costs_no_time(name: str) -> None:
    """Names come out of files that strangers send: no pattern backtracks without end."""
    import time

    began = time.perf_counter()
    role_of(name)
    assert time.perf_counter() - began < 2.0


def test_every_role_is_described() -> None:
    """Each role has a symbol, a shape, a unit and a meaning, since the report shows them."""
    assert set(ROLES) == set(Role)
    for info in ROLES.values():
        assert info.symbol and info.shape and info.unit and info.meaning


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (Role.REF_LOG_PROBS, "log_probs_base base_action_log_probs logps_ref reference_logps chosen_ref_logps reflogp frozen_logps"),
        (
            Role.OLD_LOG_PROBS,
            "logps_old old_lp oldlogp prevlogp behav_log_probs log_probs_behavior logprobs_behave prox_logp log_probs_prox",
        ),
        (Role.ROLLOUT_LOG_PROBS, "generator_logprobs log_probs_generator logprobs_rollout vllm_logps logp_sampler"),
        (Role.LOG_PROBS, "action_log_probs policy_chosen_logps curr_logprobs database_logp student_log_probs"),
    ],
)
def test_whose_log_probs_they_are_stands_before_or_behind(role: Role, names: str) -> None:
    """Frameworks write it at either end, and between other words."""
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (Role.KL, "AdaptiveKLController ReverseKLLoss KLDivLoss kl_coef kl_ctl"),
        (Role.LOG_RATIO, "logprobs_diff logp_diff delta_logp"),
        (Role.LOG_PROBS, "random_density likelihood log_det logdet log_q neglogp"),
        (Role.LOSS, "adv_loss loss_adv nll bce mse"),
        (Role.HIDDEN, "x_adv adv_x images_adv adv_embeds adv_example adv_noise inputs_adv"),
        (Role.IS_WEIGHT, "rhos priorities"),
        (Role.HIDDEN, "image_features latents temb pixel_values score_fn denoising_score_matching"),
        (None, "dice_score soft_dice_score f1_score fbeta_score iou_score jaccard_scores tversky_score similarity_scores cosine_score"),
        (Role.REWARDS, "score scores reward_score"),
        (None, "aspect_ratio clip_ratio trust_ratio mask_ratio vf_coef clip_coef"),
    ],
)
def test_a_word_means_what_the_field_means_by_it(role: Role | None, names: str) -> None:
    """A class says what it is in capitals; a ratio may be of anything, an `adv_loss` is an adversary's, and a coefficient is of its term."""
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)
