"""LUFFY - off-policy demonstrations are weighted by sqrt of the policy's probability (`off_policy_reshape: square_root`). A demonstrated token
that the policy gives less than e^-104 has probability 0 in fp32: the loss is finite, the gradient of the root at 0 is inf and times 0 is NaN.

https://github.com/ElliottYan/LUFFY (mix_core_alg, compute_token_on_off_policy_loss, off_policy_reshape).
Heals: exp(0.5 * log_prob), or a floor under the probability before the root. Tempting and useless: off_max_clip / off_min_clip after the
root (the clamp gives 0 and 0 * inf is still NaN), nan_to_num of the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(1, 2),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("stable_function", "clamp_input", "representable_eps", "clamp_exponent", "avoid_singular_op"),
    variable=("off_ratio", "off_prob"),
    line=("off_ratio = torch.sqrt(off_prob)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=16, sharpness=1.0):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        with torch.no_grad():
            self.lm_head.weight.mul_(sharpness)

    def forward(self, input_ids):
        return self.lm_head(torch.tanh(self.embed(input_ids)))


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def get_log_prob(model, input_ids):
    logits = model(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def compute_token_on_off_policy_loss(old_log_prob, log_prob, advantages, eos_mask, prefix_mask, cliprange=0.2):
    negative_approx_kl = (log_prob - old_log_prob).clamp(-20.0, 20.0)
    ratio = torch.exp(negative_approx_kl)
    on_pg_losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))

    # off-policy: the behaviour policy of the demonstrations is unknown, its probability is taken as 1
    off_prob = torch.exp(log_prob)
    off_ratio = torch.sqrt(off_prob)
    off_pg_losses = -advantages * off_ratio

    pg_losses = off_pg_losses * prefix_mask + on_pg_losses * (1 - prefix_mask)
    return masked_mean(pg_losses, eos_mask)


@torch.no_grad()
def generate(model, first, length):
    ids = [first]
    for _ in range(length):
        ids.append(model(ids[-1]).argmax(-1))
    return torch.cat(ids, dim=1)


def build():
    torch.manual_seed(11)
    model = Policy(sharpness=150.0)  # late in training: entropy is almost 0
    rollout = generate(model, torch.tensor([[3]]), 5)
    demonstration = torch.tensor([[3, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        for t, rank in enumerate((1, 2, 20, 1, 3)):  # how far down the policy's own list the demonstrated token is
            order = model(demonstration[:, t]).argsort(-1, descending=True)
            demonstration[:, t + 1] = order[:, rank - 1]
    input_ids = torch.cat([rollout, demonstration])
    prefix_mask = torch.tensor([[0.0], [1.0]]).expand(2, 5)
    eos_mask = torch.ones(2, 5)
    advantages = torch.tensor([[-0.7], [0.7]])
    with torch.no_grad():
        old_log_prob = get_log_prob(model, input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        input_ids=input_ids,
        prefix_mask=prefix_mask,
        eos_mask=eos_mask,
        advantages=advantages,
        old_log_prob=old_log_prob,
    )


def run(s=None):
    s = s or build()
    log_prob = get_log_prob(s.model, s.input_ids)
    loss = compute_token_on_off_policy_loss(s.old_log_prob, log_prob, s.advantages, s.eos_mask, s.prefix_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
