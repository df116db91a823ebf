"""Tiny real TRL trainers for tests, healthy or with one stale log-prob planted: offline, on CPU, under a second for a few steps.

    trainer = make_trainer(tmp_path, beta=0.04, loss_type="grpo")
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", advantage=+1, step=1))

The policy is a random two-layer Qwen2 in float32 and the tokenizer lives in memory. Everything else is TRL itself: it generates,
scores and trains as in a long run. Importing this file needs trl, so tests call `pytest.importorskip("trl")` first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset, disable_progress_bars  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.utils.logging import disable_progress_bar
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

SEED = 7
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "plus", "minus", "times", "is", "the", "sum", "of", "it")
PROMPTS = ("one plus two is", "the sum of three four is", "six minus five", "two times three is it")
CHOSEN = (" three", " seven of it", " one", " six")
REJECTED = (" two", " eight", " four is", " the sum")

Reward = Callable[..., list[float | None]]
Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """One stale old log-prob, and the token that gets it.

    place:     "tool": attended, but outside the loss (tool_mask 0); "padding": after the completion's end; "valid": in the loss.
    advantage: sign of the advantage of its row, +1 or -1. It decides whether the loss shows the overflow.
    step:      first `state.global_step` that is hit, counted from 0; every later step is hit as well.
    log_ratio: what is subtracted from the old log-prob, in nat; exp overflows in float32 above 88.72.
    """

    place: Literal["tool", "padding", "valid"]
    advantage: Literal[1, -1] = 1
    step: int = 1
    log_ratio: float = 200.0


class FaultyTrainer(GRPOTrainer):
    """A GRPOTrainer whose loss gets inputs with one stale old log-prob; the loss itself is TRL's, untouched.

    fault:         what to plant; None trains like TRL.
    planted:       (row, column) of the first planted token, None before. Later steps may hit another one.
    planted_shape: [B, T] of the tensors it was planted in.
    planted_step:  `state.global_step` at that moment.
    """

    fault: Fault | None = None
    planted: tuple[int, int] | None = None
    planted_shape: tuple[int, int] | None = None
    planted_step: int | None = None

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        assert self.model is not None
        if self.fault is not None and self.model.training and self.state.global_step >= self.fault.step:
            inputs = self._plant(model, inputs, self.fault)
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        return loss

    @torch.no_grad()  # as in TRL, where the inputs of the loss are made without gradients
    def _plant(self, model: torch.nn.Module, inputs: dict[str, Any], fault: Fault) -> dict[str, Any]:
        """The inputs with the fault in them; the given ones stay clean, since TRL uses them again when num_iterations > 1."""
        inputs = dict(inputs)
        if inputs.get("old_per_token_logps") is None:
            inputs["old_per_token_logps"] = self._on_policy_logps(model, inputs)
        row = _choose_row(inputs, fault)
        if fault.place == "padding":
            column = _first_padding(inputs, row)
        else:
            column = int(inputs["completion_mask"][row].sum()) // 2
        if fault.place == "tool":
            tool_mask = inputs.get("tool_mask")
            tool_mask = torch.ones_like(inputs["completion_mask"]) if tool_mask is None else tool_mask.clone()
            tool_mask[row, column] = 0
            inputs["tool_mask"] = tool_mask
            inputs["num_items_in_batch"] = inputs["num_items_in_batch"] - 1
        old_per_token_logps = inputs["old_per_token_logps"].clone()
        old_per_token_logps[row, column] -= fault.log_ratio
        inputs["old_per_token_logps"] = old_per_token_logps
        if self.planted is None:
            self.planted, self.planted_step = (row, column), self.state.global_step
            self.planted_shape = (old_per_token_logps.size(0), old_per_token_logps.size(1))
        return inputs

    def _on_policy_logps(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """What TRL takes as old log-probs when it got none: the policy's own, with the dropout that the loss will draw. [B, T]"""
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.random.fork_rng(devices=[]):
            width = inputs["completion_ids"].size(1)
            log_probs: Tensor = self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, width)[0]
        return log_probs


class EditedTrainer:
    """What a TRL trainer inherits in front of it so that its loss reads other inputs; the loss itself is TRL's, untouched.

    edit: gets the trainer and a copy of the inputs; returns the inputs of the loss. It is asked once a backward pass.
    """

    edit: Callable[[Any, Inputs], Inputs] | None = None

    def _compute_loss(self, model: torch.nn.Module, inputs: Inputs, *rest: Any) -> Tensor:
        if self.edit is not None:
            inputs = self.edit(self, dict(inputs))
        loss: Tensor = super()._compute_loss(model, inputs, *rest)  # type: ignore[misc]
        return loss


