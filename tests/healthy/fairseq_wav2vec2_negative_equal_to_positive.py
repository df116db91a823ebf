"""wav2vec 2.0's contrastive loss: a distractor that equals the positive gets a logit of -inf, and nothing breaks.

With a quantiser two masked frames may share a code, so a sampled negative can be the positive itself.  fairseq writes -inf into those logits;
the positive at index 0 is always finite, the cross entropy gives the others probability 0, and the overwritten similarities get gradient 0.

Source: `compute_preds` of https://github.com/facebookresearch/fairseq/blob/main/fairseq/models/wav2vec/wav2vec2.py.  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class Wav2Vec2(nn.Module):
    def __init__(self, dim=16, codes=6, logit_temp=0.1):
        super().__init__()
        self.logit_temp = logit_temp
        self.encoder = nn.Sequential(nn.Linear(20, dim), nn.GELU(), nn.Linear(dim, dim))
        self.project_q = nn.Linear(20, dim)
        self.codebook = nn.Parameter(torch.randn(codes, dim))
        self.final_proj = nn.Linear(dim, dim)

    def quantize(self, features):
        scores = self.project_q(features) @ self.codebook.t()
        hard = F.one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores.dtype)
        soft = scores.softmax(dim=-1)
        self.code_perplexity = torch.exp(-(hard.mean((0, 1)) * hard.mean((0, 1)).add(1e-7).log()).sum())
        return (hard - soft.detach() + soft) @ self.codebook, hard.argmax(dim=-1)

    def compute_preds(self, x, y, negatives, neg_is_pos):
        y = y.unsqueeze(0)
        targets = torch.cat([y, negatives], dim=0)
        logits = torch.cosine_similarity(x.float(), targets.float(), dim=-1) / self.logit_temp
        if neg_is_pos.any():
            logits[1:][neg_is_pos] = float("-inf")
        return logits.permute(1, 2, 0)

    def forward(self, features, neg_index):
        x = self.final_proj(self.encoder(features))
        y, codes = self.quantize(features)
        batch = torch.arange(features.shape[0]).view(1, -1, 1)
        negatives = y[batch, neg_index]
        neg_is_pos = codes[batch, neg_index] == codes.unsqueeze(0)
        return self.compute_preds(x, y, negatives, neg_is_pos)


def build():
    torch.manual_seed(20)
    model = Wav2Vec2()
    features = torch.randn(2, 10, 20)
    neg_index = torch.randint(0, 10, (5, 2, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, eps=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, features=features, neg_index=neg_index)


def run(s=None):
    s = s or build()
    logits = s.model(s.features, s.neg_index)
    target = torch.zeros(logits.shape[0] * logits.shape[1], dtype=torch.long)
    loss = F.cross_entropy(logits.flatten(0, 1), target)
    diversity = (6 - s.model.code_perplexity) / 6
    (loss + 0.1 * diversity).backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    run()
