"""google/tunix (here in torch), compute_kl_divergence with low_var_kl in the GRPO loss - the policy left one of its own tokens far behind.

After several updates on the same rollouts a counted token has log-prob -112 under the policy and -1.9 under the reference; exp of the difference leaves float32.
(Source: google/tunix PR 1560, rl/common.py compute_kl_divergence and rl/algo_core.py grpo_loss_fn.) Heals: clamping the log ratio to [-20, 20] before exp;
dropping the KL term of that token (masking the token before exp). Does not: clamping the KL at its output to 100, as the PR has it (forward fine, NaN in the gradient);
a smaller beta; expm1.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(2, 1),
    masked=False,
    role=("kl", "ratio"),
    fix=("clamp_exponent", "mask_before_op", "clamp_input", "drop_invalid_sample"),
    variable=(None, "kl"),
    line=("kl = torch.exp(delta) - delta - 1",),
)


class Policy(nn.Module):
    def __init__(self, vocab=21, dim=12):
        super().__init__()
        self.embedder = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.unembed = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embedder(tokens)
        return self.unembed(x + torch.relu(self.block(x)))


def compute_per_token_logps(model, prompt_ids, completion_ids):
    tokens = torch.cat([prompt_ids, completion_ids], dim=1)
    logits = model(tokens)[:, prompt_ids.shape[1] - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(-1, completion_ids[..., None])[..., 0]


def compute_kl_divergence(per_token_logps, ref_per_token_logps, method="low_var_kl"):
    if method == "kl":
        return per_token_logps - ref_per_token_logps
    if method == "mse_kl":
        return 0.5 * (per_token_logps - ref_per_token_logps).square()
    delta = ref_per_token_logps - per_token_logps
    kl = torch.exp(delta) - delta - 1
    return kl


def build():
    torch.manual_seed(1560)
    model, ref = Policy(), Policy()
    ref.load_state_dict(model.state_dict())
    prompt_ids = torch.randint(2, 20, (4, 3))
    completion_ids = torch.randint(2, 20, (4, 5))
    completion_ids[2, 1] = 20
    completion_mask = torch.ones(4, 5)
    completion_mask[0, 4:] = 0
    completion_mask[3, 3:] = 0
    with torch.no_grad():
        model.unembed.bias[20] = -109.0
        ref_per_token_logps = compute_per_token_logps(ref, prompt_ids, completion_ids)
        old_per_token_logps = compute_per_token_logps(model, prompt_ids, completion_ids) + 0.01 * torch.randn(4, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    example = SimpleNamespace(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        ref_per_token_logps=ref_per_token_logps,
        old_per_token_logps=old_per_token_logps,
        advantages=torch.tensor([0.7, -1.1, 1.2, -0.8]),
    )
    return SimpleNamespace(model=model, optimizer=optimizer, example=example, beta=0.04, epsilon=0.2)


def grpo_loss_fn(model, train_example, beta, epsilon):
    per_token_logps = compute_per_token_logps(model, train_example.prompt_ids, train_example.completion_ids)
    advantages = train_example.advantages[:, None]
    coef_1 = torch.exp(per_token_logps - train_example.old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.minimum(coef_1 * advantages, coef_2 * advantages)
    if beta != 0.0:
        kl = compute_kl_divergence(per_token_logps, train_example.ref_per_token_logps)
        per_token_loss = per_token_loss + beta * kl
    completion_mask = train_example.completion_mask
    loss = (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1)
    return loss


def run(s=None):
    s = s or build()
    loss = grpo_loss_fn(s.model, s.example, s.beta, s.epsilon)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
