"""RL of a vision-language-action policy that speaks only the last bins of its vocabulary; entropy bonus from log_softmax.

Logits of the ordinary words are set to -inf, so p = 0 and log p = -inf there, and the hand-written p * log p is NaN. The policy
loss (log-probs of action tokens) was fine as long as the bonus was off.
Source: https://github.com/RLinf/RLinf/pull/474
Heals: a large finite value in the masked logits; clamping or masking log p before the product.
Does not: fp32; a smaller bonus; torch.special.entr on the softmax (its slope at 0 is inf).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(0, 0, 0),
    masked=None,
    role=("entropy",),
    fix=("finite_mask_fill", "mask_before_op", "clamp_input", "stable_function"),
    variable=("p_log_p",),
    line=("p_log_p = logprobs.exp() * logprobs",),
)


class OpenVLA(nn.Module):
    def __init__(self, obs=10, vocab=40, n_action_bins=16, action_dim=3, dim=24):
        super().__init__()
        self.vocab, self.n_action_bins, self.action_dim = vocab, n_action_bins, action_dim
        self.vision = nn.Sequential(nn.Linear(obs, dim), nn.Tanh())
        self.queries = nn.Parameter(torch.randn(action_dim, dim) * 0.3)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, obs):
        hidden = self.vision(obs).unsqueeze(1) + self.queries
        logits = self.lm_head(hidden)
        logits_tensor = logits.clone()
        logits_tensor[..., : self.vocab - self.n_action_bins] = -torch.inf
        return logits_tensor


def compute_logprobs_and_entropy(logits, action_tokens):
    logprobs = torch.log_softmax(logits, dim=-1)
    p_log_p = logprobs.exp() * logprobs
    entropy = -p_log_p.sum(dim=-1)
    return logprobs.gather(-1, action_tokens.unsqueeze(-1)).squeeze(-1), entropy


def build():
    torch.manual_seed(31)
    model = OpenVLA()
    obs = torch.randn(5, 10)
    with torch.no_grad():
        dist = torch.distributions.Categorical(logits=model(obs))
        action_tokens = dist.sample()
        prev_logprobs = dist.log_prob(action_tokens)
    batch = dict(obs=obs, action_tokens=action_tokens, prev_logprobs=prev_logprobs, advantages=torch.randn(5, 1))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-4), batch=batch)


def run(s=None, entropy_bonus=0.005, clip_ratio=0.2):
    s = s or build()
    b = s.batch
    logprobs, entropy = compute_logprobs_and_entropy(s.model(b["obs"]), b["action_tokens"])
    ratio = torch.exp(logprobs.sum(-1, keepdim=True) - b["prev_logprobs"].sum(-1, keepdim=True))
    policy_loss = -torch.min(ratio * b["advantages"], ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * b["advantages"]).mean()
    loss = policy_loss - entropy_bonus * entropy.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item(), s.model.lm_head.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
