"""prime-rl's `seq_mis`: a rollout is accepted by its geometric mean ratio, and then weighted with the product of the ratios.

Masked sequence-level importance sampling keeps a rollout if exp(mean log ratio) lies in [0.9, 1.1]; the geometric mean was chosen because it does not depend on
the length. The weight itself is the full product exp(sum log ratio), which does. An agentic rollout of 1500 tokens whose trainer log-probs are 0.063 nats above those of
the inference engine (a quantised KV cache) has a geometric ratio of 1.065 and passes; the product is exp(95) = inf. The weight is detached, but loss and gradient are inf.
Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3384 (seq_mis; its sibling seq_tis takes min(w, C)).
Heals: cap the summed log ratio before exp (or a limit on the product as a second criterion, dropping the rollout).
Does not: masking by the criterion (the rollout passes), detaching (it is), clipping the norm (inf / inf), dividing the loss by the number of tokens (it is).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow",),
    op=("exp",),
    index=(1,),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_exponent", "drop_invalid_sample"),
    variable=("seq_weight",),
    line=("seq_weight = torch.exp(seq_log_ratio)",),
)


class Trainer(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        h = self.embed_tokens(input_ids)
        c = self.conv(nn.functional.pad(h.T[None], (2, 0)))[0].T
        return self.lm_head(h + torch.tanh(c))


def selective_log_softmax(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def seq_mis_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask, seq_lens, geo_low=0.9, geo_high=1.1):
    segment = torch.repeat_interleave(torch.arange(len(seq_lens)), seq_lens)
    per_sequence = lambda x: x.new_zeros(len(seq_lens)).index_add(0, segment, x)
    with torch.no_grad():
        log_importance_ratio = (trainer_logprobs - inference_logprobs) * loss_mask
        seq_log_ratio = per_sequence(log_importance_ratio)
        geo_ratio = torch.exp(seq_log_ratio / per_sequence(loss_mask).clamp_min(1))
        keep = (geo_ratio >= geo_low) & (geo_ratio <= geo_high)
        seq_weight = torch.exp(seq_log_ratio)
        coeff = torch.where(keep, seq_weight, 0.0)
    trained = loss_mask.bool()
    token_coeff = (coeff * advantages)[segment[trained]]
    loss = -(token_coeff * trainer_logprobs[trained]).sum() / loss_mask.sum().clamp_min(1)
    return loss, {"is_masked": (~keep).float().mean().item()}


def build():
    torch.manual_seed(19)
    model = Trainer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seq_lens = torch.tensor([120, 1540, 260])
    ids = torch.randint(0, 40, (int(seq_lens.sum()),))
    loss_mask = torch.ones(len(ids))
    for start in (0, 120, 1660):
        loss_mask[start : start + 30] = 0.0
    with torch.no_grad():
        inference_logprobs = selective_log_softmax(model(ids), ids.roll(-1)) + 0.02 * torch.randn(len(ids))
    inference_logprobs[120:1660] -= 0.063  # quantised KV cache, grows long
    batch = dict(
        ids=ids, seq_lens=seq_lens, loss_mask=loss_mask, inference_logprobs=inference_logprobs, advantages=torch.tensor([0.4, -0.7, 0.3])
    )
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    out = []
    for _ in range(2):
        trainer_logprobs = selective_log_softmax(s.model(b["ids"]), b["ids"].roll(-1))
        loss, metrics = seq_mis_loss(trainer_logprobs, b["inference_logprobs"], b["advantages"], b["loss_mask"], b["seq_lens"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append((loss.item(), metrics["is_masked"]))
    return out


if __name__ == "__main__":
    print(run())
