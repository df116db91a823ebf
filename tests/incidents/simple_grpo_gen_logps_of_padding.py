"""simple_GRPO, GRPO_step - a stale vLLM log-prob on a padding token of a good answer, finite loss and NaN gradients.

gen_logps are the prompt_logprobs of merged_ids, padding included, from a vLLM that got its weights several updates ago. On one padding token the
policy is 95 nats above it: exp is inf. The row has a positive advantage, so torch.min takes the clipped branch and completion_mask multiplies a finite
number by 0; backward goes 0 * inf through the exp. (Source: lsdefine/simple_GRPO, grpo_vllm_one.py, GRPO_step and gen_worker.) Heals: masking the log
ratio by completion_mask before exp; clamping it to [-20, 20]; zero / policy values in gen_logps at padding. Does not: a where on per_token_loss,
masking after min, nan_to_num of the loss, clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(2, 4),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "fix_upstream", "clamp_input", "where_on_detached", "skip_bad_step"),
    variable=("ratio",),
    line=('ratio = torch.exp(per_token_logps - batch["gen_logps"])',),
)

PAD = 0
beta, clip_param = 0.04, 0.2


class LM(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def get_per_token_logps(logits, input_ids):
    per_token_logps = []
    for logits_row, input_ids_row in zip(logits, input_ids):
        log_probs = logits_row.log_softmax(dim=-1)
        token_log_prob = torch.gather(log_probs, dim=1, index=input_ids_row.unsqueeze(1)).squeeze(1)
        per_token_logps.append(token_log_prob)
    return torch.stack(per_token_logps)


def GRPO_step(engine, batch):
    prompt_length = batch["plen"]
    inputs = batch["inputs"]
    advantages = batch["rewards"].unsqueeze(1)
    logits = engine(inputs)[:, :-1, :]
    input_ids = inputs[:, 1:]
    per_token_logps = get_per_token_logps(logits, input_ids)
    per_token_logps = per_token_logps[:, prompt_length - 1 :]
    ref_per_token_logps = batch["refs"]
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    completion_mask = (inputs[:, prompt_length:] != PAD).int()
    ratio = torch.exp(per_token_logps - batch["gen_logps"])
    clipped_ratio = torch.clamp(ratio, 1 - clip_param, 1 + clip_param)
    per_token_loss = torch.min(ratio * advantages, clipped_ratio * advantages)
    per_token_loss = -(per_token_loss - beta * per_token_kl)
    loss = ((per_token_loss * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)).mean()
    return loss


def build():
    torch.manual_seed(7)
    engine = LM()
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    inputs = torch.randint(1, 16, (4, 9))
    inputs[0, 8:] = PAD
    inputs[2, 6:] = PAD
    inputs[3, 7:] = PAD
    with torch.no_grad():
        refs = get_per_token_logps(engine(inputs)[:, :-1], inputs[:, 1:])[:, 2:]
    gen_logps = refs + 0.1 * torch.randn_like(refs)
    gen_logps[2, 3:] = torch.tensor([-61.25, -97.5, -58.0])
    rewards = torch.tensor([2.25, -2.0, 2.25, 0.25])
    rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    batch = dict(plen=3, inputs=inputs, rewards=rewards, refs=refs, gen_logps=gen_logps)
    return SimpleNamespace(model=engine, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    loss = GRPO_step(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
