"""Makes what TRL's tests load from a hub: tiny random models, a small tokenizer, and the data sets, which TRL's own script writes.

    python tests/foreign/tiny_hub.py CHECKOUT

They go to `CHECKOUT/trl-internal-testing/`: from there they are loaded by the names that they have on the hub, which are then paths. The
tokenizer is not theirs: a test that counts its tokens fails, bare as well as watched.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

ORGANIZATION = "trl-internal-testing"
CAUSAL, CLASSES = AutoModelForCausalLM, AutoModelForSequenceClassification
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
MODELS = {  # name on the hub → kind, class, chat template of TRL's, what else its configuration says
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", CAUSAL, "qwen2_5", {}),
    "small-Qwen2ForCausalLM-2.5": ("qwen2", CAUSAL, "qwen2_5", {"hidden_size": 128}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", CLASSES, "qwen2_5", {"num_labels": 1}),
    "tiny-Qwen3ForCausalLM": ("qwen3", CAUSAL, "qwen3", {}),
    "small-Qwen3ForCausalLM": ("qwen3", CAUSAL, "qwen3", {"hidden_size": 128}),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", CLASSES, "qwen3", {"num_labels": 1}),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", CAUSAL, "qwen3", MIXTURE),
    "tiny-LlamaForCausalLM-3.2": ("llama", CAUSAL, "llama3_2", {}),
    "tiny-MistralForCausalLM-0.2": ("mistral", CAUSAL, "qwen2_5", {}),
    "tiny-GPTNeoXForCausalLM": ("gpt_neox", CAUSAL, "", {}),
    "tiny-GptOssForCausalLM": ("gpt_oss", CAUSAL, "gptoss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
SIZES = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}


def data_sets(checkout: Path, root: Path) -> list[str]:
    """Write the data sets; return every text in them."""
    texts: list[str] = []
    written: dict[str, list[str]] = {}

    def keep(self: DatasetDict, repo: str, config_name: str = "default", **_: object) -> None:
        folder = root.parent / repo
        for split, data in self.items():
            (folder / config_name).mkdir(parents=True, exist_ok=True)
            data.to_parquet(folder / config_name / f"{split}.parquet")
            texts.extend(str(row) for row in data)
        written.setdefault(repo, []).append(config_name)

    DatasetDict.push_to_hub = keep  # type: ignore[method-assign]
    Dataset.push_to_hub = lambda self, *args, **more: keep(DatasetDict(train=self), *args, **more)  # type: ignore[method-assign]
    runpy.run_path(str(checkout / "scripts" / "generate_zen_dataset.py"))["main"](0.1, True, f"{ORGANIZATION}/zen")
    for repo, names in written.items():
        lines = ["---", "configs:"]
        for name in names:
            lines += [f"- config_name: {name}", "  data_files:"]
            lines += [f"  - {{split: {split}, path: {name}/{split}.parquet}}" for split in ("train", "test")]
        (root.parent / repo / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
    return texts


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of 1000 words and every byte."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made.add_special_tokens(special[:3])
    made.add_tokens(special[3:])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def main(checkout: Path) -> None:
    root = checkout / ORGANIZATION
    words = tokenizer(data_sets(checkout, root))
    for name, (kind, model, template, more) in MODELS.items():
        torch.manual_seed(0)
        ends = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id, "bos_token_id": None}
        config = AutoConfig.for_model(kind, vocab_size=len(words), **{**SIZES, **more, **ends})
        model.from_config(config).to(torch.bfloat16).save_pretrained(root / name)
        words.chat_template = (checkout / "trl" / "chat_templates" / f"{template}.jinja").read_text() if template else None
        words.save_pretrained(root / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
