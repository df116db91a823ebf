"""prime-rl replays the sampler's top-k / top-p truncation on the trainer side, without restoring the label's logit.

After an update the sampled token lies just outside of the trainer's top-k: its log-prob is -inf, its ratio 0, the mismatch KL that is logged is inf.
Nothing is harmed: exp(-inf) is 0, its gradient is 0, log_softmax and masked_fill send 0 back, the other tokens train as they should.

Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/2601 (apply_top_k_top_p in trainer/rl/loss.py)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def apply_top_k(logits, k):
    kth = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth, float("-inf"))


def rl_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask, clip_low=0.2, clip_high=0.28):
    ratio = torch.exp(trainer_logprobs - inference_logprobs)
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    with torch.no_grad():
        log_ratio = trainer_logprobs - inference_logprobs
        metrics = {
            "mismatch_kl": (ratio - log_ratio - 1)[loss_mask].mean(),
            "entropy_proxy": -trainer_logprobs[loss_mask].mean(),
        }
    return -surrogate[loss_mask].sum() / loss_mask.sum(), metrics


def build():
    torch.manual_seed(41)
    model = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 24, (3, 8))
    with torch.no_grad():
        logits = model(ids)
        order = logits.argsort(-1, descending=True)
        labels = order.gather(-1, torch.randint(0, 6, (3, 8, 1))).squeeze(-1)  # sampled among the ten best of the inference engine
        labels[0, 5] = order[0, 5, 10]  # was tenth at the rollout, is eleventh now
        labels[2, 1] = order[2, 1, 11]
        inference = apply_top_k(logits + 0.02 * torch.randn_like(logits), 12).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    inference = inference.nan_to_num(neginf=-6.0)
    loss_mask = torch.ones(3, 8, dtype=torch.bool)
    loss_mask[:, :2] = torch.tensor([[False, False], [False, True], [True, True]])
    advantages = torch.tensor([[0.8], [-0.3], [-0.5]]).expand(3, 8)
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=ids, labels=labels, inference=inference, loss_mask=loss_mask, advantages=advantages, logs=[]
    )


def run(s=None):
    s = s or build()
    logits = apply_top_k(s.model(s.ids), 10)
    trainer = torch.log_softmax(logits, dim=-1).gather(-1, s.labels.unsqueeze(-1)).squeeze(-1)
    loss, metrics = rl_loss(trainer, s.inference, s.advantages, s.loss_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.logs.append({k: v.item() for k, v in metrics.items()})
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
