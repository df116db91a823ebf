"""verl #3980 - self-normalised importance sampling: the rollout weights of a sequence are divided by their masked sum over that sequence.

Rejection sampling has emptied the response mask of one sequence (its sampler and trainer log-probs disagree too much). Its weights are positive, their
masked sum d_b is 0, and w / 0 is inf on every token of the row. No token of it counts, but the loss is masked by a product, and inf * 0 is NaN.

Source: https://github.com/verl-project/verl/pull/3980 (rollout_is_self_norm, "seq-mean-token-sum": d_b = sum_t m * w), rejection as in
https://github.com/verl-project/verl/pull/3915
Heals: a floor under d_b, a denominator of 1 for rows without a token, dropping the row, where(mask, w / d_b, 0) (the weights carry no gradient).
Does not: the truncation of w before the division, a floor under the token count of the loss, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "inf_times_zero_mask", "empty_mask_mean"),
    op=("div",),
    index=(2, 0),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "where_on_detached", "mask_before_op", "avoid_singular_op"),
    variable=("rollout_is_weights",),
    line=("rollout_is_weights = rollout_is_weights / d_b",),
)


class TinyPolicy(nn.Module):
    def __init__(self, vocab=23, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.gru(self.embed(ids))
        return self.lm_head(h)


def log_probs_from(model, input_ids, responses):
    logits = model(input_ids)[:, -responses.size(1) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def compute_rollout_correction(old_log_prob, rollout_log_prob, response_mask, threshold=2.0, rs_lower=0.5, rs_upper=2.0):
    log_ratio = (old_log_prob - rollout_log_prob).clamp(-20.0, 20.0)
    rollout_is_weights = torch.exp(log_ratio).clamp(max=threshold)
    # sequence-level rejection by the geometric mean of the ratio
    tokens = response_mask.sum(dim=-1, keepdim=True)
    seq_ratio = torch.exp((log_ratio * response_mask).sum(dim=-1, keepdim=True) / tokens)
    accept = ((seq_ratio >= rs_lower) & (seq_ratio <= rs_upper)).to(response_mask.dtype)
    modified_response_mask = response_mask * accept
    # self-normalisation, seq-mean-token-sum
    d_b = (rollout_is_weights * modified_response_mask).sum(dim=-1, keepdim=True)
    rollout_is_weights = rollout_is_weights / d_b
    return rollout_is_weights, modified_response_mask


def policy_loss(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights, clip=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    pg_losses = pg_losses * rollout_is_weights
    seq_losses = (pg_losses * response_mask).sum(dim=-1)
    seq_mask = (response_mask.sum(dim=-1) > 0).float()
    return seq_losses.sum() / seq_mask.sum().clamp(min=1.0)


def build():
    torch.manual_seed(3980)
    model = TinyPolicy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch_size, prompt, length = 5, 4, 8
    input_ids = torch.randint(0, 23, (batch_size, prompt + length))
    responses = input_ids[:, prompt:]
    response_mask = torch.ones(batch_size, length)
    response_mask[0, 6:] = 0.0
    response_mask[3, 4:] = 0.0
    with torch.no_grad():
        old_log_prob = log_probs_from(model, input_ids, responses)
    rollout_log_prob = old_log_prob + 0.05 * torch.randn(batch_size, length)
    rollout_log_prob[2] += 1.5  # the engine served an older adapter
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        batch={
            "input_ids": input_ids,
            "responses": responses,
            "response_mask": response_mask,
            "old_log_prob": old_log_prob,
            "rollout_log_prob": rollout_log_prob,
            "advantages": torch.randn(batch_size, 1).expand(-1, length).contiguous(),
        },
    )


def run(s=None):
    s = s or build()
    b = s.batch
    weights, mask = compute_rollout_correction(b["old_log_prob"], b["rollout_log_prob"], b["response_mask"])
    losses = []
    for _ in range(2):
        log_prob = log_probs_from(s.model, b["input_ids"], b["responses"])
        loss = policy_loss(b["old_log_prob"], log_prob, b["advantages"], mask, weights)
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
