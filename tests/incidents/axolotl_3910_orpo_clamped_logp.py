"""axolotl #3910: the ORPO trainer clamps what it calls a probability at 0.999, but the value is a mean log-probability, so nothing is clamped.

Source: https://github.com/axolotl-ai-cloud/axolotl/pull/3910 (src/axolotl/core/trainers/base.py, orpo_compute_loss). A one-token chosen answer
is certain: its mean log-prob is 0.0, log1p(-exp(0)) = log1p(-1) = -inf and the log odds are +inf. logsigmoid(+inf) is 0, the loss is finite,
and the backward computes 0 * inf.
Heals: clamping the log-prob below 0 (max=-1e-4), dropping the saturated pair. Tempting and useless: clamp(max=0.999), log1p, log(-expm1(x)):
all still take the log of an exact 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("log_zero", "where_grad_trap"),
    op=("log1p",),
    index=(1,),
    masked=None,
    role=("log_probs", "log_ratio", "logits"),
    fix=("clamp_input", "clamp_exponent", "drop_invalid_sample", "avoid_singular_op"),
    variable=("pos_log_complement", None),
    line=("pos_log_complement = torch.log1p(-torch.exp(pos_prob_clamped))",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab=16, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.embed(input_ids))


def orpo_compute_logps(prompt_attention_mask, inputs, attention_mask, logits):
    # the mean over the answer's own tokens
    mask = attention_mask[:, 1:] - prompt_attention_mask[:, 1:]
    per_token_logps = torch.gather(logits[:, :-1, :].log_softmax(-1), dim=2, index=inputs[:, 1:].unsqueeze(2)).squeeze(2)
    return torch.mul(per_token_logps, mask).sum(dim=1) / mask.sum(dim=1)


def orpo_compute_loss(model, batch, orpo_alpha):
    pos_logits = model(batch["input_ids"])
    neg_logits = model(batch["rejected_input_ids"])
    pos_prob = orpo_compute_logps(batch["prompt_attention_mask"], batch["input_ids"], batch["attention_mask"], pos_logits)
    neg_prob = orpo_compute_logps(batch["prompt_attention_mask"], batch["rejected_input_ids"], batch["rejected_attention_mask"], neg_logits)

    # keep exp(x) below 1
    pos_prob_clamped = torch.clamp(pos_prob, max=0.999)
    neg_prob_clamped = torch.clamp(neg_prob, max=0.999)
    pos_log_complement = torch.log1p(-torch.exp(pos_prob_clamped))
    neg_log_complement = torch.log1p(-torch.exp(neg_prob_clamped))
    log_odds = (pos_prob - neg_prob) - (pos_log_complement - neg_log_complement)
    ratio = F.logsigmoid(log_odds)

    labels = batch["labels"][:, 1:]
    nll = F.cross_entropy(pos_logits[:, :-1].transpose(1, 2), labels, ignore_index=-100)
    return nll - orpo_alpha * ratio.mean()


def build():
    torch.manual_seed(3910)
    model = CausalLM()
    with torch.no_grad():
        model.lm_head.weight[5] = 40.0 * F.normalize(model.embed.weight[3], dim=0)  # after "?" the answer is "yes", always
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-6)
    input_ids = torch.tensor([[1, 7, 3, 9, 4, 2], [1, 8, 3, 5, 0, 0], [1, 6, 3, 10, 11, 2]])
    rejected = torch.tensor([[1, 7, 3, 12, 13, 2], [1, 8, 3, 14, 9, 2], [1, 6, 3, 4, 2, 0]])
    prompt_mask = torch.tensor([[1, 1, 1, 0, 0, 0]]).expand(3, 6)
    attention_mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0], [1] * 6])
    labels = input_ids.masked_fill((prompt_mask == 1) | (attention_mask == 0), -100)
    batch = dict(
        input_ids=input_ids,
        rejected_input_ids=rejected,
        prompt_attention_mask=prompt_mask,
        labels=labels,
        attention_mask=attention_mask,
        rejected_attention_mask=torch.tensor([[1] * 6, [1] * 6, [1, 1, 1, 1, 1, 0]]),
    )
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, orpo_alpha=0.1)


def run(s=None):
    s = s or build()
    loss = orpo_compute_loss(s.model, s.batch, s.orpo_alpha)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
