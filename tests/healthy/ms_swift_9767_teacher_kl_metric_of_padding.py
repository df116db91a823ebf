"""ms-swift #9767 - OPD-RL logs a NaN teacher_kl while the training is fine.

Padding-free student log-probs are scattered into a buffer of -1e10, the teacher's are 0 outside the completion: exp(1e10) is inf and
inf * 0 NaN, in the logged k3 metric only. The signed log ratio of the advantage is finite (1e10) and the mask makes it an exact 0.
Source: https://github.com/modelscope/ms-swift/pull/9767
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def padding_free_logps(model, ids, completion_mask):
    keep = completion_mask.bool()
    logits = model(ids[:, :-1][keep])
    packed = logits.log_softmax(-1).gather(-1, ids[:, 1:][keep].unsqueeze(-1)).squeeze(-1)
    padded = torch.full(completion_mask.shape, -1e10)
    padded[keep] = packed
    return padded


def build():
    torch.manual_seed(9767)
    model = TinyLM()
    completion_mask = torch.ones(3, 8)
    completion_mask[:, :2] = 0
    completion_mask[1, 5:] = 0
    teacher_logps = -torch.rand(3, 8) * completion_mask
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        ids=torch.randint(0, 20, (3, 9)),
        completion_mask=completion_mask,
        teacher_logps=teacher_logps,
        metrics={},
    )


def run(s=None):
    s = s or build()
    student_logps = padding_free_logps(s.model, s.ids, s.completion_mask)
    with torch.no_grad():
        d = s.teacher_logps - student_logps
        k3 = (torch.exp(d) - d - 1) * s.completion_mask
        s.metrics["teacher_kl"] = (k3.sum() / s.completion_mask.sum()).item()
        advantages = d * s.completion_mask
    ratio = (student_logps - student_logps.detach()).exp()
    loss = -(ratio * advantages * s.completion_mask).sum() / s.completion_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    s = build()
    print(run(s), s.metrics)
