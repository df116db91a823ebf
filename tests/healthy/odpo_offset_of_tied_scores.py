"""ODPO - the offset is log(score_chosen - score_rejected); a pair with equal scores has offset log(0) = -inf and simply drops out.

logsigmoid(margin - (-inf)) = logsigmoid(+inf) = 0 with gradient sigmoid(-inf) = 0: a tied pair asks for no margin. Loss, gradients and
weights are finite and equal to those of the batch without the pair (up to the mean's count). Source: rycolab/odpo (ODPO, arXiv 2402.10571).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def logps(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)


def odpo_loss(chosen, rejected, ref_chosen, ref_rejected, score_chosen, score_rejected, beta=0.1, alpha=1.0):
    logits = beta * ((chosen - rejected) - (ref_chosen - ref_rejected))
    offset = alpha * torch.log(score_chosen - score_rejected)
    return -F.logsigmoid(logits - offset).mean()


def build():
    torch.manual_seed(41)
    model = TinyLM()
    chosen, rejected = torch.randint(0, 20, (4, 9)), torch.randint(0, 20, (4, 9))
    with torch.no_grad():
        ref_chosen, ref_rejected = logps(model, chosen), logps(model, rejected)
    return SimpleNamespace(
        model=model,
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        score_chosen=torch.tensor([4.0, 3.0, 5.0, 2.5]),
        score_rejected=torch.tensor([1.0, 3.0, 2.0, 2.0]),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    loss = odpo_loss(logps(s.model, s.chosen), logps(s.model, s.rejected), s.ref_chosen, s.ref_rejected, s.score_chosen, s.score_rejected)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
