"""What is to be said of each run of a trainer: a healthy one, and one with a fault of each phase."""

from __future__ import annotations

from collections.abc import Mapping

from cases import Expected, Said

MODEL = "model.layers.1.mlp.act_fn"  # of a tiny Qwen2
UP = "model.layers.0.mlp.up_proj.weight"
FROZEN = " of a Qwen2ForCausalLM that ran without gradient"
SAMPLES = "RuntimeError: probability tensor contains"  # who samples with weights that are NaN ends with that
VALIDATES = "ValueError: Expected parameter"  # so does who builds a distribution of what is NaN
CLIPS = "RuntimeError: The total norm"  # and who clips by a norm that is


def trainer(
    driver: str,
    name: str,
    came: tuple[Said, ...],
    act: str = "act_fn",
    weight: str = "first.weight",
    micro: int = 1,
    ends: str = "",
    drops: bool = False,
    needs: tuple[str, ...] = (),
    known: Mapping[str, str] | None = None,
    late: Mapping[str, int] | None = None,
    steps: Mapping[str, int] | None = None,
) -> tuple[Expected, ...]:
    """The six runs of a trainer.

    came: what is said of the fault of the input, nothing of one that the trainer survives. act: the end of the module with the faulty
    activation. weight: the one that goes bad. micro: micro-batches of a step. ends: what the trainer ends with once its weights are NaN,
    unless it goes on. drops: it takes no step that is bad. known: by fault, what is said wrong. late: by fault, the bad step where it is not the second: each step of
    an optimizer is one. steps: by fault, where it is not three.
    """
    at = {"forward": 2, "backward": 2, "optimizer": 2, "weights": 2, **(late or {})}
    then = {fault: () if ends or (drops and fault != "optimizer") else (follows(step + 1, step),) for fault, step in at.items()}
    said: dict[str, tuple[Said, ...]] = {
        "healthy": (),
        "input": came,
        "forward": (Said(at["forward"], 1, "exp_overflow", "steep", phase="forward", file="trained.py", module=act), *then["forward"]),
        "backward": (
            Said(at["backward"], 1, "where_grad_trap", "raised", masked=True, phase="backward", file="trained.py", module=act), *then["backward"],
        ),
        "optimizer": (Said(at["optimizer"], micro, "bad_input", "", "optimizer", phase="optimizer"), *then["optimizer"]),
        "weights": (Said(at["weights"], 1, "poisoned_weights", weight, "weights", (1, 2), phase="weights"), *then["weights"]),
    }  # fmt: skip
    return tuple(
        Expected(
            driver, f"{name}: {fault}", incidents, known=(known or {}).get(fault, ""), kind="trainer", needs=needs,
            steps=(steps or {}).get(fault, 3), error=ends if incidents else "",
        )
        for fault, incidents in said.items()
    )  # fmt: skip


def follows(step: int = 3, of: int = 2) -> Said:
    """The step after the bad one."""
    return Said(step, 1, "poisoned_weights", "", "weights", of=of, phase="weights")


def came(name: str, index: tuple[int, ...], cause: str = "bad_input", masked: bool | None = None, step: int = 2) -> tuple[Said, ...]:
    """A number that came with the batch."""
    return (Said(step, 1, cause, name, index=index, masked=masked, phase="input"), follows(step + 1, step))


ROW = came("x", (2, 1))  # of the batches of a small model
OLD = came("old_per_token_logps", (0, 1))
REFERENCE = (Said(2, 1, "poisoned_weights", UP + FROZEN, "weights", (1, 2), phase="weights"), follows())
NOTHING = (Said(2, 1, "zero_div_zero", "loss", "loss", (), phase="forward", file="loss_utils.py"),)
SMOOTHED = (Said(2, 1, "zero_div_zero", "nll_loss", "loss", (), phase="forward", file="trainer_pt_utils.py"),)
RATIO = (Said(2, 1, "where_grad_trap", "ratio", "ratio", (2,), True, phase="backward", file="torch_trainer.py"), follows())
LORA = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"
CLIPPED = {"input": 1, "forward": 1, "backward": 1, "optimizer": 2, "weights": 1}
ENDED = dict.fromkeys(("input", "forward", "backward", "optimizer"), 2) | {"weights": 1}
REFUSED = {**ENDED, "weights": 2}  # what ends it says why, and is a step

INFINITE = (Said(2, 1, "bad_input", "rewards_per_func", "rewards", (1,), phase="input", file="rloo_trainer.py"),)  # a nan_to_num follows
ACTION = (Said(2, 1, "exp_overflow", "ClipPPOLoss.forward", "ratio", (3, 0), phase="forward"), follows())
SAC = tuple(Said(step, 2, "bad_input", "tensor", "rewards", (3, 0), phase="input") for step in (2, 3))  # its gradient is one of a sign
OF_SAC = {"forward": 4, "backward": 5, "optimizer": 6, "weights": 5}  # an optimizer each of temperature, critic and actor
STEPS_OF_SAC = {"healthy": 9, "input": 3, "forward": 4, "backward": 6, "optimizer": 6, "weights": 6}

