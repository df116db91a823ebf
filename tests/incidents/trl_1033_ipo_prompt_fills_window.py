"""IPO, which averages log-probs over the answer, on a prompt that fills max_length by itself.

Truncation at max_length leaves no answer token of one example. Its loss mask is all zero: the sigmoid loss (a sum) never
noticed, but IPO divides by the count and gets 0 / 0.
Source: https://github.com/huggingface/trl/issues/1033
Heals: a count of at least 1, dropping such examples, a max_prompt_length below max_length.
Does not: another beta (the first advice of the thread); zeroing the masked log-probs.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(2,),
    masked=None,
    role=("log_probs",),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample", "fix_upstream", "validate_config"),
    variable=("all_logps", "policy_chosen_logps"),
    line=("all_logps = all_logps / loss_mask.sum(-1)",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab=36, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.wte(ids))[0])


def collate(examples, max_length):
    rows = [(p + a)[:max_length] for p, a in examples]
    width = max(map(len, rows))
    input_ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, ((p, _), r) in enumerate(zip(examples, rows, strict=True)):
        loss_mask[i, len(p) : len(r)] = True
    return input_ids, loss_mask


def sequence_logps(model, inputs, loss_type):
    input_ids, loss_mask = inputs
    logits, labels, loss_mask = model(input_ids)[:, :-1], input_ids[:, 1:], loss_mask[:, 1:]
    per_token_logps = torch.log_softmax(logits, -1).gather(2, labels.unsqueeze(2)).squeeze(2)
    all_logps = (per_token_logps * loss_mask).sum(-1)
    if loss_type == "ipo":
        all_logps = all_logps / loss_mask.sum(-1)
    return all_logps


def build(max_length=14):
    g = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(1, 36, (n,), generator=g).tolist()
    prompts = [draw(5), draw(8), draw(15), draw(3)]
    chosen = collate([(p, draw(6)) for p in prompts], max_length)
    rejected = collate([(p, draw(4)) for p in prompts], max_length)
    torch.manual_seed(2)
    model, ref_model = CausalLM(), CausalLM().requires_grad_(False)
    ref_model.load_state_dict(model.state_dict())
    return SimpleNamespace(
        model=model,
        ref_model=ref_model,
        batch=dict(chosen=chosen, rejected=rejected),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None, beta=0.1, loss_type="ipo"):
    s = s or build()
    policy_chosen_logps = sequence_logps(s.model, s.batch["chosen"], loss_type)
    policy_rejected_logps = sequence_logps(s.model, s.batch["rejected"], loss_type)
    with torch.no_grad():
        reference_chosen_logps = sequence_logps(s.ref_model, s.batch["chosen"], loss_type)
        reference_rejected_logps = sequence_logps(s.ref_model, s.batch["rejected"], loss_type)
    logits = (policy_chosen_logps - policy_rejected_logps) - (reference_chosen_logps - reference_rejected_logps)
    losses = (logits - 1 / (2 * beta)) ** 2
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item(), s.model.lm_head.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
