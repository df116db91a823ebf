"""allennlp masked_log_softmax - the smallest number of float32 instead of the log of a zero mask.

Healthy: (mask + 1e-45).log() is about -103 and not -inf, also for a passage that is masked entirely; the span of that passage has no gold answer and is taken out by a mask
multiplied on finite numbers. All gradients and weights are finite.
(Source: allenai/allennlp, allennlp/nn/util.py, masked_log_softmax.)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def masked_log_softmax(vector, mask, dim=-1):
    if mask is not None:
        mask = mask.float()
        while mask.dim() < vector.dim():
            mask = mask.unsqueeze(1)
        vector = vector + (mask + 1e-45).log()
    return torch.nn.functional.log_softmax(vector, dim=dim)


class SpanReader(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.encoder = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.span_start = nn.Linear(2 * dim, 1)

    def forward(self, passage):
        passage_mask = passage != 0
        encoded, _ = self.encoder(self.embed(passage))
        logits = self.span_start(encoded).squeeze(-1)
        return masked_log_softmax(logits, passage_mask)


def build():
    torch.manual_seed(0)
    model = SpanReader()
    passage = torch.randint(1, 40, (4, 9))
    for row, length in enumerate([9, 6, 0, 4]):
        passage[row, length:] = 0
    span_start = torch.tensor([2, 5, 0, 1])
    has_answer = torch.tensor([1.0, 1.0, 0.0, 1.0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, passage=passage, span_start=span_start, has_answer=has_answer)


def run(s=None):
    s = s or build()
    for _ in range(3):
        log_probs = s.model(s.passage)
        nll = -log_probs.gather(1, s.span_start[:, None]).squeeze(1)
        loss = (nll * s.has_answer).sum() / s.has_answer.sum()
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
