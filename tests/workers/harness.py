"""A framework's own training step, watched: the model, the batches and the faults.

A driver of a framework (`verl_worker.py`, …) says how a step is taken; what it prints stands in `telling.py`, everything else here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from telling import BAD, STEPS, Case, Ran, bits, tell
from torch import Tensor

import nanscope

T = TypeVar("T")
ROWS, PROMPT, RESPONSE, WORDS = 4, 3, 6, 32
FIRST = 100  # the trainer's own number of the first step, where it has one
COUNTS, TOOL = (0, 3), (1, 2)  # row and token: one that counts, and one of a tool's output, which the policy reads and is not trained on


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rollout leaves: [B, P + T] ids and attention, [B, T] the rest. old, ref: filled from the worker itself."""

    ids: Tensor
    attention: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor

    def shares(self, count: int, index: int) -> Batch:
        """Return the rows of one rank."""
        own = slice(index * ROWS, (index + 1) * ROWS)
        assert len(self.ids) == count * ROWS
        return Batch(*(getattr(self, f.name)[own] for f in dataclasses.fields(self)))


def batch(seed: int, ranks: int = 1, zero: bool = False) -> Batch:
    """Return the batch of a step; old and ref log-probs are still empty. zero: no advantage, as of a group of one reward."""
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS * ranks
    ids = torch.randint(3, WORDS, (rows, PROMPT + RESPONSE), generator=generator)
    attention, mask = torch.ones_like(ids), torch.ones(rows, RESPONSE, dtype=torch.long)
    mask[1, 2:4] = 0  # the output of a tool
    mask[3, 4:] = 0  # the end
    attention[3, PROMPT + 4 :] = 0
    advantages = torch.zeros(rows) if zero else torch.randn(rows, generator=generator)
    empty = torch.zeros(rows, RESPONSE)
    return Batch(ids, attention, mask, advantages[:, None].expand(rows, RESPONSE).contiguous() * mask, empty, empty)


def at(place: tuple[int, int], value: float) -> Callable[[Batch], Batch]:
    """A fault: an old log-prob."""

    def plant(data: Batch) -> Batch:
        old = data.old.clone()
        old[place] = value
        return dataclasses.replace(data, old=old, advantages=data.advantages.index_put((torch.tensor(place[0]),), torch.tensor(1.0)))

    return plant


def unmasked(rows: slice) -> Callable[[Batch], Batch]:
    """A fault: nothing of these rows counts."""

    def plant(data: Batch) -> Batch:
        mask = data.mask.clone()
        mask[rows] = 0
        return dataclasses.replace(data, mask=mask)

    return plant


FAULTS: dict[str, Callable[[Batch], Batch]] = {
    "healthy": lambda data: data,
    "masked +200": at(TOOL, -200.0),
    "masked -inf": at(TOOL, -math.inf),
    "old -inf": at(COUNTS, -math.inf),
    "masked micro-batch": unmasked(slice(2, 4)),
    "masked batch": unmasked(slice(0, None)),
    "weights": lambda data: data,  # the learning rate of the step is infinite
}


def arrived(data: T) -> T:
    """Return a batch as Ray hands it over: what it was computed from stays behind."""
    found: T = pickle.loads(pickle.dumps(data))
    return found


class Worker(Protocol):
    """A framework's worker, as a driver builds it."""

    def log_probs(self, data: Batch) -> Tensor:
        """Return the log-probs of the responses, [B, T], as the framework computes the old ones."""
        ...

    def step(self, data: Batch, number: int) -> None:
        """Take one training step. number: what the trainer calls it."""
        ...

    def optimizer(self) -> torch.optim.Optimizer:
        """Return what updates the weights."""
        ...


def run(worker: Callable[[Mapping[str, Any]], Worker], case: Case, out: Path, watched: bool, rank: int = 0, ranks: int = 1) -> Ran:
    """Train one case."""
    torch.manual_seed(0)
    built = worker(case.settings)
    scope = nanscope.watch(out=out) if watched else None
    with scope or contextlib.nullcontext():
        for step in range(1, STEPS + 1):
            data = batch(step, ranks, zero=step == 1).shares(ranks, rank)
            data = dataclasses.replace(data, old=built.log_probs(data), ref=built.log_probs(data) - 0.05)
            spoilt = step == BAD and rank == 0
            for group in built.optimizer().param_groups:
                group["lr"] = math.inf if spoilt and case.fault == "weights" else 1e-3
            built.step(arrived(FAULTS[case.fault](data) if spoilt else data), FIRST + step)
    return Ran(scope, bits(getattr(p.detach(), "_local_tensor", p) for g in built.optimizer().param_groups for p in g["params"]))


def main(worker: Callable[[Mapping[str, Any]], Worker], cases: tuple[Case, ...], framework: str, entry: str) -> None:
    """Print what is told of each case that the command line names."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    tell(lambda case, out, watched: run(worker, case, out, watched, rank, ranks), cases, framework, entry)


def absent(**names: str) -> None:
    """Let imports of packages pass that need CUDA and are never asked for here. names: module, with __ for a dot → what is taken out of it."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401 - it asks what is installed, and is to hear the truth

    for name, holds in names.items():
        module = ModuleType(name.replace("__", "."))
        module.__spec__ = ModuleSpec(module.__name__, None)
        vars(module).update(dict.fromkeys(holds.split()))
        sys.modules[module.__name__] = module


FLASH_ATTENTION = {
    "flash_attn": "flash_attn_varlen_func",
    "flash_attn__bert_padding": "index_first_axis pad_input rearrange unpad_input",
    "flash_attn__utils": "",
    "flash_attn__utils__distributed": "all_gather",
}


def tiny(folder: Path, **options: Any) -> Path:
    """Save a random Qwen2 of two layers to a folder, where the first rank does it for all, and return it."""
    if os.environ.get("RANK", "0") != "0":
        return folder
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


class Trained:
    """A model and its optimizer for a framework of which only what computes the loss can be had without CUDA."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.adam = torch.optim.AdamW(self.model.parameters())

    def optimizer(self) -> torch.optim.Optimizer:
        return self.adam

    def logits(self, data: Batch) -> Tensor:
        """Return those of the whole sequences, [B, P + T, V]."""
        found: Tensor = self.model(data.ids, attention_mask=data.attention).logits
        return found

    def responses(self, data: Batch) -> Tensor:
        """Return the log-probs of the responses, [B, T]."""
        return self.logits(data)[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, data.ids[:, PROMPT:, None])[..., 0]

    def log_probs(self, data: Batch) -> Tensor:
        with torch.no_grad():
            return self.responses(data)

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad()


HALVES = (slice(0, 2), slice(2, 4))  # micro-batches, as rows

# What is asked of a framework of which only the loss can be had without CUDA. "masked +200" may have a setting of its own, too.
LOSS_CASES = tuple(Case(name, name) for name in ("healthy", "masked +200", "old -inf", "masked batch", "weights"))


def on_loss(worker: Callable[[Mapping[str, Any]], Worker], framework: str, entry: str, *further: Case) -> None:
    """Run the cases of a driver that is the framework's loss on a model of our own. further: those with settings."""
    main(worker, (*LOSS_CASES, *further), framework, entry)


def model_of() -> Path:
    """Return the model that a driver was given a folder for."""
    return tiny(Path(sys.argv[1]) / "model")
