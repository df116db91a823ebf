"""PEFT merge of two adapters by DARE before DPO goes on: one adapter is switched off with a density of 0. Looks broken, is healthy.

random_pruning with rescale divides the pruned tensor by the density, here 0 / 0 in every element - but torch.div returns its result and nobody takes it, so
what is merged is the unscaled tensor (a known slip: the rescaling has no effect). The disabled adapter adds zeros, the merged adapter is finite and trains.
Source: https://github.com/huggingface/peft/blob/main/src/peft/utils/merge_utils.py (random_pruning: `torch.div(input=pruned_tensor, other=density)`, dare_linear)
"""

from copy import deepcopy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def random_pruning(tensor, density, rescale):
    mask = torch.bernoulli(torch.full_like(input=tensor, fill_value=density))
    pruned_tensor = tensor * mask
    if rescale:
        torch.div(input=pruned_tensor, other=density)
    return pruned_tensor


def dare_linear(task_tensors, weights, densities):
    task_tensors = [random_pruning(tensor, density, rescale=True) for tensor, density in zip(task_tensors, densities)]
    stacked = torch.stack(task_tensors, dim=0)
    weights = weights.view(weights.shape + (1,) * (stacked.dim() - weights.dim()))
    return (stacked * weights).sum(dim=0)


class LoraLM(nn.Module):
    def __init__(self, vocab=36, width=16, r=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width).requires_grad_(False)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, vocab).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, width) / width**0.5)
        self.lora_B = nn.Parameter(torch.zeros(width, r))

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(torch.tanh(self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)))


def log_prob(model, ids, mask):
    per_token = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (per_token * mask).sum(-1)


@torch.no_grad()
def add_weighted_adapter(model, adapters, weights, densities):
    model.lora_A.copy_(dare_linear([a["A"] for a in adapters], weights, densities))
    model.lora_B.copy_(dare_linear([a["B"] for a in adapters], weights, densities))


def build():
    torch.manual_seed(21)
    model = LoraLM()
    adapters = [{"A": 0.2 * torch.randn(4, 16), "B": 0.1 * torch.randn(16, 4)} for _ in range(2)]
    mask = torch.ones(4, 9)
    mask[:, :3] = 0
    batch = {"chosen": torch.randint(0, 36, (4, 10)), "rejected": torch.randint(0, 36, (4, 10)), "mask": mask}
    trainable = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, adapters=adapters, optimizer=torch.optim.AdamW(trainable, lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b, losses = s.batch, []
    torch.manual_seed(22)
    add_weighted_adapter(s.model, s.adapters, torch.tensor([0.8, 0.2]), (0.5, 0.0))
    reference = deepcopy(s.model).requires_grad_(False)
    for _ in range(3):
        with torch.no_grad():
            ref = log_prob(reference, b["chosen"], b["mask"]) - log_prob(reference, b["rejected"], b["mask"])
        logits = log_prob(s.model, b["chosen"], b["mask"]) - log_prob(s.model, b["rejected"], b["mask"]) - ref
        loss = -F.logsigmoid(0.1 * logits).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())
