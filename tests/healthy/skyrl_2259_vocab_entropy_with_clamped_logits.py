"""SkyRL, vocabulary-parallel entropy over a head whose padded rows are -inf - healthy.

The rows that pad the checkpoint's vocabulary are masked with -inf; the entropy clamps the logits to the lowest finite number after the softmax, so the product is 0 times a
finite number, in the forward and in the hand-written backward; log-probs gather only real tokens. (Source: NovaSky-AI/SkyRL, pull request 2259.)
"""

from types import SimpleNamespace

import torch
from torch import nn


class VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits):
        logits_max = vocab_parallel_logits.max(dim=-1, keepdim=True).values
        normalized = vocab_parallel_logits - logits_max
        exp_logits = normalized.exp()
        sum_exp = exp_logits.sum(dim=-1, keepdim=True)
        softmax_logits = exp_logits / sum_exp
        clamped = vocab_parallel_logits.clamp(min=torch.finfo(vocab_parallel_logits.dtype).min)
        sum_softmax_times_logits = (softmax_logits * clamped).sum(dim=-1, keepdim=True)
        ctx.save_for_backward(clamped, softmax_logits, sum_softmax_times_logits)
        return (logits_max + sum_exp.log() - sum_softmax_times_logits).squeeze(-1)

    @staticmethod
    def backward(ctx, grad_output):
        logits, softmax_logits, sum_softmax_times_logits = ctx.saved_tensors
        return grad_output.unsqueeze(-1) * softmax_logits * (sum_softmax_times_logits - logits)


class Actor(nn.Module):
    def __init__(self, vocab=21, padded_vocab=24, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(padded_vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.output_layer = nn.Linear(dim, padded_vocab, bias=False)
        self.register_buffer("pad_rows", torch.arange(padded_vocab) >= vocab)

    def forward(self, ids):
        logits = self.output_layer(self.norm(self.embedding(ids)))
        return logits.masked_fill(self.pad_rows, float("-inf"))


def build():
    torch.manual_seed(14)
    model = Actor()
    sequences = torch.randint(0, 21, (4, 9))
    loss_mask = torch.ones(4, 8)
    loss_mask[:, :2] = 0
    loss_mask[2, 6:] = 0
    with torch.no_grad():
        old = model(sequences)[:, :-1].log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        sequences=sequences,
        loss_mask=loss_mask,
        old_log_probs=old,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None],
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        logits = s.model(s.sequences)[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, s.sequences[:, 1:, None]).squeeze(-1)
        entropy = VocabParallelEntropy.apply(logits)
        ratio = (log_probs - s.old_log_probs).exp()
        surr1 = ratio * s.advantages
        surr2 = ratio.clamp(0.8, 1.2) * s.advantages
        policy_loss = (-torch.min(surr1, surr2) * s.loss_mask).sum() / s.loss_mask.sum()
        entropy_loss = (entropy * s.loss_mask).sum() / s.loss_mask.sum()
        loss = policy_loss - 0.01 * entropy_loss
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
