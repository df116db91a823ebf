"""`simple_grpo_loss` of torchforge's GRPO app: the reference log-probs of padding are 0, the policy's are -110.

The reference actor returns ragged rows that the collator pads with 0.0, the policy scores the pad token itself, which its head never
emits (-110). At a padded position ref - logprob is about +112, exp overflows, and the loss is multiplied by padding_mask: inf * 0 = NaN.

Source: https://github.com/meta-pytorch/torchforge (apps/grpo/main.py, simple_grpo_loss; the same lines in its OpenEnv apps and its copies).
Heals: masking both log-probs before the exponential, or a bound on the exponent. Does not: torch.where on the finished per-token loss
(the backward of exp still multiplies 0 by inf), clamp(min=1) of the denominator (it is there).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("exp",),
    index=(1, 4),
    masked=True,
    role=("kl", "ratio"),
    fix=("mask_before_op", "clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("kl = torch.exp(ref_logprobs - logprobs) - (ref_logprobs - logprobs) - 1",),
)

PAD, VOCAB, HIDDEN = 0, 12, 8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.rnn = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)
        with torch.no_grad():
            self.head.bias[PAD] = -110.0  # never a target in pre-training

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def compute_logprobs(logits, response):
    return torch.log_softmax(logits, dim=-1).gather(2, response.unsqueeze(-1)).squeeze(-1)


def simple_grpo_loss(logits, response, ref_logprobs, advantages, padding_mask, beta=0.1):
    logprobs = compute_logprobs(logits, response)
    kl = torch.exp(ref_logprobs - logprobs) - (ref_logprobs - logprobs) - 1
    per_token_policy_loss = torch.exp(logprobs - logprobs.detach()) * advantages
    per_token_loss = -(per_token_policy_loss - beta * kl)
    return ((per_token_loss * padding_mask).sum(dim=1) / padding_mask.sum(dim=1).clamp(min=1.0)).mean()


def build():
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = [6, 4, 5]
    rows = [torch.randint(1, VOCAB, (n,)) for n in lengths]
    response = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    with torch.no_grad():
        full = compute_logprobs(model(response.roll(1, 1)), response)
        reference = [full[i, :n] + 0.05 * torch.randn(n) for i, n in enumerate(lengths)]
    batch = {
        "response": response,
        "ref_logprobs": nn.utils.rnn.pad_sequence(reference, batch_first=True, padding_value=0.0),
        "advantages": torch.tensor([[1.1], [-0.8], [-0.3]]),
        "padding_mask": (response != PAD).float(),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        logits = s.model(b["response"].roll(1, 1))
        loss = simple_grpo_loss(logits, b["response"], b["ref_logprobs"], b["advantages"], b["padding_mask"])
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
