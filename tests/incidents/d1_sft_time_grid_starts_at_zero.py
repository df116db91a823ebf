"""SFT of a masked diffusion language model (LLaDA, the dLLMTrainer of d1): cross entropy of the masked tokens divided by the noise level t.

The data set hands out a stratified grid t = linspace(0, 1, n). The collator keeps t away from 0 by t = (1 - eps) * t + eps, and eps was set to 0 "to
have an unbiased bound". The first example then has t = 0: no token is masked, its cross entropy times the mask is 0 everywhere, and 0 / 0 is NaN.
Nothing masks the quotient any more: it is summed over the batch. (The mask is a product here; with labels of -100 the loss is NaN too, and
cross_entropy's own backward keeps the gradients clean.)
Source: https://github.com/dllm-reasoning/d1 (SFT/sft_trainer.py: dLLMTrainer.compute_loss, dLLMSFTDataset, dLLMDataCollator.forward_process).
Heals: eps > 0 (1e-3), t.clamp(min=...), dividing the masked tokens only, leaving the example out. Does not: clipping the
gradients, float64, nan_to_num of the loss (backward is inf * 0).
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("loss",),
    fix=(
        "validate_config",
        "clamp_denominator",
        "clamp_input",
        "mask_before_op",
        "drop_invalid_sample",
        "guard_empty",
        "where_on_detached",
        "fix_upstream",
    ),
    variable=("loss",),
    line=("loss = unscaled_loss / t",),
)

VOCAB, MASK_ID = 32, 31


class Denoiser(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.block = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        return self.head(self.block(self.embed(input_ids)))


class DLLMDataCollator:
    def __init__(self, eps=0.0):
        self.eps = eps

    def forward_process(self, input_ids, t):
        B, N = input_ids.shape
        t = (1 - self.eps) * t + self.eps
        t = t[:, None].repeat(1, N)
        mask_indices = torch.rand((B, N)) < t
        noisy = torch.where(mask_indices, torch.full_like(input_ids, MASK_ID), input_ids)
        return noisy, t, mask_indices

    def __call__(self, input_ids, t, prompt_lengths):
        noisy, t, mask_indices = self.forward_process(input_ids, t)
        prompt = torch.arange(input_ids.shape[1])[None] < prompt_lengths[:, None]
        noisy = torch.where(prompt, input_ids, noisy)
        mask_indices = mask_indices & ~prompt
        return dict(input_ids=noisy, labels=input_ids, mask_indices=mask_indices, t=t, num_prompt_tokens=int(prompt_lengths.sum()))


def build():
    torch.manual_seed(5)
    model = Denoiser()
    input_ids = torch.randint(0, MASK_ID, (4, 12))
    t = torch.linspace(0, 1, 4)
    batch = DLLMDataCollator()(input_ids, t, torch.tensor([3, 2, 4, 3]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def compute_loss(model, batch):
    labels, t = batch["labels"], batch["t"]
    logits = model(batch["input_ids"])
    unscaled_loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none").view(logits.shape[0], -1)
    unscaled_loss = unscaled_loss * batch["mask_indices"]
    loss = unscaled_loss / t
    return loss.sum() / (batch["input_ids"].numel() - batch["num_prompt_tokens"])


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = compute_loss(s.model, s.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
