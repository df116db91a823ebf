"""TRL ORPOTrainer, odds_ratio_loss - the model has learnt a one-token answer by heart.

The mean log-prob of the chosen answer "Yes" is exactly 0 in float32, so the log of 1 - p is -inf. The log odds is +inf and logsigmoid makes a good 0 of it, the loss stays finite,
but its backward is 0 / 0 in log1p. (Source: huggingface/trl issue 1473, ORPOTrainer.odds_ratio_loss, get_batch_logps with average_log_prob.) Heals: policy_chosen_logps.clamp(max=-1e-6)
before exp (also on the rejected ones); leaving pairs out whose answer is certain. Does not: log1mexp alone instead of log1p(-exp(x)) (still -inf at 0; with x kept below 0 it does); nan_to_num of log_odds; float64;
clamping log_odds to [-50, 50].
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("log_zero", "outside_domain"),
    op=("log1p",),
    index=(1,),
    masked=None,
    role=("loss", "log_probs", "log_ratio"),
    fix=(
        "clamp_input",
        "stable_function",
        "representable_eps",
        "drop_invalid_sample",
        "mask_before_op",
        "where_on_detached",
        "clamp_exponent",
    ),
    variable=(None,),
    line=("torch.log1p(-torch.exp(policy_chosen_logps)) - torch.log1p(-torch.exp(policy_rejected_logps))",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab=29, dim=32):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed_tokens(input_ids))[0])


def get_batch_logps(logits, labels, average_log_prob=False, label_pad_token_id=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != label_pad_token_id
    labels = torch.where(labels == label_pad_token_id, 0, labels)
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    if average_log_prob:
        return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token_logps * loss_mask).sum(-1)


def odds_ratio_loss(policy_chosen_logps, policy_rejected_logps, beta):
    log_odds = (policy_chosen_logps - policy_rejected_logps) - (
        torch.log1p(-torch.exp(policy_chosen_logps)) - torch.log1p(-torch.exp(policy_rejected_logps))
    )
    ratio = F.logsigmoid(log_odds)
    losses = beta * ratio
    return losses, torch.mean(log_odds).detach()


def build():
    torch.manual_seed(1473)
    model = CausalLM()
    chosen = torch.randint(4, 29, (4, 8))
    rejected = torch.randint(4, 29, (4, 8))
    rejected[:, :4] = chosen[:, :4]
    chosen_labels, rejected_labels = chosen.clone(), rejected.clone()
    chosen_labels[:, :4] = -100
    rejected_labels[:, :4] = -100
    chosen[1, 4], chosen_labels[1, 4] = 2, 2
    chosen[1, 5:], chosen_labels[1, 5:] = 0, -100
    with torch.no_grad():
        h = model.rnn(model.embed_tokens(chosen[1:2]))[0][0, 3]
        model.lm_head.weight[2] = 24.0 * h / h.pow(2).sum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-6)
    batch = dict(input_ids=torch.cat([chosen, rejected]), labels=torch.cat([chosen_labels, rejected_labels]), len_chosen=4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, beta=0.1)


def run(s=None):
    s = s or build()
    b = s.batch
    all_logits = s.model(b["input_ids"])
    all_logps = get_batch_logps(all_logits, b["labels"], average_log_prob=True)
    n = b["len_chosen"]
    policy_nll_loss = F.cross_entropy(
        all_logits[:n, :-1].reshape(-1, all_logits.size(-1)), b["labels"][:n, 1:].reshape(-1), ignore_index=-100
    )
    losses, s.log_odds_chosen = odds_ratio_loss(all_logps[:n], all_logps[n:], s.beta)
    loss = policy_nll_loss - losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
