"""open-instruct #1182 - DPO reads the reference log-probs from a cache on disk, a tensor filled with -inf before the reference pass. The pass
ran with drop_last, so the last example was never written; in training its chosen and rejected entries give -inf - -inf = NaN.

https://github.com/allenai/open-instruct/pull/1182 and /pull/1374 (open_instruct/dpo_utils.py, build_reference_logprobs_cache, TensorCache; upstream
raises when an entry is still -inf, here that check is missing).
Heals: check the cache for entries that were never written and refuse it or drop those examples, or build it without drop_last.
Tempting and useless: nan_to_num or a where on the finished losses (0 times the derivative at NaN is NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "input"),
    cause=("inf_minus_inf", "bad_input"),
    op=("sub", "any", "index"),
    index=(6,),
    masked=False,
    role=("ref_log_probs", "log_ratio"),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream", "mask_before_op"),
    variable=("ref_logratios", "ref_chosen_logps", "ref_rejected_logps", "chosen_logps", "rejected_logps"),
    line=(
        "ref_logratios = ref_chosen_logps - ref_rejected_logps",
        'ref_chosen_logps = s.reference_cache["chosen_logps"][dataset_index]',
        'ref_rejected_logps = s.reference_cache["rejected_logps"][dataset_index]',
    ),
)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.block(hidden)))


def get_batch_logps(model, input_ids):
    logits = model(input_ids[:, :-1])
    per_token = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return per_token.sum(-1)


def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@torch.no_grad()
def build_reference_logprobs_cache(model, dataset, batch_size):
    cache = {
        "chosen_logps": torch.full((len(dataset),), float("-inf")),
        "rejected_logps": torch.full((len(dataset),), float("-inf")),
    }
    for batch in DataLoader(dataset, batch_size=batch_size, collate_fn=collate, drop_last=True):
        cache["chosen_logps"][batch["dataset_index"]] = get_batch_logps(model, batch["chosen"])
        cache["rejected_logps"][batch["dataset_index"]] = get_batch_logps(model, batch["rejected"])
    return cache


def build():
    torch.manual_seed(1182)
    model = Policy()
    dataset = [
        {"dataset_index": torch.tensor(i), "chosen": torch.randint(0, 24, (8,)), "rejected": torch.randint(0, 24, (8,))} for i in range(7)
    ]
    reference_cache = build_reference_logprobs_cache(model, dataset, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, dataset=dataset, reference_cache=reference_cache, beta=0.1)


def run(s=None):
    s = s or build()
    for batch in DataLoader(s.dataset, batch_size=7, collate_fn=collate):
        dataset_index = batch["dataset_index"]
        ref_chosen_logps = s.reference_cache["chosen_logps"][dataset_index]
        ref_rejected_logps = s.reference_cache["rejected_logps"][dataset_index]
        pi_logratios = get_batch_logps(s.model, batch["chosen"]) - get_batch_logps(s.model, batch["rejected"])
        ref_logratios = ref_chosen_logps - ref_rejected_logps
        losses = -F.logsigmoid(s.beta * (pi_logratios - ref_logratios))
        loss = losses.mean()
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
