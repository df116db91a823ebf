"""DeepSpeedExamples #571 - step 2 of DeepSpeed-Chat (reward model) with a tokenizer that pads on the left: the first pad token is taken for
the end of the answer, so `end_ind` lies before `divergence_ind`, the slice of rewards is empty and the mean of nothing is NaN.

https://github.com/deepspeedai/DeepSpeedExamples/issues/571 (also #356), applications/DeepSpeed-Chat/training/utils/model/reward_model.py.
Heals: take the end from the attention mask (`end_ind = seq_len` for left padding), or leave out a pair whose slice is empty. Tempting and
useless: computing the pair loss in fp32, or logsigmoid instead of log(sigmoid). The reported loss is NaN; the other pair's gradient is intact.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("mean",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty", "fix_upstream", "drop_invalid_sample", "clamp_denominator"),
    variable=(None, "pair_loss"),
    line=("pair_loss = -F.logsigmoid(c_truncated_reward - r_truncated_reward).mean()",),
)


class RewardModel(nn.Module):
    def __init__(self, vocab=40, dim=16, pad_id=3, num_padding_at_beginning=0):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rwtransformer = nn.GRU(dim, dim, batch_first=True)
        self.v_head = nn.Linear(dim, 1, bias=False)
        self.PAD_ID = pad_id
        self.num_padding_at_beginning = num_padding_at_beginning

    def find_end(self, ids):
        inds = (ids == self.PAD_ID).nonzero()
        return inds[self.num_padding_at_beginning].item() if len(inds) > self.num_padding_at_beginning else ids.shape[0]

    def forward(self, input_ids):
        hidden_states, _ = self.rwtransformer(self.embed(input_ids))
        rewards = self.v_head(hidden_states).squeeze(-1)

        # half of the batch are the chosen answers, the other half the rejected ones
        bs = input_ids.shape[0] // 2
        chosen_ids, rejected_ids = input_ids[:bs], input_ids[bs:]
        chosen_rewards, rejected_rewards = rewards[:bs], rewards[bs:]

        loss = 0
        chosen_scores, rejected_scores = [], []
        for chosen_id, rejected_id, chosen_reward, rejected_reward in zip(chosen_ids, rejected_ids, chosen_rewards, rejected_rewards):
            c_ind, r_ind = self.find_end(chosen_id), self.find_end(rejected_id)
            check_divergence = (chosen_id != rejected_id).nonzero()
            if len(check_divergence) == 0:
                end_ind = rejected_reward.size(-1)
                divergence_ind = end_ind - 1
            else:
                end_ind = max(c_ind, r_ind)
                divergence_ind = check_divergence[0].item()
            assert divergence_ind > 0
            c_truncated_reward = chosen_reward[divergence_ind:end_ind]
            r_truncated_reward = rejected_reward[divergence_ind:end_ind]
            chosen_scores.append(chosen_reward[c_ind - 1].detach())
            rejected_scores.append(rejected_reward[r_ind - 1].detach())
            pair_loss = -F.logsigmoid(c_truncated_reward - r_truncated_reward).mean()
            loss = loss + pair_loss

        return {"loss": loss / bs, "chosen": torch.stack(chosen_scores), "rejected": torch.stack(rejected_scores)}


def build():
    torch.manual_seed(571)
    model = RewardModel()
    prompt, short_prompt = torch.randint(4, 40, (6,)), torch.randint(4, 40, (3,))
    chosen_answers, rejected_answers = torch.randint(4, 22, (2, 6)), torch.randint(22, 40, (2, 6))
    pads = torch.full((3,), model.PAD_ID)

    def row(prefix, answer):
        return torch.cat([prefix, answer])

    left_padded = torch.cat([pads, short_prompt])  # BLOOM's tokenizer pads on the left
    input_ids = torch.stack(
        [
            row(prompt, chosen_answers[0]),
            row(left_padded, chosen_answers[1]),
            row(prompt, rejected_answers[0]),
            row(left_padded, rejected_answers[1]),
        ]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids)


def run(s=None):
    s = s or build()
    outputs = s.model(s.input_ids)
    loss = outputs["loss"]
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