class SampledTrainer(EditedTrainer, GRPOTrainer):
    """A GRPOTrainer whose completions come with log-probs of their sampler, as from vLLM; what TRL makes of them is TRL's own.

    The sampler is TRL's generation, its log-probs are computed in float32 from the same weights. `use_vllm` is set after construction,
    which would start an engine. spoil: changes the log-probs, [rows][tokens], as an engine may have reported them.
    """

    spoil: Callable[[list[list[float]]], None] | None = None

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **named: Any) -> tuple[list[list[int]], list[list[float]]]:
        self.use_vllm = False
        completion_ids, _ = super()._generate_single_turn(prompt_ids, *rest, **named)  # type: ignore[no-untyped-call]
        self.use_vllm = True
        with torch.no_grad():
            log_probs = [self._sampler_log_probs(p, c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        if self.spoil is not None:
            self.spoil(log_probs)
        return completion_ids, log_probs

    def _sampler_log_probs(self, prompt: list[int], completion: list[int]) -> list[float]:
        assert self.model is not None
        logits = self.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float()
        log_probs = torch.log_softmax(logits / self.temperature, dim=-1)
        return [float(log_probs[len(prompt) + i - 1, token]) for i, token in enumerate(completion)]


def _choose_row(inputs: dict[str, Any], fault: Fault) -> int:
    """The longest row with the wanted sign of advantage, for padding the shortest; where no row has it, one is given it."""
    lengths = inputs["completion_mask"].sum(dim=1)
    order: list[int] = torch.argsort(lengths, descending=fault.place != "padding", stable=True).tolist()
    for row in order:
        if inputs["advantages"][row] * fault.advantage > 0:
            return row
    advantages = inputs["advantages"].clone()
    advantages[order[0]] = fault.advantage
    inputs["advantages"] = advantages
    return order[0]


def _first_padding(inputs: dict[str, Any], row: int) -> int:
    """The first column after the end of the row; a row without padding is cut short, in every input that knows its length."""
    length, width = int(inputs["completion_mask"][row].sum()), int(inputs["completion_mask"].size(1))
    if length < width:
        return length
    column = width // 2
    for name in ("completion_mask", "completion_ids", "old_per_token_logps", "ref_per_token_logps"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name].clone()
            inputs[name][row, column:] = 0  # also the id of the pad token, and what TRL holds as log-prob of padding
    inputs["num_items_in_batch"] = inputs["num_items_in_batch"] - (width - column)
    return column


def make_trainer(
    tmp_path: Path,
    trainer_class: type[Any] = GRPOTrainer,
    *,
    model_config: dict[str, Any] | None = None,
    fault: Fault | None = None,
    reward: Reward | None = None,
    dtype: torch.dtype | None = None,
    config_class: type[Any] | None = None,
    peft_config: Any = None,
    callbacks: list[Any] | None = None,
    **config_overrides: Any,
) -> Any:
    """A trainer that is ready to train: two calls with the same arguments give bit-identical runs. Sets torch to one thread.

    tmp_path:         folder for the output and, when beta > 0, for the model, since TRL loads the reference from a path.
    model_config:     changes to the Qwen2Config, e.g. {"attention_dropout": 0.1}.
    fault:            needs a FaultyTrainer; TypeError with another class.
    reward:           the reward function, `mean_token_id` if None.
    dtype:            of all weights; float32 if None.
    peft_config:      of the adapters that are trained; all weights are if None.
    callbacks:        beside those of the trainer.
    config_class:     GRPOConfig, or RLOOConfig for an RLOOTrainer, if None.
    config_overrides: fields of the config. Defaults: 4 steps of 8 completions (2 prompts × 4 generations), num_iterations 2, beta 0.
    """
    if fault is not None and not issubclass(trainer_class, FaultyTrainer):
        raise TypeError(f"{trainer_class.__name__} plants no fault; give make_trainer FaultyTrainer or a subclass of it")
    torch.set_num_threads(1)  # the tensors are tiny: on a busy machine a second thread makes a run 20 times slower
    settings: dict[str, Any] = {
        **quiet_settings(tmp_path),
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "num_iterations": 2,  # more than one, so that TRL keeps the old log-probs
        "max_completion_length": 8,
        "beta": 0.0,
        **config_overrides,
    }
    if settings.get("loss_type") == "cispo":
        settings.setdefault("epsilon_high", 5.0)  # here an absolute bound on the ratio; the default 0.2 would cut every token
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, **(model_config or {}))
    if dtype is not None:
        torch.nn.Module.to(model, dtype)
    if settings["beta"] > 0:
        disable_progress_bar()  # type: ignore[no-untyped-call]
        model.save_pretrained(tmp_path / "policy")
        model = Qwen2ForCausalLM.from_pretrained(tmp_path / "policy")
    if config_class is None:
        config_class = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    trainer = trainer_class(
        model=model,
        reward_funcs=reward or mean_token_id,
        args=config_class(**settings),
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # comes with disable_tqdm and prints a dict per step
    if isinstance(trainer, FaultyTrainer):
        trainer.fault = fault
    return trainer


def make_dpo_trainer(tmp_path: Path, trainer_class: type[DPOTrainer] = DPOTrainer, **config_overrides: Any) -> Any:
    """A DPO trainer that is ready to train, with a reference of its own, or its log-probs where `precompute_ref_log_probs` asks for them.

    config_overrides: fields of DPOConfig. Defaults: 2 steps of the same 4 pairs.
    """
    torch.set_num_threads(1)
    disable_progress_bars()
    settings: dict[str, Any] = {**quiet_settings(tmp_path), "max_steps": 2, "per_device_train_batch_size": 4, **config_overrides}
    tokenizer = make_tokenizer()
    pairs = {"prompt": list(PROMPTS), "chosen": list(CHOSEN), "rejected": list(REJECTED)}
    trainer = trainer_class(
        model=make_model(tokenizer),
        ref_model=None if settings.get("precompute_ref_log_probs") else make_model(tokenizer),
        args=DPOConfig(**settings),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def quiet_settings(tmp_path: Path) -> dict[str, Any]:
    """Every trainer's settings here: float32 on the CPU, seeded, silent, nothing saved."""
    return {
        "output_dir": str(tmp_path / "trainer"),
        "learning_rate": 1e-3,
        "seed": SEED,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, from a vocabulary of a few words; the pad token is 0."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate((*SPECIAL_TOKENS, *WORDS))}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=pad)  # type: ignore[no-untyped-call]


def make_model(tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> Qwen2ForCausalLM:
    """A random Qwen2 of about 5 000 parameters, the same at every call."""
    set_seed(SEED)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **overrides,
    }
    return Qwen2ForCausalLM(Qwen2Config(**settings))


def mean_token_id(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that seldom ties within a group, so that advantages of both signs exist."""
    return [sum(ids) / len(ids) for ids in completion_ids]
