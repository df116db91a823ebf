"""In bfloat16 exp of a small average log-prob rounds to 1 and log1p(-1) is -inf; the clamp saves the loss, not the gradient."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("log_zero", "where_grad_trap"),
    op=("log1p",),
    index=(2,),
    masked=True,
    role=("log_probs", "loss"),
    fix=("stable_function", "upcast_fp32", "clamp_input"),
    variable=(None,),
    line=("chosen_log_1mp = torch.log1p(-torch.exp(policy_chosen_logps)).clamp(min=-30.0)",),
)


class BigramLM(nn.Module):
    def __init__(self, vocab=14, dim=14):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.wte(input_ids))


def get_batch_logps(logits, labels, label_pad_token_id=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    loss_mask = labels != label_pad_token_id
    labels[~loss_mask] = 0
    per_token_logps = torch.gather(logits.float().log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return ((per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)).to(logits.dtype)


def odds_ratio_loss(policy_chosen_logps, policy_rejected_logps, beta):
    chosen_log_1mp = torch.log1p(-torch.exp(policy_chosen_logps)).clamp(min=-30.0)
    rejected_log_1mp = torch.log1p(-torch.exp(policy_rejected_logps)).clamp(min=-30.0)
    log_odds = (policy_chosen_logps - policy_rejected_logps) - (chosen_log_1mp - rejected_log_1mp)
    return -beta * F.logsigmoid(log_odds)


def build():
    torch.manual_seed(106)
    model = BigramLM()
    chosen = torch.randint(6, 14, (4, 7))
    rejected = torch.randint(6, 14, (4, 7))
    chosen[2] = torch.tensor([0, 1, 2, 3, 4, 5, 5])
    with torch.no_grad():
        model.wte.weight.copy_(torch.eye(14) + 0.01 * torch.randn(14, 14))
        for prev, nxt in zip(chosen[2, :-1].tolist(), chosen[2, 1:].tolist()):
            model.lm_head.weight[nxt, prev] += 10.0
    chosen_labels, rejected_labels = chosen.clone(), rejected.clone()
    chosen_labels[:, :2] = -100
    rejected_labels[:, :2] = -100
    batch = {"chosen": chosen, "rejected": rejected, "chosen_labels": chosen_labels, "rejected_labels": rejected_labels}
    model = model.to(torch.bfloat16)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(torch.cat([b["chosen"], b["rejected"]]))
    all_logps = get_batch_logps(logits, torch.cat([b["chosen_labels"], b["rejected_labels"]]))
    chosen_logps, rejected_logps = all_logps.chunk(2)
    loss = -chosen_logps.mean() + odds_ratio_loss(chosen_logps, rejected_logps, beta=0.1).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
