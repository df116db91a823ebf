"""After EOS the sampler writes pad, a token the top-k warper has set to -inf; the pad mask multiplies that log-probability by 0.
https://github.com/huggingface/transformers/issues/14184
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("mul", "gather", "_log_softmax"),
    index=(1, 3),
    masked=True,
    role=("log_probs",),
    fix=("mask_before_op", "finite_mask_fill"),
    variable=(None,),
    line=("sequence_log_prob = (log_probs * not_pad).sum(-1)",),
)


class Decoder(nn.Module):
    def __init__(self, vocab=11, dim=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, token, state):
        state = self.cell(self.emb(token), state)
        return self.out(state), state


def top_k_warper(scores, k=4, filter_value=-float("inf")):
    kth = scores.topk(k, dim=-1).values[:, -1:]
    return scores.masked_fill(scores < kth, filter_value)


def sample(decoder, batch_size, max_length, eos, pad, lengths):
    token = torch.ones(batch_size, dtype=torch.long)
    state = torch.zeros(batch_size, 8)
    all_scores, tokens = [], []
    for t in range(max_length):
        logits, state = decoder(token, state)
        scores = top_k_warper(logits)
        token = scores.argmax(-1)
        token = torch.where(t >= lengths, torch.full_like(token, pad), token)
        all_scores.append(scores)
        tokens.append(token)
    return torch.stack(all_scores, 1), torch.stack(tokens, 1)


def build():
    torch.manual_seed(14184)
    decoder = Decoder()
    with torch.no_grad():
        decoder.out.bias[0] = -6.0  # pad is never sampled
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-4)
    return SimpleNamespace(model=decoder, optimizer=optimizer, batch={"lengths": torch.tensor([5, 3, 5]), "reward": torch.randn(3)})


def run(s=None):
    s = s or build()
    scores, ids = sample(s.model, 3, 5, eos=2, pad=0, lengths=s.batch["lengths"])
    log_probs = scores.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    not_pad = (ids != 0).float()
    sequence_log_prob = (log_probs * not_pad).sum(-1)
    loss = -(s.batch["reward"] * sequence_log_prob).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
