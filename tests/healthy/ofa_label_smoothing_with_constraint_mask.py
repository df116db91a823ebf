"""OFA's adjusted label smoothing: logits outside the answer trie are -inf, and the smoothing term leaves their log-probabilities out.

The constrained decoder masks most of the vocabulary with -inf, so log_softmax is -inf there.  Plain label smoothing would sum those; OFA fills
them with 0 first and spreads eps over the allowed tokens only.  The fill comes before the sum, the gradient there is 0: all finite.

Source: `label_smoothed_nll_loss` of https://github.com/OFA-Sys/OFA/blob/main/criterions/label_smoothed_cross_entropy.py.  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def label_smoothed_nll_loss(lprobs, target, epsilon, constraint_masks, pad):
    target = target.unsqueeze(-1)
    nll_loss = -lprobs.gather(dim=-1, index=target).squeeze(-1)
    smooth_loss = -lprobs.masked_fill(~constraint_masks, 0).sum(dim=-1)
    eps_i = epsilon / (constraint_masks.sum(dim=-1) - 1 + 1e-6)
    loss = (1.0 - epsilon - eps_i) * nll_loss + eps_i * smooth_loss
    keep = target.squeeze(-1) != pad
    return loss[keep].sum() / keep.sum()


class AnswerDecoder(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=1)
        self.image = nn.Linear(32, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, image, prev_tokens):
        h0 = torch.tanh(self.image(image)).unsqueeze(0)
        x, _ = self.rnn(self.embed(prev_tokens), h0)
        return self.out(x)


def build():
    torch.manual_seed(2202)
    model = AnswerDecoder()
    target = torch.randint(4, 24, (4, 3))
    target[2, 2] = 1
    target[3, 1:] = 1
    prev_tokens = torch.cat([torch.zeros(4, 1, dtype=torch.long), target[:, :-1]], dim=1)
    constraint_masks = torch.rand(4, 3, 24) < 0.2
    constraint_masks.scatter_(-1, target.unsqueeze(-1), True)
    constraint_masks[..., 2] = True  # end of sentence is always allowed
    images = torch.randn(4, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=model, optimizer=optimizer, images=images, prev_tokens=prev_tokens, target=target, constraint_masks=constraint_masks
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.images, s.prev_tokens)
    logits = logits.masked_fill(~s.constraint_masks, -float("inf"))
    lprobs = F.log_softmax(logits, dim=-1)
    loss = label_smoothed_nll_loss(lprobs, s.target, 0.1, s.constraint_masks, pad=1)
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    run()
