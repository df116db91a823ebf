"""textpolicy (GTPO) - the advantage of a token is weighted by its entropy over the mean entropy of the batch. The policy has collapsed:
every distribution is one-hot to the last bit of fp32, all entropies are 0, the mean is 0 and the normalised entropy is 0/0.

https://github.com/teilomillet/textpolicy/issues/10 and https://github.com/teilomillet/textpolicy/pull/21
Heals: a floor under (or an epsilon next to) the mean entropy, or weight 1 where the mean is 0. Does not: detaching the weights (they are
detached), nan_to_num of the finished loss (0 * NaN in backward), the completion mask.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=False,
    role=("entropy", "advantages"),
    fix=("clamp_denominator", "representable_eps", "guard_empty"),
    variable=("entropy_normalized",),
    line=("entropy_normalized = token_entropy / mean_entropy",),
)


class Policy(nn.Module):
    def __init__(self, vocab=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, vocab)
        self.lm_head = nn.Linear(vocab, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def compute_token_entropy(logits):
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def apply_entropy_weighting(advantages, token_entropy, mask, entropy_weight):
    mean_entropy = (token_entropy * mask).sum() / mask.sum()
    entropy_normalized = token_entropy / mean_entropy
    weights = 1.0 + entropy_weight * (entropy_normalized - 1.0)
    return advantages.unsqueeze(1) * weights


def grpo_loss(model, batch, clip_ratio=0.2, entropy_weight=0.1):
    logits = model(batch["input_ids"][:, :-1])
    new_logprobs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        token_entropy = compute_token_entropy(logits)
        token_advantages = apply_entropy_weighting(batch["advantages"], token_entropy, batch["mask"], entropy_weight)
    ratio = torch.exp(new_logprobs - batch["old_logprobs"])
    surrogate = torch.clamp(ratio, max=1 + clip_ratio) * token_advantages
    return -(surrogate * batch["mask"]).sum() / batch["mask"].sum()


def build():
    torch.manual_seed(10)
    vocab = 12
    model = Policy(vocab)
    with torch.no_grad():
        # after entropy collapse: the successor of a token is certain, the next best is 150 nats away
        model.embed.weight.copy_(torch.eye(vocab))
        model.lm_head.weight.copy_(150.0 * torch.eye(vocab).roll(1, dims=0) + 0.05 * torch.randn(vocab, vocab))
    start = torch.tensor([[0], [3], [5], [7]])
    input_ids = (start + torch.arange(8)) % vocab
    mask = torch.ones(4, 7)
    mask[2, 5:] = 0
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    with torch.no_grad():
        old_logprobs = model(input_ids[:, :-1]).log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    batch = dict(input_ids=input_ids, mask=mask, advantages=rewards - rewards.mean(), old_logprobs=old_logprobs)
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.Adam(model.parameters(), lr=5e-6))


def run(s=None):
    s = s or build()
    loss = grpo_loss(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
