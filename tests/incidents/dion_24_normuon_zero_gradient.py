"""Row-normalised Muon rescales to the old norm; behind a zero-initialised projection the gradient is 0 and the rescale is 0/0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1, 0, 0),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "guard_empty"),
    variable=("gain",),
    line=("gain = before / after",),
)


def orthogonalise(stack, rounds=5):
    x = stack / (stack.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class RowMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, beta1=0.9, beta2=0.95):
        super().__init__(params, dict(lr=lr, beta1=beta1, beta2=beta2))

    @staticmethod
    def row_normalise(update, second, beta2):
        before = update.norm(dim=(-2, -1), keepdim=True)
        second.lerp_(update.square().mean(dim=-1, keepdim=True), 1 - beta2)
        scaled = update / (second.sqrt() + 1e-8)
        after = scaled.norm(dim=(-2, -1), keepdim=True)
        gain = before / after
        return scaled * gain

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault(tuple(p.shape), []).append(p)
            for shape, members in by_shape.items():
                state = self.state[members[0]]
                if not state:
                    state["momentum"] = torch.zeros(len(members), *shape)
                    state["second"] = torch.zeros(len(members), shape[0], 1)
                state["momentum"].lerp_(torch.stack([p.grad for p in members]), 1 - group["beta1"])
                update = orthogonalise(state["momentum"])
                update = self.row_normalise(update, state["second"], group["beta2"])
                for p, u in zip(members, update):
                    p.add_(u, alpha=-group["lr"])


class Residual(nn.Module):
    def __init__(self, vocab=20, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width).requires_grad_(False)
        self.inp = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, tokens):
        x = self.inp(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x)


def build():
    torch.manual_seed(24)
    model = Residual()
    matrices = [p for p in model.parameters() if p.requires_grad]
    batch = {"tokens": torch.randint(0, 20, (5, 6)), "reward": torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])}
    return SimpleNamespace(model=model, optimizer=RowMuon(matrices), batch=batch)


def run(s=None):
    s = s or build()
    tokens, reward = s.batch["tokens"], s.batch["reward"]
    logp = s.model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    loss = -((reward - reward.mean())[:, None] * logp).mean()
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss
