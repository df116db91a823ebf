"""DPO whose loss is spelled log(sigmoid(x)) and one pair that the policy has badly the wrong way round.

The scaled margin of the pair is below -104, sigmoid is exactly 0 in fp32 and its log is -inf: the loss is inf, and backward
multiplies 1/0 by the vanished slope of sigmoid, NaN for every weight.
Source: https://github.com/thinking-machines-lab/tinker-cookbook/pull/188
Heals: F.logsigmoid (loss about 140 and slope 1 for the pair).
Does not: clipping the gradient norm; averaging; dropping NaN losses after the fact.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(2,),
    masked=None,
    role=("loss", "hidden"),
    fix=("stable_function", "clamp_input", "representable_eps"),
    variable=(None,),
    line=("losses = -torch.log(torch.sigmoid(dpo_beta * margin))",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.unembed = nn.Linear(dim, vocab)

    def sequence_logprob(self, tokens, weights):
        logits = self.unembed(self.embed(tokens[:, :-1]))
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return (logprobs * weights[:, 1:]).sum(-1)


def compute_dpo_loss(chosen_logprobs, rejected_logprobs, chosen_ref, rejected_ref, dpo_beta):
    chosen_log_ratio = chosen_logprobs - chosen_ref
    rejected_log_ratio = rejected_logprobs - rejected_ref
    margin = chosen_log_ratio - rejected_log_ratio
    losses = -torch.log(torch.sigmoid(dpo_beta * margin))
    metrics = dict(accuracy=(margin > 0).float().mean().item(), margin=margin.mean().item())
    return losses.mean(), metrics


def build():
    torch.manual_seed(7)
    model = TinyLM()
    chosen = torch.randint(0, 30, (4, 26))
    rejected = torch.randint(0, 30, (4, 26))
    chosen[2, 6:] = 31  # a run of one token that the policy no longer emits
    weights = torch.ones(4, 26)
    weights[:, :6] = 0
    with torch.no_grad():
        chosen_ref = model.sequence_logprob(chosen, weights)
        rejected_ref = model.sequence_logprob(rejected, weights)
        model.unembed.bias[31] -= 70.0
    batch = dict(chosen=chosen, rejected=rejected, weights=weights, chosen_ref=chosen_ref, rejected_ref=rejected_ref)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4), batch=batch)


def run(s=None, dpo_beta=0.1):
    s = s or build()
    b = s.batch
    for _ in range(2):
        s.optimizer.zero_grad()
        loss, metrics = compute_dpo_loss(
            s.model.sequence_logprob(b["chosen"], b["weights"]),
            s.model.sequence_logprob(b["rejected"], b["weights"]),
            b["chosen_ref"],
            b["rejected_ref"],
            dpo_beta,
        )
        loss.backward()
        s.optimizer.step()
    return loss.item(), metrics, s.model.embed.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
