"""Online DPO with missing_eos_penalty = inf: a completion without EOS gets the score -inf and can only be the rejected one. Healthy.

The scores are compared, never averaged or differentiated: chosen is where the first completion scores at least as much as the second. One pair even has -inf on
both sides (a tie). Padding log-probs are filled before use. Loss, gradients and weights are finite.

Source: https://github.com/huggingface/trl/blob/main/trl/experimental/online_dpo/online_dpo_trainer.py (training_step, missing_eos_penalty).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

EOS = 1


class Policy(nn.Module):
    def __init__(self, vocab=26, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def completion_logps(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(10)
    model, ref = Policy(), Policy()
    ref.load_state_dict(model.state_dict())
    ids = torch.randint(2, 26, (6, 9))
    mask = torch.ones(6, 8)
    for row, end in ((0, 6), (1, 8), (3, 5), (4, 7)):
        ids[row, end] = EOS
        mask[row, end:] = 0
    reward_head = nn.Linear(9, 1).requires_grad_(False)
    return SimpleNamespace(
        model=model,
        ref=ref.requires_grad_(False),
        reward_head=reward_head,
        missing_eos_penalty=float("inf"),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch=dict(ids=ids, mask=mask),
    )


def run(s=None):
    s = s or build()
    ids, mask = s.batch["ids"], s.batch["mask"]
    padding_mask = ~mask.bool()
    losses = []
    for _ in range(3):
        logprobs = completion_logps(s.model, ids).masked_fill(padding_mask, 0.0)
        with torch.no_grad():
            ref_logprobs = completion_logps(s.ref, ids).masked_fill(padding_mask, 0.0)
            scores = s.reward_head(ids.float() / 26).squeeze(-1)
            contain_eos_token = torch.any(ids == EOS, dim=-1)
            scores[~contain_eos_token] -= s.missing_eos_penalty
            first_half, second_half = scores.split(3)
            first_is_chosen = first_half >= second_half
            rows = torch.arange(3)
            chosen_indices = rows + ~first_is_chosen * 3
            rejected_indices = rows + first_is_chosen * 3
        logratios = logprobs.sum(1) - ref_logprobs.sum(1)
        loss = -F.logsigmoid(0.1 * (logratios[chosen_indices] - logratios[rejected_indices])).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
