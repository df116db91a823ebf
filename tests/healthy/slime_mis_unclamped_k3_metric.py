"""slime, examples/train_infer_mismatch_helper/mis.py
(https://github.com/THUDM/slime/blob/main/examples/train_infer_mismatch_helper/mis.py): the importance weights are taken from a log ratio that
is clamped to +-20, while the k3 KL that goes to the log is taken from the raw one. A stale token makes the logged k3 infinite (and its mean);
weights, loss and gradients are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

SAFETY_BOUND = 20.0


def masked_mean(x, loss_mask):
    return (x * loss_mask).sum() / torch.clamp_min(loss_mask.sum(), 1)


def metrics_append(metrics, key, value):
    metrics.setdefault(key, []).append(value.clone().detach())


def add_ppl_metrics(train_log_prob, rollout_log_prob, loss_mask, metrics):
    mean_log_prob_training = masked_mean(train_log_prob, loss_mask)
    mean_log_prob_rollout = masked_mean(rollout_log_prob, loss_mask)
    metrics_append(metrics, "training_ppl", torch.exp(-mean_log_prob_training))
    metrics_append(metrics, "rollout_ppl", torch.exp(-mean_log_prob_rollout))
    log_ratio = train_log_prob - rollout_log_prob
    k3_kl = torch.exp(log_ratio) - log_ratio - 1
    metrics_append(metrics, "k3_kl", k3_kl)


def compute_mis_weights(train_log_probs, rollout_log_probs, loss_masks, upper_bound):
    metrics, all_weights = {}, []
    for train_log_prob, rollout_log_prob, loss_mask in zip(train_log_probs, rollout_log_probs, loss_masks):
        add_ppl_metrics(train_log_prob, rollout_log_prob, loss_mask, metrics)
        raw_log_ratio = train_log_prob - rollout_log_prob
        weights = torch.exp(torch.clamp(raw_log_ratio, min=-SAFETY_BOUND, max=SAFETY_BOUND))
        metrics_append(metrics, "mean_is_weight_before_clip", weights)
        weights = weights.clamp(0, upper_bound) * loss_mask
        all_weights.append(weights.detach())
    return all_weights, metrics


class Actor(nn.Module):
    def __init__(self, vocab=21, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def log_probs(self, tokens):
        x = torch.relu(self.fc(self.embed(tokens[:-1]))) + self.embed(tokens[:-1])
        return self.out(x).log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)


def build():
    torch.manual_seed(429)
    actor = Actor()
    tokens = [torch.randint(0, 21, (n,)) for n in (6, 9, 4)]
    with torch.no_grad():
        old = [actor.log_probs(t) for t in tokens]
    rollout = [o + 0.05 * torch.randn_like(o) for o in old]
    rollout[1][3] = -131.0  # sampled by weights that are long gone
    loss_masks = [torch.ones(len(t) - 1) for t in tokens]
    loss_masks[2][0] = 0
    return SimpleNamespace(
        model=actor,
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-5),
        tokens=tokens,
        old=old,
        rollout=rollout,
        loss_masks=loss_masks,
        advantages=[0.6, -1.1, 0.5],
    )


def run(s=None):
    s = s or build()
    weights, metrics = compute_mis_weights(s.old, s.rollout, s.loss_masks, upper_bound=2.0)
    losses = []
    for tokens, old, mask, weight, advantage in zip(s.tokens, s.old, s.loss_masks, weights, s.advantages):
        ratio = torch.exp(s.model.log_probs(tokens) - old)
        pg_loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
        losses.append(masked_mean(pg_loss * weight, mask))
    loss = torch.stack(losses).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    s.metrics = {key: torch.stack([v.mean() for v in values]).mean().item() for key, values in metrics.items()}
    return loss


if __name__ == "__main__":
    print(run().item())
