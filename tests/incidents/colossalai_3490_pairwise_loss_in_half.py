"""ColossalAI-Chat's `PairWiseLoss` on a reward model that was loaded in float16.

One mislabelled pair is scored 21 points the wrong way round. sigmoid(-21) = 8e-10 is below the smallest half (6e-8): the probability is 0,
its logarithm -inf, the mean inf; the backward is inf * 0 in the sigmoid. "Once you backward a step, the score and loss will be nan".

Source: https://github.com/hpcaitech/ColossalAI/issues/3490, applications/Chat/coati/models/loss.py (PairWiseLoss).
Heals: logsigmoid, the scores in float32 before the sigmoid; a floor or an epsilon of about 1e-4. Does not: log(probs + 1e-8) in half (the epsilon is 0), log(probs + 1e-7)
(1/1e-7 overflows half in the backward), a smaller learning rate.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2,),
    masked=None,
    role=("loss", "log_probs", "rewards"),
    fix=("stable_function", "upcast_fp32", "clamp_input", "representable_eps"),
    variable=("log_probs",),
    line=("log_probs = torch.log(probs)",),
)


class RewardModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Linear(hidden, hidden)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, states):
        last = torch.tanh(self.body(states[:, -1]))
        return self.value_head(last).squeeze(1)


class PairWiseLoss(nn.Module):
    def forward(self, chosen_reward, reject_reward):
        probs = torch.sigmoid(chosen_reward - reject_reward)
        log_probs = torch.log(probs)
        loss = -log_probs.mean()
        return loss


def build():
    torch.manual_seed(2)
    hidden = 16
    model = RewardModel(hidden)
    with torch.no_grad():
        model.value_head.weight.copy_(torch.randn(1, hidden) * 1.2)
    chosen, reject = torch.randn(4, 5, hidden) * 0.4, torch.randn(4, 5, hidden) * 0.4
    with torch.no_grad():  # pair 2: the annotator swapped a clear case
        direction = torch.linalg.solve(model.body.weight, model.value_head.weight[0].sign() * 1.0)
        chosen[2, -1] = -direction * 0.75
        reject[2, -1] = direction * 0.75
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"chosen": chosen.half(), "reject": reject.half()})


def run(s=None):
    s = s or build()
    criterion = PairWiseLoss()
    for _ in range(2):
        loss = criterion(s.model(s.batch["chosen"]), s.model(s.batch["reject"]))
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
