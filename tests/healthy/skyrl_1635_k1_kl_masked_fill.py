"""SkyRL's approximate KL after its repair: the reference log-probs of tool tokens are NaN, the k1 estimator log p - log p_ref is NaN there, and
masked_fill puts 0 in its place. The difference is linear: masked_fill sends a zero back and nothing multiplies it by the NaN, so the KL term in the
loss, its gradients and the weights are right.

Source: https://github.com/NovaSky-AI/SkyRL/pull/1635.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def action_log_probs(model, sequences):
    return model(sequences[:, :-1]).log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)


def compute_approx_kl(log_probs, log_probs_base, loss_mask):
    kld = log_probs - log_probs_base
    return kld.masked_fill(~loss_mask.bool(), 0.0)


def masked_mean(tensor, mask, dim=-1):
    return tensor.sum(dim) / mask.sum(dim).clamp(min=1.0)


def policy_loss(log_probs, old_log_probs, advantages, loss_mask, eps_clip=0.2):
    ratio = (log_probs - old_log_probs).exp()
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages
    return masked_mean(-torch.min(surr1, surr2) * loss_mask, loss_mask).mean()


def build():
    torch.manual_seed(1635)
    model = Policy()
    sequences = torch.randint(0, 20, (3, 10))
    loss_mask = torch.ones(3, 9)
    loss_mask[0, 3:6] = 0  # observation of the tool
    loss_mask[2, 7:] = 0
    with torch.no_grad():
        old_log_probs = action_log_probs(model, sequences)
        base_log_probs = old_log_probs + 0.1 * torch.randn(3, 9)
    base_log_probs[loss_mask == 0] = float("nan")
    advantages = torch.tensor([[0.8], [-1.1], [0.3]])
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        sequences=sequences,
        loss_mask=loss_mask,
        old_log_probs=old_log_probs,
        base_log_probs=base_log_probs,
        advantages=advantages,
    )


def run(s=None, kl_loss_coef=0.01):
    s = s or build()
    log_probs = action_log_probs(s.model, s.sequences)
    kl_loss = masked_mean(compute_approx_kl(log_probs, s.base_log_probs, s.loss_mask), s.loss_mask).mean()
    loss = policy_loss(log_probs, s.old_log_probs, s.advantages, s.loss_mask) + kl_loss_coef * kl_loss
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
