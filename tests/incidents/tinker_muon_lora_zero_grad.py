"""LoRA starts with B = 0, so A has an exactly zero gradient on the first step, and Muon divides it by its own norm without an epsilon."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "grad"),
    fix=("clamp_denominator", "representable_eps", "skip_bad_step"),
    variable=("X",),
    line=("X = X / X.norm()",),
)


def zeropower_via_newtonschulz5(G, steps=4):
    a, b, c = 3.4445, -4.7750, 2.0315
    transpose = G.size(0) > G.size(1)
    X = G.T if transpose else G
    X = X / X.norm()
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if transpose else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = zeropower_via_newtonschulz5(buf)
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class LoraLinear(nn.Module):
    def __init__(self, in_features, out_features, rank=3):
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, in_features) / in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T


class Sampler(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.up = LoraLinear(dim, dim)
        self.head = LoraLinear(dim, vocab)

    def forward(self, tokens):
        return self.head(torch.relu(self.up(self.embed(tokens))))


def importance_sampling_loss(target_logprobs, sampling_logprobs, advantages):
    prob_ratio = torch.exp(target_logprobs - sampling_logprobs)
    return -(prob_ratio * advantages).sum()


def build():
    torch.manual_seed(112)
    model = Sampler()
    tokens = torch.randint(0, 20, (11,))
    target_tokens = torch.randint(0, 20, (11,))
    with torch.no_grad():
        sampling_logprobs = model(tokens).log_softmax(-1).gather(-1, target_tokens[:, None]).squeeze(-1)
    inputs = {
        "tokens": tokens,
        "target_tokens": target_tokens,
        "logprobs": sampling_logprobs + 0.02 * torch.randn(11),
        "advantages": torch.cat([torch.zeros(3), torch.full((8,), 0.6)]),
    }
    optimizer = Muon([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=inputs)


def run(s=None):
    s = s or build()
    b = s.batch
    target_logprobs = s.model(b["tokens"]).log_softmax(-1).gather(-1, b["target_tokens"][:, None]).squeeze(-1)
    loss = importance_sampling_loss(target_logprobs, b["logprobs"], b["advantages"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
