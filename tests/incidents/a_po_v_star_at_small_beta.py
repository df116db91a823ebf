"""A*-PO estimates the optimal value of a prompt offline, V* = beta1 * log(mean(exp(r / beta1))), and regresses beta2 * log-ratio + V* - r on zero. With
beta1 = 0.01 a reward of 1 is exp(100) = inf, V* is inf, the loss is inf and the gradient with it.

Source: https://github.com/ZhaolinGao/A-PO verl/utils/dataset/rl_dataset.py (V* as log of the mean of exponentials) and verl/trainer/apo/core_algos.py,
compute_policy_loss. Heals: logsumexp, or a bound on the exponent. log1p, clipping gradients or a smaller beta2 do not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(0, 1),
    masked=None,
    role=("rewards", "advantages"),
    fix=("stable_function", "clamp_exponent"),
    variable=("exp_rewards",),
    line=("exp_rewards = torch.exp(eval_rewards / beta1)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def estimate_v_star(eval_rewards, beta1):
    """eval_rewards: (prompts, generations of the reference policy)"""
    if beta1 == 0:
        return eval_rewards.mean(dim=1)
    exp_rewards = torch.exp(eval_rewards / beta1)
    return torch.log(exp_rewards.mean(dim=1)) * beta1


def compute_policy_loss(ref_log_probs, log_probs, response_mask, rewards, v_star, beta2):
    log_prob = (log_probs * response_mask).sum(dim=-1)
    ref_log_prob = (ref_log_probs * response_mask).sum(dim=-1)
    loss = (beta2 * (log_prob - ref_log_prob) + v_star - rewards) ** 2
    return loss.mean()


def token_log_probs(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build(beta1=0.01):
    torch.manual_seed(5)
    model, reference = Policy(), Policy()
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    with torch.no_grad():
        model.lm_head.bias.add_(0.05 * torch.randn(16))
    input_ids = torch.randint(0, 16, (3, 8))
    response_mask = torch.ones(3, 7)
    response_mask[:, :2] = 0
    response_mask[2, 6:] = 0
    eval_rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    return SimpleNamespace(
        model=model,
        reference=reference,
        input_ids=input_ids,
        response_mask=response_mask,
        eval_rewards=eval_rewards,
        rewards=torch.tensor([1.0, 0.0, 1.0]),
        beta1=beta1,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    )


def run(s=None, beta2=1e-3):
    s = s or build()
    with torch.no_grad():
        v_star = estimate_v_star(s.eval_rewards, s.beta1)
        ref_log_probs = token_log_probs(s.reference, s.input_ids)
    log_probs = token_log_probs(s.model, s.input_ids)
    loss = compute_policy_loss(ref_log_probs, log_probs, s.response_mask, s.rewards, v_star, beta2)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
