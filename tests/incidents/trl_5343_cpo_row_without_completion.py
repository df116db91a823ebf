"""CPO / SimPO on length-averaged log-probabilities; the rejected answer of one pair has no token left after truncation.

The prompt of pair 2 fills max_length, so its rejected row has only -100 labels: loss_mask.sum(-1) is 0 there, the numerator is 0 as well and the
average log-probability of the row is 0/0 = NaN.  It enters the preference loss of that pair and the mean of the batch.

Source: https://github.com/huggingface/trl/pull/5343 ("Fix CPOTrainer get_batch_logps division-by-zero on all-masked rows").
Heals: a denominator of at least 1, or dropping the pair.  Does not: masking the tokens (they are masked), replacing -100 by 0 for gather.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(6,),
    masked=None,
    role=("log_probs",),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample", "reject_input", "where_on_detached", "fix_upstream"),
    variable=(None, "all_logps"),
    line=("return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)",),
)

LABEL_PAD = -100


class TinyLM(nn.Module):
    def __init__(self, vocab=48, dim=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h, _ = self.mix(self.embed(ids))
        return self.head(self.norm(h))


def get_batch_logps(logits, labels, average_log_prob=True):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    loss_mask = labels != LABEL_PAD
    labels[labels == LABEL_PAD] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    if average_log_prob:
        return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token_logps * loss_mask).sum(-1)


def tokenize_pairs(n_pairs, max_length, generator):
    """Rows 0..n-1 chosen, n..2n-1 rejected; the prompt is kept from its start, the answer gets what is left of max_length."""
    ids = torch.randint(1, 48, (2 * n_pairs, max_length), generator=generator)
    labels = ids.clone()
    prompt = [5, 7, 11, 4]
    answer = {0: [6, 5, 1, 8], 1: [5, 3, 0, 7]}
    for side in (0, 1):
        for i in range(n_pairs):
            row, start = side * n_pairs + i, prompt[i]
            labels[row, :start] = LABEL_PAD
            labels[row, start + answer[side][i] :] = LABEL_PAD
    return ids, labels


def build():
    torch.manual_seed(53)
    model = TinyLM()
    ids, labels = tokenize_pairs(4, 12, torch.Generator().manual_seed(1))
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-4),
        beta=2.0,
        gamma=0.5,
        cpo_alpha=0.1,
        batch={"ids": ids, "labels": labels},
    )


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        logits = s.model(s.batch["ids"])
        all_logps = get_batch_logps(logits, s.batch["labels"])
        chosen_logps, rejected_logps = all_logps.chunk(2)
        margin = chosen_logps - rejected_logps - s.gamma / s.beta
        losses = -F.logsigmoid(s.beta * margin)
        nll = F.cross_entropy(
            logits[: len(logits) // 2, :-1].flatten(0, 1), s.batch["labels"][: len(logits) // 2, 1:].flatten(), ignore_index=LABEL_PAD
        )
        loss = losses.mean() + s.cpo_alpha * nll
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
