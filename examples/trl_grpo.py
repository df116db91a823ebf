"""Watch a real TRL GRPO run, and see what is reported when it dies of one token that is not even in the loss.

    python examples/trl_grpo.py                      # a healthy run: nothing to report
    python examples/trl_grpo.py --fault --out runs   # one stale log-prob: every weight becomes NaN, the logged loss stays finite

The policy is a random Qwen2 with two layers, so nothing is downloaded and a run takes seconds on a CPU. With --fault, one token
that a tool wrote (attended by the policy, masked out of the loss) has an old log-prob far from the policy's: exp of the
difference overflows, min() picks the clipped side and hides it from the loss, and backward computes 0 × inf. In a run of your
own only the line with `nanscope.watch` is new.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

import nanscope

SPECIAL_TOKENS = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
WORDS = ["one", "two", "three", "four", "five", "six", "plus", "minus", "times", "is", "the", "sum", "of"]
PROMPTS = ["one plus two is", "the sum of three", "six minus five is", "two times three is"]


class StaleToolTokens(GRPOTrainer):
    """A trainer that receives, from half-way on, a stale old log-prob for one token that a tool wrote."""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self.state.global_step >= self.state.max_steps // 2:
            row = int(inputs["advantages"].argmax())  # A > 0: the loss stays finite, only the gradient shows the overflow
            column = int(inputs["completion_mask"][row].sum()) // 2
            tool_mask = torch.ones_like(inputs["completion_mask"])
            tool_mask[row, column] = 0  # written by a tool: seen by the policy, not trained on
            old_per_token_logps = inputs["old_per_token_logps"].clone()
            old_per_token_logps[row, column] = -200.0
            inputs = {**inputs, "tool_mask": tool_mask, "old_per_token_logps": old_per_token_logps}
        return super()._compute_loss(model, inputs)


def build_trainer(trainer_class: type[GRPOTrainer], steps: int, output_dir: str, callbacks: Any = (), report_to: Any = ()) -> GRPOTrainer:
    """A GRPO trainer on a random policy of a few thousand parameters; the tokenizer lives in memory."""
    set_seed(0)
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS.values(), *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL_TOKENS)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=steps,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,  # each batch is used twice, so the second time the policy has left its old log-probs
        max_completion_length=16,
        logging_steps=1,
        save_strategy="no",
        report_to=list(report_to),
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    parts = {"processing_class": tokenizer, "callbacks": list(callbacks)}
    trainer = trainer_class(Qwen2ForCausalLM(config), distinct_words, args, dataset, **parts)
    trainer.remove_callback(PrinterCallback)  # prints a long dict per step
    return trainer


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """The reward: a text of many different words, and not too long."""
    return [len(set(text.split())) - 0.1 * len(text.split()) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="store_true", help="give a masked token a stale old log-prob from half-way on")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("nanscope-runs"), help="where nanscope saves (default: %(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # TRL 1.16 uses names that newer transformers releases changed

    with tempfile.TemporaryDirectory() as output_dir:
        trainer = build_trainer(StaleToolTokens if args.fault else GRPOTrainer, args.steps, output_dir)
        try:
            with nanscope.watch(trainer, out=args.out) as scope:
                trainer.train()
        except RuntimeError as error:  # what people see first: some steps later, sampling from the NaN policy fails
            print(f"training stopped: {error}")

    print("logged loss:", *(f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry))
    print(scope.verdict.sentence)
    if scope.verdict.incidents:
        print(f"look closer: nanscope replay {scope.verdict.incidents[0].snapshot}")


if __name__ == "__main__":
    main()
