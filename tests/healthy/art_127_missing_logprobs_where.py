"""OpenPipe ART #127 (https://github.com/OpenPipe/ART/issues/127): tokens of messages without recorded log-probs carry NaN, in counted
assistant tokens and in padding alike. The trainer puts its own new log-prob there before anything is computed from them, so the ratio is an
exact 1 and its two gradients cancel. Looks broken (the batch is full of NaN); loss, gradients and weights are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def shift_tensor(tensor, pad):
    return nn.functional.pad(tensor[:, 1:], (0, 1), value=pad)


class Model(nn.Module):
    def __init__(self, vocab=25, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(x + torch.tanh(self.proj(x)))


def compute_loss(model, inputs, epsilon=0.2):
    logits = model(inputs["tokens"])
    next_tokens = shift_tensor(inputs["tokens"], 0)
    new_logprobs = logits.log_softmax(-1).gather(-1, next_tokens.unsqueeze(-1)).squeeze(-1)
    old_logprobs = shift_tensor(inputs["logprobs"], 0.0)
    advantages = shift_tensor(inputs["advantages"], 0.0)
    assistant_mask = shift_tensor(inputs["assistant_mask"], False).to(new_logprobs.dtype)
    weights = shift_tensor(inputs["weights"], 0.0)
    # missing old log-probs are assumed to have been sampled under the current policy
    old_logprobs = torch.where(torch.isnan(old_logprobs), new_logprobs, old_logprobs)
    prob_ratio = torch.exp(new_logprobs - old_logprobs)
    policy_loss = -torch.min(prob_ratio * advantages, prob_ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    policy_loss = policy_loss * weights * assistant_mask
    return policy_loss.sum() / (assistant_mask.sum() + 1e-6)


def build():
    torch.manual_seed(127)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
    tokens = torch.randint(0, 25, (3, 10))
    with torch.no_grad():
        behaviour = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    logprobs = torch.full((3, 10), float("nan"))
    assistant_mask = torch.zeros(3, 10, dtype=torch.bool)
    assistant_mask[:, 4:8] = True
    logprobs[:, 5:8] = behaviour[:, 4:7] + 0.03 * torch.randn(3, 3)  # the first assistant token has none
    logprobs[2] = float("nan")  # a trajectory that was read from a log file
    advantages = torch.tensor([[1.0], [-1.2], [0.2]]).expand(3, 10) * assistant_mask
    inputs = {
        "tokens": tokens,
        "logprobs": logprobs,
        "assistant_mask": assistant_mask,
        "advantages": advantages,
        "weights": assistant_mask.float() / 4,
    }
    return SimpleNamespace(model=model, optimizer=optimizer, inputs=inputs)


def run(s=None):
    s = s or build()
    loss = compute_loss(s.model, s.inputs)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())
