"""OpenRLHF - a reward model is trained with LogExpLoss, log(1 + exp(rejected - chosen)). For one pair the model prefers the rejected
answer by more than 89 points: exp overflows, the loss is inf and its gradient is inf * 0 = NaN for every weight.

https://github.com/OpenRLHF/OpenRLHF/pull/1278 (and https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/models/loss.py)
Heals: softplus(gap), which is the same function, or a clamp of the gap before exp. Does not: log1p in place of log, a clamp of the
finished loss (the loss is finite then, the gradient still NaN), gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(2,),
    masked=None,
    role=("rewards", "logits", "ratio", "loss"),
    fix=("stable_function", "clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("loss = torch.log(1 + torch.exp(gap))",),
)


class RewardModel(nn.Module):
    """Causal backbone in little, the score is read at the last token."""

    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mixer = nn.GRU(dim, dim, batch_first=True)
        self.value_head = nn.Linear(dim, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden, _ = self.mixer(self.embed_tokens(input_ids))
        values = self.value_head(hidden).squeeze(-1)
        eos_indices = attention_mask.long().sum(dim=1, keepdim=True) - 1
        return values.gather(dim=1, index=eos_indices).squeeze(1)


class LogExpLoss(nn.Module):
    """Pairwise loss for reward models, https://arxiv.org/abs/2204.05862."""

    def forward(self, chosen_reward, reject_reward):
        gap = reject_reward - chosen_reward
        loss = torch.log(1 + torch.exp(gap))
        return loss.mean()


def build():
    torch.manual_seed(1278)
    model = RewardModel()
    chosen_ids = torch.randint(1, 32, (4, 7))
    reject_ids = torch.randint(1, 32, (4, 7))
    chosen_mask = torch.ones(4, 7)
    reject_mask = torch.ones(4, 7)
    chosen_mask[0, 5:] = 0
    reject_mask[1, 6:] = 0
    with torch.no_grad():
        # the head has grown over two epochs without a centering term; pair 2 is a mislabelled one, far on the wrong side
        margins = model(reject_ids, reject_mask) - model(chosen_ids, chosen_mask)
        if margins[2] < 0:
            model.value_head.weight.neg_()
            margins = -margins
        model.value_head.weight.mul_(104.0 / margins[2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=9e-6, betas=(0.9, 0.95))
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=LogExpLoss(),
        chosen_ids=chosen_ids,
        reject_ids=reject_ids,
        chosen_mask=chosen_mask,
        reject_mask=reject_mask,
    )


def run(s=None):
    s = s or build()
    chosen_reward = s.model(s.chosen_ids, s.chosen_mask)
    reject_reward = s.model(s.reject_ids, s.reject_mask)
    loss = s.loss_fn(chosen_reward, reject_reward)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.logs = {"acc": (chosen_reward > reject_reward).float().mean().item(), "loss": loss.item()}
    return loss


if __name__ == "__main__":
    run()
