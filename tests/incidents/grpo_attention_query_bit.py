"""One bit of a query projection flipped between two saves; a single head produces scores around 1e38 and the softmax meets inf - inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("hw_bitflip", "magnitude_overflow"),
    op=("einsum", "bmm", "matmul"),
    index=None,
    masked=None,
    role=("weights", "attention"),
    fix=("fix_upstream", "reload_checkpoint", "skip_bad_step"),
    variable=("layers.1.q_proj.weight", "scores"),
    line=(
        "q, k, v = (p(y).view(b, t, self.heads, w // self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))",
        'scores = torch.einsum("bqhd,bkhd->bhqk", q, k)',
    ),
)


class Block(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        b, t, w = x.shape
        y = self.norm(x)
        q, k, v = (p(y).view(b, t, self.heads, w // self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        probs = (scores * (w // self.heads) ** -0.5).masked_fill(future, torch.finfo(scores.dtype).min).softmax(-1)
        return x + self.o_proj(torch.einsum("bhqk,bkhd->bqhd", probs, v).reshape(b, t, w))


class Policy(nn.Module):
    def __init__(self, vocab=23, width=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.unembed = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(x)


def build():
    torch.manual_seed(312)
    policy = Policy()
    with torch.no_grad():
        policy.layers[1].k_proj.weight.mul_(6.0)
        policy.layers[1].q_proj.weight[9, 4] = 0.242
        policy.layers[1].q_proj.weight.data.view(torch.int32)[9, 4] ^= 1 << 30
    batch = {"ids": torch.randint(0, 23, (3, 8)), "advantages": torch.tensor([0.9, -1.1, 0.2])}
    return SimpleNamespace(model=policy, optimizer=torch.optim.SGD(policy.parameters(), lr=0.01), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    logps = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logps - logps.detach()).exp()
    loss = -(ratio * s.batch["advantages"][:, None]).mean()
    loss.backward()
    s.optimizer.step()
    return loss