EXPECTED = (
    *trainer("trl", "SFT", (), MODEL, UP),
    *trainer("trl", "SFT, 2 micro-batches", (), MODEL, UP, 2),
    *trainer("trl", "SFT, bf16, checkpointing", (), MODEL, UP),
    *trainer("trl", "DPO", REFERENCE, MODEL, UP),
    *trainer("trl", "DPO, precomputed reference", came("ref_chosen_logps", (1,)), MODEL, UP),
    *trainer("trl", "DPO, Liger", REFERENCE, MODEL, UP, needs=("liger_kernel",)),
    *trainer("trl", "KTO", REFERENCE, MODEL, UP),
    *trainer("trl", "KTO, precomputed reference", came("ref_logps", (1,), "nan_times_zero_mask"), MODEL, UP),
    *trainer("trl", "Reward", came("margin", (1,)), MODEL, UP),
    *trainer("trl", "RLOO", INFINITE, MODEL, UP, ends=SAMPLES, steps=ENDED),
    *trainer("trl", "GRPO", (), MODEL, UP, ends=SAMPLES, steps={**ENDED, "input": 3}),
    *trainer("trl", "GRPO, 3 iterations, KL", OLD, MODEL, UP),
    *trainer("trl", "GRPO, LoRA", OLD, MODEL, LORA, needs=("peft",)),
    *trainer("trl", "GRPO, LoRA, bf16, checkpointing", OLD, MODEL, LORA, needs=("peft",)),
    *trainer("trl", "GRPO, Liger", OLD, MODEL, UP, needs=("liger_kernel",)),
    *trainer("transformers", "Trainer", came("x", (1, 1))),
    *trainer("transformers", "Trainer, 2 micro-batches", came("x", (1, 1)), micro=2),
    *trainer("transformers", "Trainer, language model", NOTHING, MODEL, UP),
    *trainer("transformers", "Trainer, label smoothing", SMOOTHED, MODEL, UP),
    *trainer("transformers", "Trainer, no clipping", NOTHING, MODEL, UP),
    *trainer("transformers", "Trainer, bf16, checkpointing", NOTHING, MODEL, UP),
    *trainer("accelerate", "accelerate", ROW),
    *trainer("accelerate", "accelerate, 2 micro-batches", ROW, micro=2),
    *trainer("accelerate", "accelerate, bf16", ROW),
    *trainer("lightning", "Lightning", ROW),
    *trainer("lightning", "Lightning, 2 micro-batches", ROW, micro=2),
    *trainer("lightning", "Lightning, manual optimization", ROW),
    *trainer("lightning", "Lightning, bf16", ROW),
    *trainer("lightning", "Fabric", ROW[:1], ends=CLIPS, weight="_forward_module.first.weight", steps=CLIPPED),
    *trainer("lightning", "Fabric, bf16", came("tensor", (2, 1))[:1], ends=CLIPS, weight="_forward_module.first.weight", steps=CLIPPED),
    *trainer("torchrl", "torchrl ClipPPOLoss", ACTION, "", ""),
    *trainer("torchrl", "torchrl DQNLoss", came("reward", (3, 0)), "", ""),
    *trainer("torchrl", "torchrl SACLoss", SAC, "", "", 2),
    *trainer("stable_baselines3", "SB3 PPO", came("advantages", (0,))[:1], "", "policy_net.0.weight", ends=VALIDATES, steps=REFUSED),
    *trainer("stable_baselines3", "SB3 A2C", came("advantages", (0,))[:1], "", "policy_net.0.weight", ends=VALIDATES, steps=REFUSED),
    *trainer("stable_baselines3", "SB3 SAC", came("rewards", (0, 0))[:1], "", "", ends=VALIDATES, late=OF_SAC, steps=STEPS_OF_SAC),
    *trainer("stable_baselines3", "SB3 DQN", came("rewards", (0, 0), step=1)[:1], "", "q_net.0.weight"),
    *trainer("torch", "single-file PPO", RATIO, "", "actor.0.weight"),
    *trainer("torch", "torch.compile, the model", ROW),
    *trainer("torch", "torch.compile, the step", ROW),
    *trainer("deepspeed", "DeepSpeed", ROW, weight="module.first.weight"),
    *trainer("deepspeed", "DeepSpeed ZeRO-1", ROW[:1], weight="module.first.weight", drops=True),
    *trainer("deepspeed", "DeepSpeed ZeRO-2, bf16", ROW[:1], weight="module.first.weight", drops=True),
)

# Of what the test extra brings, those that every run of the tests asks for; the others are asked for at night.
EVERY_TIME = ("SFT", "DPO", "KTO", "GRPO, 3 iterations, KL", "Trainer")
