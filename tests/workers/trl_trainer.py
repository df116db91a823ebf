"""TRL's trainers: `python trl_trainer.py OUT NAME…`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import datasets
from telling import STEPS
from torch import Tensor
from trained import Build, Plant, Ready, faulty, main
from transformers import PrinterCallback, Qwen2Config, Qwen2ForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, RLOOTrainer, SFTConfig, SFTTrainer
from trl_runs import CHOSEN, PROMPTS, REJECTED, SEED, make_model, make_tokenizer, make_trainer, mean_token_id, quiet_settings

datasets.disable_progress_bars()
PAIRS = {"prompt": list(PROMPTS), "chosen": list(CHOSEN), "rejected": list(REJECTED)}
ANSWERS = {"prompt": list(PROMPTS), "completion": list(CHOSEN), "label": [True, False, True, False]}
TEXTS = {"text": [prompt + answer for prompt, answer in zip(PROMPTS, CHOSEN, strict=True)]}
# Liger's own layers are for a GPU; its fused losses are not
LIGER = {
    "use_liger_kernel": True,
    "liger_kernel_config": dict.fromkeys(("rope", "swiglu", "rms_norm", "fused_linear_cross_entropy"), False),
}
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def ready(plant: Plant, trainer: Any, weight: str = WEIGHT) -> Ready:
    """Put the faults where they belong: into the last activation, and a weight."""
    trainer.remove_callback(PrinterCallback)
    faulty(trainer.model, plant)
    (wanted,) = [p for name, p in trainer.model.named_parameters() if name.endswith(weight)]
    plant.poison("weights", wanted)
    reference = getattr(trainer, "ref_model", None)
    return Ready(trainer.train, tuple(model for model in (trainer.model, reference) if model is not None), (trainer,))


def ignored(batch: dict[str, Tensor]) -> None:
    batch["labels"].fill_(-100)


def put(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda batch: batch[name].__setitem__(1, value)


def of_pairs(
    trainer_class: Any, config_class: Any, rows: dict[str, Any], spoil: Callable[[dict[str, Tensor]], None] | None, plant: Plant, out: Path, *,
    accumulate: int = 1, **settings: Any,
) -> Ready:  # fmt: skip
    """A trainer that learns from rows. spoil: of a batch; without it a weight of the reference goes bad."""
    tokenizer = make_tokenizer()
    model: Any = make_model(tokenizer)
    if trainer_class is RewardTrainer:
        set_seed(SEED)
        config = Qwen2Config(**{**model.config.to_dict(), "num_labels": 1, "architectures": None})
        model = Qwen2ForSequenceClassification(config)
    given = {
        **quiet_settings(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // accumulate,
        "gradient_accumulation_steps": accumulate,
        **settings,
    }
    more = {"ref_model": make_model(tokenizer)} if spoil is None else {}
    trainer = trainer_class(
        model=model, args=config_class(**given), train_dataset=datasets.Dataset.from_dict(rows), processing_class=tokenizer, **more
    )
    if spoil is None:
        plant.poison("input", trainer.ref_model.get_parameter(WEIGHT))
    else:
        collate = trainer.data_collator
        trainer.data_collator = lambda examples: plant.spoilt(collate(examples), spoil, accumulate)
    return ready(plant, trainer)


def sampled(plant: Plant, out: Path, trainer_class: Any = None, peft_config: Callable[[], Any] = lambda: None, **settings: Any) -> Ready:
    """A trainer that samples; the fault of the input is an infinite reward, of several steps over one batch an old log-prob of it."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        found = mean_token_id(completion_ids)
        return plant.spoilt(found, lambda rewards: rewards.__setitem__(1, -math.inf))

    given: dict[str, Any] = {"max_steps": STEPS, "num_iterations": 1, "reward": reward, "peft_config": peft_config(), **settings}
    trainer = make_trainer(out, *([trainer_class] if trainer_class else []), **given)
    if given["num_iterations"] > 1:
        plant.between["input"] = lambda: trainer._buffered_inputs[0]["old_per_token_logps"].__setitem__((0, 1), -math.inf)
    return ready(plant, trainer, "lora_A.default.weight" if given["peft_config"] else WEIGHT)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1], task_type="CAUSAL_LM")


CHECKPOINTED = {"gradient_checkpointing": True}
BUILDS: dict[str, Build] = {
    "SFT": partial(of_pairs, SFTTrainer, SFTConfig, TEXTS, ignored),
    "SFT, 2 micro-batches": partial(of_pairs, SFTTrainer, SFTConfig, TEXTS, ignored, accumulate=2),
    "SFT, bf16, checkpointing": partial(of_pairs, SFTTrainer, SFTConfig, TEXTS, ignored, bf16=True, **CHECKPOINTED),
    "DPO": partial(of_pairs, DPOTrainer, DPOConfig, PAIRS, None),
    "DPO, precomputed reference": partial(
        of_pairs, DPOTrainer, DPOConfig, PAIRS, put("ref_chosen_logps", math.nan), precompute_ref_log_probs=True
    ),
    "DPO, Liger": partial(of_pairs, DPOTrainer, DPOConfig, PAIRS, None, **LIGER),
    "KTO": partial(of_pairs, KTOTrainer, KTOConfig, ANSWERS, None),
    "KTO, precomputed reference": partial(
        of_pairs, KTOTrainer, KTOConfig, ANSWERS, put("ref_logps", math.nan), precompute_ref_log_probs=True
    ),
    "Reward": partial(of_pairs, RewardTrainer, RewardConfig, {**PAIRS, "margin": [0.5, 0.0, 1.0, 0.25]}, put("margin", math.nan)),
    "RLOO": partial(sampled, trainer_class=RLOOTrainer),
    "GRPO": partial(sampled),
    "GRPO, 3 iterations, KL": partial(sampled, num_iterations=STEPS, beta=0.04),
    "GRPO, LoRA": partial(sampled, num_iterations=STEPS, peft_config=lora),
    "GRPO, LoRA, bf16, checkpointing": partial(sampled, num_iterations=STEPS, peft_config=lora, bf16=True, **CHECKPOINTED),
    "GRPO, Liger": partial(sampled, num_iterations=STEPS, **LIGER),
}

if __name__ == "__main__":
    main(BUILDS, "trl", "")
