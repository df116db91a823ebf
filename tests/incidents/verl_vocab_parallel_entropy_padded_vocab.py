"""PPO actor with the vocabulary-parallel entropy of verl's Megatron worker, a hand-written autograd.Function, on a padded vocabulary.

Megatron pads the vocabulary to a multiple of the tensor-parallel size. The padded columns are filled with -inf so that they are never sampled. log_softmax of the labels
does not mind, but the entropy is logsumexp - sum(softmax * logits): 0 * -inf is NaN for every token (and once more in the backward that is written by hand).
Source: https://github.com/volcengine/verl/blob/main/verl/utils/megatron/tensor_parallel.py (_VocabParallelEntropy)
Heals: a large finite fill, cutting the padded columns off before the entropy, 0 where the probability is 0 (in both passes of the
function).  Does not: autograd through torch.special.entr, a smaller entropy coefficient, masking the entropy by token.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(0, 0, 21),
    masked=False,
    role=("entropy", "hidden"),
    fix=("finite_mask_fill", "mask_before_op", "stable_function", "where_on_detached", "clamp_input"),
    variable=(None,),
    line=("sum_softmax_times_logits = (softmax_logits * vocab_parallel_logits).sum(dim=-1, keepdim=True)",),
)


class _VocabParallelEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits):
        logits_max = vocab_parallel_logits.max(dim=-1, keepdim=True).values
        exp_logits = (vocab_parallel_logits - logits_max).exp_()
        sum_exp_logits = exp_logits.sum(dim=-1, keepdim=True)
        softmax_logits = exp_logits.div_(sum_exp_logits)
        sum_softmax_times_logits = (softmax_logits * vocab_parallel_logits).sum(dim=-1, keepdim=True)
        entropy = logits_max + sum_exp_logits.log() - sum_softmax_times_logits
        ctx.save_for_backward(vocab_parallel_logits, softmax_logits, sum_softmax_times_logits)
        return entropy.squeeze(dim=-1)

    @staticmethod
    def backward(ctx, grad_output):
        vocab_parallel_logits, softmax_logits, sum_softmax_times_logits = ctx.saved_tensors
        grad = softmax_logits * (vocab_parallel_logits - sum_softmax_times_logits)
        return -grad * grad_output.unsqueeze(dim=-1)


class Actor(nn.Module):
    def __init__(self, vocab=21, multiple=8, dim=16):
        super().__init__()
        padded = (vocab + multiple - 1) // multiple * multiple
        self.vocab = vocab
        self.embed = nn.Embedding(padded, dim)
        self.mlp = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))
        self.output_layer = nn.Linear(dim, padded, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        logits = self.output_layer(h + self.mlp(h))
        padding = torch.arange(logits.shape[-1]) >= self.vocab
        return logits.masked_fill(padding, float("-inf"))


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def build():
    torch.manual_seed(8)
    model = Actor()
    ids = torch.randint(0, 21, (3, 8))
    response_mask = torch.ones(3, 7)
    response_mask[2, 5:] = 0
    with torch.no_grad():
        old_log_probs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    batch = {"input_ids": ids, "response_mask": response_mask, "old_log_probs": old_log_probs, "advantages": torch.randn(3, 1).expand(3, 7)}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    ids, mask, adv = s.batch["input_ids"], s.batch["response_mask"], s.batch["advantages"]
    for _ in range(2):
        logits = s.model(ids[:, :-1])
        log_prob = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(log_prob - s.batch["old_log_probs"])
        pg_loss = masked_mean(torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)), mask)
        entropy = _VocabParallelEntropy.apply(logits)
        loss = pg_loss - 0.001 * masked_mean(entropy, mask)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
