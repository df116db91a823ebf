"""grpo-flat, GRPOTrainer.step - an empty answer where the padding token is the eos token.

The tokenizer has no pad token, so pad is eos, and completions_mask = completion_ids != pad. One completion of the group ended at once: all its ids are
eos, its mask sums to 0 and the mean over its tokens is 0 / 0; the mean over the group takes the NaN in. (Source: XU-YIJIE/grpo-flat, grpo_trainer.py,
step; grpo.py, pad_token = eos_token.) Heals: clamping the token count to 1; a where on an empty row's count; the mean over rows with tokens; a mask that
counts the first eos. Does not: nan_to_num of the row means (the gradient is still NaN), more epsilon in grpo_advantage, clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div", "truediv"),
    index=(3,),
    masked=None,
    role=("loss",),
    fix=(
        "clamp_denominator",
        "guard_empty",
        "drop_invalid_sample",
        "fix_upstream",
        "representable_eps",
        "where_on_detached",
        "skip_bad_step",
    ),
    variable=(None,),
    line=("loss = ((pg_loss * mini_completions_mask).sum(dim=1) / mini_completions_mask.sum(dim=1)).mean()",),
)

EOS = 2
PAD = EOS


class TinyCausalLM(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mixer = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, num_logits_to_keep):
        return self.lm_head(self.mixer(self.embed_tokens(input_ids))[0][:, -num_logits_to_keep:])


class GRPOTrainer:
    def __init__(self, model, ref_model, optimizer, group_num, beta=0.04, cliprange=0.2, max_grad_norm=1.0):
        self.model, self.ref_model, self.optimizer = model, ref_model, optimizer
        self.group_num, self.beta, self.cliprange, self.max_grad_norm = group_num, beta, cliprange, max_grad_norm

    def get_all_logprobs(self, model, prompt_ids, completion_ids):
        n = completion_ids.shape[1]
        logits = model(torch.cat([prompt_ids, completion_ids], dim=1), num_logits_to_keep=n + 1)[:, :-1]
        return torch.gather(logits.log_softmax(dim=-1), 2, completion_ids.unsqueeze(2)).squeeze(2)

    def grpo_advantage(self, rewards, epsilon=1e-4):
        rewards = rewards.to(torch.float32)
        batch_size = rewards.shape[0] // self.group_num
        rewards_grouped = rewards.view(batch_size, self.group_num)
        mean = rewards_grouped.mean(dim=1, keepdim=True)
        std = rewards_grouped.std(dim=1, keepdim=True)
        return ((rewards_grouped - mean) / (std + epsilon)).view(-1)

    def step(self, prompt_ids, completion_ids, reward_scores):
        self.model.train()
        mini_completions_mask = completion_ids != PAD
        mini_advantages = self.grpo_advantage(reward_scores)
        with torch.no_grad():
            mini_old_logprobs = self.get_all_logprobs(self.model, prompt_ids, completion_ids)
            mini_ref_logprobs = self.get_all_logprobs(self.ref_model, prompt_ids, completion_ids)
        new_logprobs = self.get_all_logprobs(self.model, prompt_ids, completion_ids)
        ratio = torch.exp(new_logprobs - mini_old_logprobs.detach())
        ratio_clip = torch.clamp(ratio, 1 - self.cliprange, 1 + self.cliprange)
        pg_loss = torch.min(mini_advantages.unsqueeze(dim=1) * ratio, mini_advantages.unsqueeze(dim=1) * ratio_clip)
        unbiased_kl = torch.exp(mini_ref_logprobs - new_logprobs) - (mini_ref_logprobs - new_logprobs) - 1
        pg_loss = -pg_loss + self.beta * unbiased_kl
        loss = ((pg_loss * mini_completions_mask).sum(dim=1) / mini_completions_mask.sum(dim=1)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        return loss


def build():
    torch.manual_seed(11)
    model, ref_model = TinyCausalLM(), TinyCausalLM()
    ref_model.load_state_dict(model.state_dict())
    ref_model.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = GRPOTrainer(model, ref_model, optimizer, group_num=4)
    prompt_ids = torch.randint(3, 20, (1, 4)).expand(4, -1)
    completion_ids = torch.randint(3, 20, (4, 6))
    for row, length in enumerate([5, 6, 3, 0]):
        completion_ids[row, length:] = EOS
    batch = dict(prompt_ids=prompt_ids, completion_ids=completion_ids, reward_scores=torch.tensor([1.0, 0.0, 1.0, 0.0]))
    return SimpleNamespace(model=model, optimizer=optimizer, trainer=trainer, batch=batch)


def run(s=None):
    s = s or build()
    return s.trainer.step(**s.batch)


if __name__ == "__main__":
    print(run())
