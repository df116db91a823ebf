"""lsdefine/simple_GRPO, GRPO_step - one of eight answers consists of pad tokens only.

The completion mask is made of the ids (inputs != pad_token_id). A base model whose first sampled token is the pad token gives a row without a single counted token, and the
mean over the row divides 0 by 0. (Source: lsdefine/simple_GRPO, grpo_vllm_one.py, GRPO_step.) Heals: completion_mask.sum(dim=1).clamp(min=1); dropping rows without tokens before
the mean; one mean over all tokens of the batch. Does not: nan_to_num of the rows' means (the loss is fine, the gradient stays NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div", "truediv", "/"),
    index=(2,),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "representable_eps", "mask_before_op", "fix_upstream", "reject_input"),
    variable=(None,),
    line=("loss = ((per_token_loss * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)).mean()",),
)

beta = 0.04
clip_param = 0.2
tokenizer = SimpleNamespace(pad_token_id=0)


class Policy(nn.Module):
    def __init__(self, vocab=23, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, inputs):
        x = self.wte(inputs)
        x = x.cumsum(1) / torch.arange(1, x.size(1) + 1).view(1, -1, 1)
        return SimpleNamespace(logits=self.head(torch.tanh(self.mix(x))))


def get_per_token_logps(logits, input_ids):
    per_token_logps = []
    for logits_row, input_ids_row in zip(logits, input_ids):
        log_probs = logits_row.log_softmax(dim=-1)
        token_log_prob = torch.gather(log_probs, dim=1, index=input_ids_row.unsqueeze(1)).squeeze(1)
        per_token_logps.append(token_log_prob)
    return torch.stack(per_token_logps)


def build():
    torch.manual_seed(8)
    engine = Policy()
    ref = Policy()
    ref.load_state_dict(engine.state_dict())
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-6)
    plen = 5
    prompt = torch.randint(1, 23, (1, plen)).repeat(8, 1)
    answers = torch.randint(1, 23, (8, 7))
    for row, n in enumerate([7, 4, 0, 6, 7, 3, 5, 7]):
        answers[row, n:] = tokenizer.pad_token_id
    inputs = torch.cat([prompt, answers], dim=1)
    rewards = torch.tensor([2.25, -2.0, -2.0, 0.25, 2.25, -2.0, 0.25, 2.25])
    rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    with torch.no_grad():
        logps = get_per_token_logps(ref(inputs).logits[:, :-1, :], inputs[:, 1:])[:, plen - 1 :]
    batch = dict(plen=plen, inputs=inputs, rewards=rewards, refs=logps, gen_logps=logps + 0.02 * torch.randn_like(logps))
    return SimpleNamespace(model=engine, optimizer=optimizer, batch=batch)


def GRPO_step(engine, batch):
    prompt_length = batch["plen"]
    inputs = batch["inputs"]
    advantages = batch["rewards"].unsqueeze(1)
    logits = engine(inputs).logits
    logits = logits[:, :-1, :]
    input_ids = inputs[:, 1:]
    per_token_logps = get_per_token_logps(logits, input_ids)
    per_token_logps = per_token_logps[:, prompt_length - 1 :]
    ref_per_token_logps = batch["refs"]
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    completion_mask = (inputs[:, prompt_length:] != tokenizer.pad_token_id).int()
    ratio = torch.exp(per_token_logps - batch["gen_logps"])
    clipped_ratio = torch.clamp(ratio, 1 - clip_param, 1 + clip_param)
    per_token_loss = torch.min(ratio * advantages, clipped_ratio * advantages)
    per_token_loss = -(per_token_loss - beta * per_token_kl)
    loss = ((per_token_loss * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)).mean()
    return loss


def run(s=None):
    s = s or build()
    loss = GRPO_step(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
