"""HL-Gauss value head (https://github.com/lucidrains/hl-gauss-pytorch/blob/main/hl_gauss_pytorch/hl_gauss.py, transform_to_probs; the listing in
Appendix A of https://arxiv.org/abs/2403.03950, which the repository follows, has no epsilon) as the critic of a PPO run on a language model.

The support of the bins is [-1, 1], but one response drifted from the reference and its KL penalty makes returns near -9. Both ends of the
cumulative distribution are then exactly 1, the mass inside the support is 0, and normalising it is 0/0. Clamping the return to the support
(or the mass from below), a support that is wide enough, or leaving such tokens out heals it; nan_to_num of the loss does not, for the NaN
target still multiplies the gradient of the log-softmax.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1, 2, 0),
    masked=False,
    role=("rewards", "loss", "advantages", "logits"),
    fix=(
        "clamp_input",
        "clamp_denominator",
        "validate_config",
        "fix_upstream",
        "drop_invalid_sample",
        "mask_before_op",
        "avoid_singular_op",
    ),
    variable=("target_probs", None),
    line=("return bin_probs / z.unsqueeze(-1)",),
)


class HLGaussLoss(nn.Module):
    def __init__(self, min_value=-1.0, max_value=1.0, num_bins=20, sigma_to_bin_ratio=2.0):
        super().__init__()
        support = torch.linspace(min_value, max_value, num_bins + 1)
        self.register_buffer("support", support)
        self.sigma_times_sqrt_two = float(support[1] - support[0]) * sigma_to_bin_ratio * 2.0**0.5

    def transform_to_probs(self, target):
        cdf_evals = torch.erf((self.support - target.unsqueeze(-1)) / self.sigma_times_sqrt_two)
        z = cdf_evals[..., -1] - cdf_evals[..., 0]
        bin_probs = cdf_evals[..., 1:] - cdf_evals[..., :-1]
        return bin_probs / z.unsqueeze(-1)

    def forward(self, logits, target):
        target_probs = self.transform_to_probs(target)
        return -(target_probs * logits.log_softmax(-1)).sum(-1)


class Critic(nn.Module):
    def __init__(self, vocab=21, hidden=12, num_bins=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.value_head = nn.Linear(hidden, num_bins, bias=False)

    def forward(self, input_ids):
        return self.value_head(self.rnn(self.embed(input_ids))[0])


def kl_shaped_rewards(logprobs, ref_logprobs, scores, mask, kl_coef=0.05):
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.cumsum(-1).argmax(-1)
    return rewards.scatter_add(1, last[:, None], scores[:, None])


def returns_to_go(rewards, mask):
    return rewards.flip(-1).cumsum(-1).flip(-1) * mask


def build():
    torch.manual_seed(506)
    critic, criterion = Critic(), HLGaussLoss()
    input_ids = torch.randint(0, 21, (3, 8))
    mask = torch.ones(3, 8)
    mask[:, :2] = 0
    mask[2, 6:] = 0
    ref_logprobs = -torch.rand(3, 8) * 2 - 0.2
    logprobs = ref_logprobs + 0.3 * torch.randn(3, 8)
    ref_logprobs[1, 2:] -= 30.0
    scores = torch.tensor([0.6, -0.4, 0.1])
    returns = returns_to_go(kl_shaped_rewards(logprobs, ref_logprobs, scores, mask), mask)
    return SimpleNamespace(
        model=critic,
        criterion=criterion,
        input_ids=input_ids,
        mask=mask,
        returns=returns,
        optimizer=torch.optim.AdamW(critic.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    values = s.model(s.input_ids)
    vf_loss = (s.criterion(values, s.returns) * s.mask).sum() / s.mask.sum()
    s.optimizer.zero_grad()
    vf_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return vf_loss


if __name__ == "__main__":
    run()
