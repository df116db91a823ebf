"""VCPO scales the learning rate of an asynchronous update with the root of the effective sample size, and the sequence weights are all tiny.

ESS = (sum w)^2 / sum w^2 of the sequence importance weights exp(sum log ratio). After a long lag every response of the batch has become less likely by about e^-60. The weights are ordinary float32
numbers, their squares underflow to 0: ESS is 0 / 0. The weights themselves only make the gradient small. Loss and gradients are finite, the learning rate is NaN and so is every parameter after the step.

Source: https://github.com/mit-han-lab/vcpo, https://arxiv.org/abs/2602.17616 (ESS-guided step scaling, sqrt scaling for AdamW)
Heals: ESS from log-weights (exp(2 lse(l) - lse(2 l))), a floor under the sum of squares, leaving out the step when the scale is not finite.
Does not: truncating the weights from above, gradient clipping, a mask on the tokens.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(),
    masked=None,
    role=("optimizer", "is_weight", "hidden"),
    fix=("stable_function", "clamp_denominator", "skip_bad_step"),
    variable=("ess",),
    line=("ess = w.sum() ** 2 / w.square().sum()",),
)


class Learner(nn.Module):
    def __init__(self, vocab=28, dim=20):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.unembed = nn.Linear(dim, vocab)

    def logprobs(self, ids):
        h, _ = self.rnn(self.tok(ids[:, :-1]))
        return self.unembed(h).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


class EssScaledStep:
    """lr <- lr * sqrt(ESS / n), for this step only"""

    def __init__(self, optimizer, base_lr):
        self.optimizer, self.base_lr = optimizer, base_lr

    @torch.no_grad()
    def step(self, w):
        ess = w.sum() ** 2 / w.square().sum()
        scale = torch.sqrt(ess / w.numel()).clamp(max=1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_lr * scale.item()
        self.optimizer.step()


def build():
    torch.manual_seed(9)
    learner = Learner()
    ids = torch.randint(0, 28, (6, 41))
    mask = torch.ones(6, 40)
    mask[:, :4] = 0
    with torch.no_grad():
        logp = learner.logprobs(ids)
    lag = torch.tensor([[0.1, 0.0, -0.1, 0.05, 0.02, -0.03], [61.0, 58.5, 66.0, 57.5, 60.0, 63.5]]) / 36
    behaviour = logp + lag[:, :, None]  # [fresh, stale] rollouts
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-4)
    batch = {"ids": ids, "mask": mask, "behaviour": behaviour, "rewards": rewards}
    return SimpleNamespace(model=learner, optimizer=optimizer, scaled=EssScaledStep(optimizer, 1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    advantages = b["rewards"] - b["rewards"].mean()
    seen = []
    for behaviour in b["behaviour"]:
        logp = s.model.logprobs(b["ids"])
        log_ratio = ((logp - behaviour) * b["mask"]).sum(-1)
        w = log_ratio.detach().exp().clamp(max=4.0)
        loss = -(w * advantages * (logp * b["mask"]).sum(-1)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.scaled.step(w)
        seen.append(loss.item())
    return seen, s.optimizer.param_groups[0]["lr"]


if __name__ == "__main__":
    print(run())
