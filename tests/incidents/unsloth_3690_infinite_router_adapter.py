"""Unsloth #3690 - a LoRA adapter of an MoE router holds an infinite element; it is loaded and trained further with GRPO.

The adapter was tuned on toy data until an entry of `gate.lora_B` left the range; nothing looked at the file before it was loaded.
The router logits become infinite, the router softmax NaN, and every token's log-probability with it. Source:
https://github.com/unslothai/unsloth/issues/3690 ("Merge failed as there are infinite elements in model.layers.5.mlp.gate.weight").
Going back to an adapter that was saved finite (or refusing this one) heals; clipping gradients or skipping bad steps only shields
the other weights: the loss stays NaN.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights",),
    op=("any",),
    index=(2, 1),
    masked=None,
    role=("weights", "router"),
    fix=("fix_upstream", "reject_input"),
    variable=("mlp.gate.lora_B.weight",),
    line=(
        "return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))",
        "policy.load_state_dict(adapter_file(), strict=False)",
        'state["mlp.gate.lora_B.weight"][2, 1] = float("inf")',
    ),
)


class LoraLinear(nn.Module):
    def __init__(self, d_in, d_out, r=2, alpha=4):
        super().__init__()
        self.base = nn.Linear(d_in, d_out, bias=False).requires_grad_(False)
        self.lora_A = nn.Linear(d_in, r, bias=False)
        self.lora_B = nn.Linear(r, d_out, bias=False)
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))


class SparseMoe(nn.Module):
    def __init__(self, dim=8, experts=4):
        super().__init__()
        self.gate = LoraLinear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x):
        routing = self.gate(x).softmax(-1)
        out = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + torch.einsum("btde,bte->btd", out, routing)


class Policy(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = SparseMoe(dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.mlp(self.embed_tokens(ids)))


def adapter_file():
    state = {"mlp.gate.lora_A.weight": 0.3 * torch.randn(2, 8), "mlp.gate.lora_B.weight": 0.2 * torch.randn(4, 2)}
    state["mlp.gate.lora_B.weight"][2, 1] = float("inf")
    return state


def build():
    torch.manual_seed(3690)
    policy = Policy()
    policy.load_state_dict(adapter_file(), strict=False)
    trainable = [p for n, p in policy.named_parameters() if "lora_" in n]
    return SimpleNamespace(
        model=policy,
        optimizer=torch.optim.AdamW(trainable, lr=1e-4),
        ids=torch.randint(0, 16, (4, 7)),
        advantages=torch.tensor([1.0, -0.5, 0.3, -0.8]),
    )


def run(s=None):
    s = s or build()
    logps = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = (logps - logps.detach()).exp()
    loss = -(ratio * s.advantages[:, None]).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
