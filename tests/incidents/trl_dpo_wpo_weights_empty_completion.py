"""TRL DPOTrainer with use_weighting (WPO): the weight of a pair is exp of the mean adjusted log-prob of both answers, made under no_grad. A
rejected answer that truncation left without a token gives 0 / 0 there, its summed log-prob is a harmless 0, and the NaN weight takes the loss.

https://github.com/huggingface/trl/pull/2209 (trl/trainer/dpo_trainer.py, concatenated_forward, `all_weights = ... / loss_mask.sum(-1)`).
Heals: clamp the count at 1 (as later versions do), or drop the pair. Tempting and useless: the clamp of the weight at 1 that is already
there (NaN passes it), multiplying the weight by "the row has tokens".
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(3,),
    masked=None,
    role=("log_probs", "is_weight"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "representable_eps"),
    variable=("all_weights",),
    line=("all_weights = (per_token_logps_adjusted * loss_mask).sum(-1) / loss_mask.sum(-1)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.relu(self.block(hidden)))


def concatenated_forward(model, input_ids, loss_mask, use_weighting=True):
    num_examples = input_ids.shape[0] // 2
    logits = model(input_ids)
    labels = torch.roll(input_ids, shifts=-1, dims=1)
    loss_mask = torch.roll(loss_mask, shifts=-1, dims=1).bool()
    per_token_logps = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    per_token_logps = per_token_logps.masked_fill(~loss_mask, 0.0)
    all_logps = per_token_logps.sum(-1)

    output = {"chosen_logps": all_logps[:num_examples], "rejected_logps": all_logps[num_examples:]}
    if use_weighting:
        with torch.no_grad():
            logprobs = F.log_softmax(logits, dim=-1)
            weights_adjustment_factor = torch.logsumexp(2 * logprobs, dim=-1)  # log of the sum of squared probs
            per_token_logps_adjusted = per_token_logps - weights_adjustment_factor
            all_weights = (per_token_logps_adjusted * loss_mask).sum(-1) / loss_mask.sum(-1)
            chosen_weights = all_weights[:num_examples]
            rejected_weights = all_weights[num_examples:]
            output["policy_weights"] = torch.clamp(torch.exp(chosen_weights + rejected_weights), max=1)
    return output


def truncate(mask, max_length):
    mask = mask.clone()
    mask[:, max_length:] = 0
    return mask


def build():
    torch.manual_seed(2209)
    model, ref_model = Policy(), Policy()
    ref_model.load_state_dict(model.state_dict())
    input_ids = torch.randint(0, 24, (4, 10))  # chosen 0, chosen 1, rejected 0, rejected 1
    loss_mask = torch.zeros(4, 10)
    loss_mask[0, 3:9] = 1
    loss_mask[1, 5:9] = 1
    loss_mask[2, 3:8] = 1
    loss_mask[3, 8:9] = 1  # image tokens make this prompt long: the answer begins where the cut is
    loss_mask = truncate(loss_mask, max_length=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, ref_model=ref_model, optimizer=optimizer, input_ids=input_ids, loss_mask=loss_mask, beta=0.1)


def run(s=None):
    s = s or build()
    output = concatenated_forward(s.model, s.input_ids, s.loss_mask)
    with torch.no_grad():
        ref = concatenated_forward(s.ref_model, s.input_ids, s.loss_mask, use_weighting=False)
    logratios = output["chosen_logps"] - output["rejected_logps"]
    ref_logratios = ref["chosen_logps"] - ref["rejected_logps"]
    losses = -F.logsigmoid(s.beta * (logratios - ref_logratios))
    losses = losses * output["policy_weights"]
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
