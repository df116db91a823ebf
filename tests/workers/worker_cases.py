"""What is to be said of each run of a framework's own worker."""

from __future__ import annotations

from cases import Expected, Said


def weights(weight: str = "model.embed_tokens.weight", first: str | None = None) -> tuple[Said, ...]:
    """An update wrote NaN into the weights: the step that did it, and the one that follows from it."""
    named = weight if first is None else first
    return (Said(2, 2, "bad_input", named, "optimizer"), Said(3, 1, "poisoned_weights", weight, "weights", of=2))


VANILLA = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
TRAP = Said(2, 1, "where_grad_trap", "ratio", "ratio", (1, 2), True, VANILLA)
CAME = Said(2, 1, "bad_input", "tensor", "old_log_probs", (0, 3), False, VANILLA)
NOTHING = Said(2, 1, "empty_mask_mean", "agg_loss", "loss", (), None, "actor_rollout_ref.actor.loss_agg_mode=token-sum")
REGULAR = "trainer.algorithm.policy_loss_type=regular"
NONE_COUNTS = Said(2, 1, "empty_mask_mean", "aggregate_loss", "loss", (), None, "drop the step's batch if it has no valid token")
PATCHED = Said(2, 1, "inf_times_zero_mask", "importance_ratio", "ratio", (2,), True, "no option clamps")
SEQUENCES = "actor.importance_sampling_level=sequence"

EXPECTED = (
    Expected("verl", "healthy kl"),
    Expected("verl", "masked +200, clamped"),
    Expected("verl", "masked +200", (TRAP,)),
    Expected("verl", "old -inf, open", (CAME,)),
    Expected("verl", "masked micro-batch"),
    Expected("verl", "masked batch", (NOTHING,)),
    Expected("verl", "weights", weights()),
    Expected("verl", "critic healthy"),
    Expected("verl", "critic weights", weights()),
    Expected("verl", "healthy kl", ranks=2),
    Expected("verl", "masked +200", (TRAP,), ranks=2),
    Expected("verl", "weights", weights(), ranks=2),
    Expected("openrlhf", "healthy kl"),
    Expected("openrlhf", "masked +200"),
    Expected("openrlhf", "masked batch", (NONE_COUNTS,)),
    Expected("openrlhf", "weights", weights(weight="model.module.model.embed_tokens.weight", first="")),
    Expected("openrlhf", "zero0 healthy"),
    Expected("openrlhf", "zero2 healthy"),
    Expected("openrlhf", "zero2 masked batch", (NONE_COUNTS,)),
    Expected("openrlhf", "zero2 weights", weights(weight="model.module.model.embed_tokens.weight", first="")),
    Expected("skyrl", "healthy kl"),
    Expected("skyrl", "masked +200, clamped"),
    Expected("skyrl", "masked +200", (Said(2, 1, "inf_times_zero_mask", "prob_ratio", "ratio", (1, 2), True, REGULAR),)),
    Expected("skyrl", "old -inf, clamped"),
    Expected("skyrl", "old -inf", (Said(2, 1, "bad_input", "old_log_probs", "old_log_probs", (0, 3), False, REGULAR),)),
    Expected("skyrl", "masked micro-batch"),
    Expected("skyrl", "masked batch"),
    Expected("skyrl", "weights", weights(weight="model.model.embed_tokens.weight", first="")),
    Expected("nemo_rl", "healthy"),
    Expected("nemo_rl", "masked +200", (Said(2, 1, "where_grad_trap", "ratios", "ratio", (0, 4), True, "loss_fn.use_cispo=true"),)),
    Expected("nemo_rl", "masked +200, cispo"),
    Expected("nemo_rl", "old -inf", (Said(2, 1, "bad_input", "data", "old_log_probs", (0, 6), remedy="loss_fn.use_cispo=true"),)),
    Expected("nemo_rl", "masked batch"),
    Expected("nemo_rl", "weights", weights(weight="", first="")),
    Expected("prime_rl", "healthy"),
    Expected("prime_rl", "masked +200", (PATCHED,)),
    Expected("prime_rl", "masked +200, ipo", (PATCHED,)),
    Expected("prime_rl", "old -inf", (Said(2, 1, "bad_input", "part", "rollout_log_probs", (0, 3), False, "no option clamps"),)),
    Expected("prime_rl", "masked batch"),
    Expected("prime_rl", "weights", weights(weight="", first="")),
    Expected("slime", "healthy"),
    Expected("slime", "healthy kl"),
    Expected("slime", "masked +200", (Said(2, 1, "where_grad_trap", "ratio", "ratio", None, True),)),
    Expected("slime", "masked +200, cispo"),
    Expected("slime", "old -inf", (Said(2, 1, "bad_input", "", "old_log_probs"),)),
    Expected("slime", "masked batch"),
    Expected("slime", "weights", weights(weight="", first="")),
    Expected("areal", "healthy"),
    Expected("areal", "masked +200", (Said(2, 1, "where_grad_trap", "ppo_actor_loss_fn", "ratio", (13,), True, SEQUENCES),), steps=2),
    Expected(
        "areal", "masked +200, dual clip", (Said(2, 1, "where_grad_trap", "ppo_actor_loss_fn", "ratio", (13,), True, SEQUENCES),), steps=2
    ),
    Expected("areal", "old -inf", steps=2),
    Expected("areal", "masked batch"),
    Expected("areal", "weights", weights(weight="", first="")[:1], steps=2),
)
