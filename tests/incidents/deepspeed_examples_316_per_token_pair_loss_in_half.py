"""DeepSpeed-Chat, reward model in half with the loss on every token behind the divergence.

The pair loss is -log(sigmoid(c - r)) over all tokens of the truncated slices; with the value head in half one token has a difference below -17.3, sigmoid rounds to 0 and its
log is -inf. (Source: deepspeedai/DeepSpeedExamples, issue 316, training/utils/model/reward_model.py.)
Heals: F.logsigmoid; the difference in float32; a floor on the sigmoid that half can hold (clamp at 6e-8) or on the difference (-15); an epsilon of 2e-5.
Does not: an epsilon of 1e-8 (rounds to 0 in half) or of 1e-7 (its reciprocal leaves half in the backward).
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
    role=("loss", "rewards", "log_probs"),
    fix=("stable_function", "upcast_fp32", "clamp_input", "representable_eps"),
    variable=(None,),
    line=("loss += -torch.log(torch.sigmoid(c_truncated_reward - r_truncated_reward)).mean()",),
)

PAD = 0


class RewardModel(nn.Module):
    def __init__(self, vocab=40, n_embd=32, num_padding_at_beginning=0):
        super().__init__()
        self.num_padding_at_beginning = num_padding_at_beginning
        self.rwtranrsformer = nn.Embedding(vocab, n_embd)
        self.ln_f = nn.LayerNorm(n_embd)
        self.v_head = nn.Linear(n_embd, 1, bias=False)
        self.PAD_ID = PAD

    def forward(self, input_ids):
        loss = 0.0
        rewards = self.v_head(self.ln_f(self.rwtranrsformer(input_ids))).squeeze(-1)
        bs = input_ids.shape[0] // 2
        seq_len = input_ids.shape[1]
        chosen_ids = input_ids[:bs]
        rejected_ids = input_ids[bs:]
        chosen_rewards = rewards[:bs]
        rejected_rewards = rewards[bs:]

        for i in range(bs):
            chosen_id = chosen_ids[i]
            rejected_id = rejected_ids[i]
            chosen_reward = chosen_rewards[i]
            rejected_reward = rejected_rewards[i]

            c_inds = (chosen_id == self.PAD_ID).nonzero()
            c_ind = c_inds[self.num_padding_at_beginning].item() if len(c_inds) > self.num_padding_at_beginning else seq_len
            check_divergence = (chosen_id != rejected_id).nonzero()
            if len(check_divergence) == 0:
                end_ind = rejected_reward.size(-1)
                divergence_ind = end_ind - 1
            else:
                r_inds = (rejected_id == self.PAD_ID).nonzero()
                r_ind = r_inds[self.num_padding_at_beginning].item() if len(r_inds) > self.num_padding_at_beginning else seq_len
                end_ind = max(c_ind, r_ind)
                divergence_ind = check_divergence[0]

            c_truncated_reward = chosen_reward[divergence_ind:end_ind]
            r_truncated_reward = rejected_reward[divergence_ind:end_ind]
            loss += -torch.log(torch.sigmoid(c_truncated_reward - r_truncated_reward)).mean()

        return loss / bs


def build():
    torch.manual_seed(4)
    model = RewardModel()
    with torch.no_grad():
        model.v_head.weight.mul_(9)
        values = model.v_head(model.ln_f(model.rwtranrsformer.weight)).squeeze(-1)
        values[PAD] = 0
    order = values[1:].argsort() + 1
    middle = order[10:30]
    ids = middle[torch.randint(0, len(middle), (4, 9))]
    ids[2:, :3] = ids[:2, :3]
    ids[1, 3], ids[3, 3] = middle[0], middle[1]
    ids[0, 3], ids[2, 3] = middle[2], middle[3]
    ids[1, 5], ids[3, 5] = order[0], order[-1]
    ids[0, 8] = PAD
    ids[2, 7:] = PAD
    model = model.half()
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), input_ids=ids)


def run(s=None):
    s = s or build()
    loss = s.model(s.input_ids)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
