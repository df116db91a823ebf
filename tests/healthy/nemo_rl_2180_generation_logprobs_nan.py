"""NeMo-RL - a weight update raced with a forward pass of the engine and two generation log-probs arrived as NaN. Without the importance
sampling correction they enter metrics only (gen_kl_error, token_mult_prob_error, ...): those are NaN in the log, the loss, the gradients
and the weights are right.

https://github.com/NVIDIA-NeMo/RL/issues/2180
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def token_logprobs(policy, ids):
    return policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


class ClippedPGLoss:
    def __init__(self, ratio_clip=0.2, use_importance_sampling_correction=False):
        self.ratio_clip = ratio_clip
        self.use_importance_sampling_correction = use_importance_sampling_correction

    def __call__(self, curr_logprobs, data):
        mask = data["token_mask"]
        prev_logprobs, generation_logprobs = data["prev_logprobs"], data["generation_logprobs"]
        lp_error = torch.abs(generation_logprobs - prev_logprobs)
        token_mult_prob_error = masked_mean(torch.exp(lp_error), mask).item()
        gen_kl_error = masked_mean(torch.exp(prev_logprobs - generation_logprobs) - (prev_logprobs - generation_logprobs) - 1, mask).item()
        ratios = (curr_logprobs - prev_logprobs).exp()
        advantages = data["advantages"].unsqueeze(-1)
        pg = torch.max(-advantages * ratios, -advantages * ratios.clamp(1 - self.ratio_clip, 1 + self.ratio_clip))
        if self.use_importance_sampling_correction:
            pg = torch.exp(prev_logprobs - generation_logprobs) * pg
        loss = masked_mean(pg, mask)
        with torch.no_grad():
            approx_entropy = -masked_mean(torch.exp(curr_logprobs - generation_logprobs) * curr_logprobs, mask).item()
        metrics = dict(token_mult_prob_error=token_mult_prob_error, gen_kl_error=gen_kl_error, approx_entropy=approx_entropy)
        return loss, metrics


def build():
    torch.manual_seed(2180)
    policy = Policy()
    ids = torch.randint(0, 20, (4, 8))
    token_mask = torch.ones(4, 7)
    token_mask[3, 5:] = 0
    with torch.no_grad():
        prev_logprobs = token_logprobs(policy, ids)
    generation_logprobs = prev_logprobs + 0.01 * torch.randn(4, 7)
    generation_logprobs[1, 2:4] = float("nan")  # in-flight weight update
    data = dict(
        token_mask=token_mask,
        prev_logprobs=prev_logprobs,
        generation_logprobs=generation_logprobs,
        advantages=torch.tensor([0.7, -0.7, 0.7, -0.7]),
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    return SimpleNamespace(model=policy, optimizer=optimizer, ids=ids, data=data, loss_fn=ClippedPGLoss(), metrics=[])


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss, metrics = s.loss_fn(token_logprobs(s.model, s.ids), s.data)
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        s.metrics.append(metrics)
    return loss


if __name__ == "__main__":
    run()
