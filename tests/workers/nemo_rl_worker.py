# ruff: noqa: E402 - what stands for CUDA's packages has to be there before NeMo-RL is read
"""NeMo-RL's `ClippedPGLossFn` through its `SequencePackingLossWrapper`, on packed logits: `python nemo_rl_worker.py OUT NAME…`.

Its policy workers (Megatron, DTensor) are for CUDA: run them there as they are, under `nanscope run`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from harness import HALVES, PROMPT, Batch, Case, Trained, absent, arrived, model_of, on_loss

absent(
    pynvml="", zmq="", nemo_rl__utils__fastokens="maybe_patch_fastokens", nemo_rl__utils__logger="Logger", nemo_rl__models__policy="TokenizerConfig",
    nemo_rl__models__dtensor__parallelize="to_local_if_dtensor",
)  # fmt: skip
sys.modules["nemo_rl.models.dtensor.parallelize"].to_local_if_dtensor = lambda tensor: tensor  # type: ignore[attr-defined]

import torch
from nemo_rl.algorithms.loss import prepare_loss_input
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.algorithms.loss.wrapper import SequencePackingLossWrapper
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

torch.Tensor.cuda = lambda tensor, *given, **named: tensor  # type: ignore[method-assign]  # where its helpers put what they compute


class NemoRL(Trained):
    """One step of two packed micro-batches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(model_of())
        self.loss = ClippedPGLossFn(ClippedPGLossConfig(**settings))

    def step(self, data: Batch, number: int) -> None:
        valid = {"global_valid_seqs": torch.tensor(float(len(data.ids))), "global_valid_toks": data.mask.sum().float()}
        for rows in HALVES:
            pad = lambda tensor: torch.nn.functional.pad(tensor[rows].float(), (PROMPT, 0))  # noqa: E731
            given = {
                "input_ids": data.ids[rows], "token_mask": pad(data.mask), "sample_mask": torch.ones(2), "advantages": pad(data.advantages),
                "prev_logprobs": pad(data.old), "generation_logprobs": pad(data.old), "reference_policy_logprobs": pad(data.ref),
            }  # fmt: skip
            batch = BatchedDataDict(arrived(given))
            lengths = data.attention[rows].sum(1)
            packed = self.logits(Batch(data.ids[rows], data.attention[rows], data.mask, data.advantages, data.old, data.ref))
            packed = torch.cat([row[:length] for row, length in zip(packed, lengths, strict=True)])[None]
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            loss, _ = SequencePackingLossWrapper(self.loss, prepare_loss_input, ends)(packed, batch, **valid)
            loss.backward()
        self.update()


if __name__ == "__main__":
    on_loss(
        NemoRL, "nemo_rl", "ClippedPGLossFn in SequencePackingLossWrapper", Case("masked +200, cispo", "masked +200", {"use_cispo": True})
    )
