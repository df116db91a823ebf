"""oxRL, chi-PO (https://github.com/warlockee/oxRL/blob/main/oxrl/algs/chipo.py, chi_link; tests/test_chipo.py has test_chi_link_clamping), the DPO
loss with the link z + log z of https://arxiv.org/abs/2407.13399, algorithm 1.

The link of a summed log ratio is exp(r) + r, and the margin is clipped to +-2R before the log-sigmoid. A chosen answer of 96 tokens that the
policy likes about one nat more per token than the reference has r near 90: exp(r) is inf, the clip throws it away and the loss is finite, and
backward multiplies the clip's 0 by inf: NaN in every weight. Bounding r inside the link, as the repository does and this script does not, heals it.
A tighter clip of the margin, nan_to_num of the loss or gradient clipping does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "seq_ratio_overflow"),
    op=("exp",),
    index=(1,),
    masked=None,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "clamp_input", "drop_invalid_sample", "mask_before_op", "stable_function", "where_on_detached"),
    variable=(None,),
    line=("return torch.exp(logratios) + logratios",),
)


class LM(nn.Module):
    def __init__(self, vocab=16, hidden=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.up = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, input_ids):
        return self.lm_head(torch.tanh(self.up(self.embed_tokens(input_ids))))


def get_batch_logps(model, input_ids, labels):
    loss_mask = labels[:, 1:] != -100
    index = labels[:, 1:].masked_fill(~loss_mask, 0)
    per_token_logps = model(input_ids)[:, :-1].log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return (per_token_logps * loss_mask).sum(-1)


def link(logratios):
    return torch.exp(logratios) + logratios


def chipo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1, reward_range=4.0):
    chosen = link(policy_chosen - ref_chosen)
    rejected = link(policy_rejected - ref_rejected)
    logits = torch.clamp(beta * (chosen - rejected), -2 * reward_range, 2 * reward_range)
    return -F.logsigmoid(logits).mean()


def build():
    torch.manual_seed(505)
    policy, reference = LM(), LM()
    reference.load_state_dict(policy.state_dict())
    length = 100
    chosen = torch.randint(0, 14, (3, length))
    rejected = torch.randint(0, 14, (3, length))
    chosen[1, 4:] = 15
    chosen_labels, rejected_labels = chosen.clone(), rejected.clone()
    for labels in (chosen_labels, rejected_labels):
        labels[:, :4] = -100
        labels[0, 20:] = -100
        labels[2, 30:] = -100
    with torch.no_grad():
        policy.lm_head.bias[15] += 1.1
        ref_chosen = get_batch_logps(reference, chosen, chosen_labels)
        ref_rejected = get_batch_logps(reference, rejected, rejected_labels)
    return SimpleNamespace(
        model=policy,
        chosen=chosen,
        rejected=rejected,
        chosen_labels=chosen_labels,
        rejected_labels=rejected_labels,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=5e-7),
    )


def run(s=None):
    s = s or build()
    policy_chosen = get_batch_logps(s.model, s.chosen, s.chosen_labels)
    policy_rejected = get_batch_logps(s.model, s.rejected, s.rejected_labels)
    loss = chipo_loss(policy_chosen, policy_rejected, s.ref_chosen, s.ref_rejected)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
