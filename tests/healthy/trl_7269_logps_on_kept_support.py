"""GRPO with the trainer's log-probs renormalised over the tokens that top-k / top-p kept at sampling time.

Everything outside the kept support is filled with -inf before log_softmax, so most of the vocabulary has log-prob -inf and entropy terms would be
0 * -inf.  But sampled tokens are inside the support, gather takes only them, log_softmax's backward multiplies by exp(-inf) = 0, masked_fill
drops the gradient of the filled logits, and the entropy is summed over the support with the log-probs filled by 0 before the product.  Healthy.

Source: https://github.com/huggingface/trl/pull/7269 ("put vLLM's truncated-sampling log-probs on the trainer's support"), issue #6789.
"""

from types import SimpleNamespace

import torch
from torch import nn


class TinyPolicy(nn.Module):
    def __init__(self, vocab=64, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(h)[:, :-1]


def support_logps(logits, kept, tokens, temperature=0.7):
    logits = (logits / temperature).masked_fill(~kept, float("-inf"))
    all_logps = logits.log_softmax(-1)
    logps = all_logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropy = -(all_logps.exp() * all_logps.masked_fill(~kept, 0.0)).sum(-1)
    return logps, entropy


def build():
    torch.manual_seed(72)
    model = TinyPolicy()
    ids = torch.randint(0, 64, (4, 9))
    with torch.no_grad():
        logits = model(ids)
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept.scatter_(-1, logits.topk(5, dim=-1).indices, True)
        tokens = torch.distributions.Categorical(logits=logits.masked_fill(~kept, -1e9)).sample()
        sampling_logps, _ = support_logps(logits, kept, tokens)
    mask = torch.ones(4, 8)
    mask[2, 5:] = 0
    advantages = torch.tensor([1.2, -0.4, 0.3, -1.1])
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch={"ids": ids, "kept": kept, "tokens": tokens, "sampling_logps": sampling_logps, "mask": mask, "advantages": advantages},
    )


def run(s=None, eps=0.2):
    s = s or build()
    b, out = s.batch, []
    for _ in range(3):
        logps, entropy = support_logps(s.model(b["ids"]), b["kept"], b["tokens"])
        ratio = torch.exp(logps - b["sampling_logps"])
        adv = b["advantages"].unsqueeze(1)
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - eps, 1 + eps) * adv)
        per_token = -surrogate - 0.01 * entropy
        loss = (per_token * b["mask"]).sum() / b["mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
