"""verifiers #462 - the PPO ratio is taken against the log-probs that the vLLM server returned. The server writes -inf as -9999.0 because JSON
has no infinity; a closing tag that the client forced into the answer comes back so, and exp(logp + 9999) is inf on a token that counts.

https://github.com/PrimeIntellect-ai/verifiers/pull/462 (ratios against stored sampling_logprobs); vllm/entrypoints/openai/serving_chat.py
(`max(logprob, -9999.0)`). Heals: leave such tokens out of the mask before the subtraction, or clamp the log ratio.
Tempting and useless: clamping the ratio after exp (the loss is finite, backward makes 0 * inf), multiplying by a mask afterwards.
"""

import json
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 3),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "drop_invalid_sample", "reject_input", "clamp_input"),
    variable=("ratio",),
    line=("ratio = torch.exp(log_ratio)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.block(hidden)))


def get_logprobs(model, input_ids):
    logits = model(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def parse_chat_completion_logprobs(response):
    content = json.loads(response)["choices"][0]["logprobs"]["content"]
    return [token["logprob"] for token in content]


def grpo_loss(trainer_logprobs, sampling_logprobs, advantages, loss_mask, epsilon=0.2):
    log_ratio = trainer_logprobs - sampling_logprobs
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(ratio * advantages, clipped * advantages)
    return per_token_loss[loss_mask].sum() / loss_mask.sum()


def serve(logprobs):
    """What the server answers for one completion."""
    content = [{"token": f"<{i}>", "logprob": max(lp, -9999.0)} for i, lp in enumerate(logprobs)]
    return json.dumps({"choices": [{"logprobs": {"content": content}}]})


def build():
    torch.manual_seed(462)
    model = Policy()
    input_ids = torch.randint(0, 32, (3, 7))
    with torch.no_grad():
        engine = get_logprobs(model, input_ids) + 0.02 * torch.randn(3, 6)
    engine[1, 3] = float("-inf")  # </think> was forced after the budget: outside the engine's top-p set
    responses = [serve(row.tolist()) for row in engine]
    loss_mask = torch.ones(3, 6, dtype=torch.bool)
    loss_mask[2, 4:] = False
    advantages = torch.tensor([[1.1], [-0.8], [-0.3]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(
        model=model, optimizer=optimizer, input_ids=input_ids, responses=responses, loss_mask=loss_mask, advantages=advantages
    )


def run(s=None):
    s = s or build()
    sampling_logprobs = torch.tensor([parse_chat_completion_logprobs(r) for r in s.responses])
    trainer_logprobs = get_logprobs(s.model, s.input_ids)
    loss = grpo_loss(trainer_logprobs, sampling_logprobs, s.advantages, s.loss_mask)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
