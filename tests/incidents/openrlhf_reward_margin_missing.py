"""One preference pair has no annotator score, its margin reaches the collated batch as NaN and the pairwise reward loss uses it."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("bad_input",),
    op=("sub", "input"),
    index=(4,),
    masked=False,
    role=("rewards", "loss", "logits"),
    fix=("drop_invalid_sample", "reject_input"),
    variable=("margin",),
    line=('packed = {"margin": torch.tensor([x["score_gap"] for x in samples])}',),
)


class RewardModel(nn.Module):
    def __init__(self, vocab=28, dim=10):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.rnn = nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = torch.tanh(self.rnn(self.wte(input_ids)))
        eos_indices = attention_mask.long().sum(dim=1, keepdim=True) - 1
        return self.score(hidden).squeeze(-1).gather(dim=1, index=eos_indices).squeeze(1)


class PairWiseLoss(nn.Module):
    def forward(self, chosen_reward, reject_reward, margin=None):
        if margin is not None:
            loss = -F.logsigmoid(chosen_reward - reject_reward - margin)
        else:
            loss = -F.logsigmoid(chosen_reward - reject_reward)
        return loss.mean()


def collate_fn(samples):
    width = max(max(len(x["chosen"]), len(x["rejected"])) for x in samples)
    packed = {"margin": torch.tensor([x["score_gap"] for x in samples])}
    for side in ("chosen", "rejected"):
        packed[side] = torch.stack([F.pad(x[side], (0, width - len(x[side]))) for x in samples])
        packed[f"{side}_mask"] = torch.stack([F.pad(torch.ones(len(x[side])), (0, width - len(x[side]))) for x in samples])
    return packed


def build():
    torch.manual_seed(114)
    gaps = [0.5, 1.0, 0.25, 2.0, float("nan"), 0.75]
    samples = [
        {"chosen": torch.randint(1, 28, (4 + i % 3,)), "rejected": torch.randint(1, 28, (6 - i % 2,)), "score_gap": gap}
        for i, gap in enumerate(gaps)
    ]
    model = RewardModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=9e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=collate_fn(samples), loss_fn=PairWiseLoss())


def run(s=None):
    s = s or build()
    b = s.batch
    all_values = s.model(torch.cat([b["chosen"], b["rejected"]]), torch.cat([b["chosen_mask"], b["rejected_mask"]]))
    chosen_reward, reject_reward = all_values.chunk(2)
    loss = s.loss_fn(chosen_reward, reject_reward, margin=b["margin"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
