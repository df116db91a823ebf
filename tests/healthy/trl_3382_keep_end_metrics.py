"""DPO with truncation_mode="keep_end" on short answers: NaN in the logged metrics, healthy training.

Right padding fills the kept window of the chosen answers, their loss mask is empty, and the logged mean of the selected logits is
the mean of nothing: NaN. The loss sums log-probs over the mask (0 for these rows), the rejected side still teaches.
Source: https://github.com/huggingface/trl/issues/3382
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.wte(ids))[0])


def concatenated_forward(model, batch, max_length=8):
    input_ids = batch["input_ids"][:, -max_length:]
    loss_mask = batch["loss_mask"][:, -max_length:].bool()
    num_examples = input_ids.size(0) // 2
    logits = model(input_ids)
    labels = torch.roll(input_ids, shifts=-1, dims=1)
    loss_mask = torch.roll(loss_mask, shifts=-1, dims=1)
    labels[~loss_mask] = 0
    per_token_logps = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    per_token_logps[~loss_mask] = 0
    all_logps = per_token_logps[:, :-1].sum(-1)
    metrics = dict(
        mean_chosen_logits=logits[:num_examples][loss_mask[:num_examples]].mean(),
        mean_rejected_logits=logits[num_examples:][loss_mask[num_examples:]].mean(),
    )
    return all_logps[:num_examples], all_logps[num_examples:], metrics


def build():
    torch.manual_seed(8)
    model = CausalLM()
    input_ids = torch.randint(1, 30, (4, 16))
    loss_mask = torch.zeros(4, 16)
    loss_mask[:2, 4:7] = 1  # short chosen answers, then padding
    input_ids[:2, 7:] = 0
    loss_mask[2:, 4:] = 1
    batch = dict(input_ids=input_ids, loss_mask=loss_mask)
    with torch.no_grad():
        batch["ref_chosen"], batch["ref_rejected"], _ = concatenated_forward(model, batch)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None, beta=0.1):
    s = s or build()
    logged = []
    for _ in range(3):
        chosen_logps, rejected_logps, metrics = concatenated_forward(s.model, s.batch)
        logits = (chosen_logps - s.batch["ref_chosen"]) - (rejected_logps - s.batch["ref_rejected"])
        loss = -F.logsigmoid(beta * logits).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        logged.append({k: v.item() for k, v in metrics.items()} | {"loss": loss.item()})
    return logged[-1], all(p.isfinite().all().item() for p in s.model.parameters())


if __name__ == "__main__":
    print(run())
