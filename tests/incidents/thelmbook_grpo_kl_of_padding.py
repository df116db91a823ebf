"""aburkov/theLMbook, GRPO from scratch - the KL term of pad tokens behind the end of an answer.

The policy has unlearnt the pad token (log-prob below -120), the reference has not: exp(ref - policy) is inf at the padding, and the completion mask is multiplied on afterwards, inf * 0.
(Source: aburkov/theLMbook, GRPO notebook, grpo_loss; issue 4 asks for its exp.) Heals: masking the difference before exp ((ref_log_probs - token_log_probs) * completion_mask); clamping the difference to [-20, 20]; torch.where taking token_log_probs.detach() for the reference at the padding. Does not: torch.where on per_token_loss instead of the product
(loss fine, NaN in the gradient); a smaller beta.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(0, 5),
    masked=True,
    role=("kl", "ratio"),
    fix=("mask_before_op", "clamp_exponent", "where_on_detached", "clamp_input", "fix_upstream"),
    variable=(None, "kl_div"),
    line=("kl_div = torch.exp(ref_log_probs - token_log_probs) - (ref_log_probs - token_log_probs) - 1",),
)

PAD = 0


class TinyCausalLM(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.lm_head(self.rnn(self.embed(input_ids))[0]))


def selective_log_softmax(logits, input_ids):
    log_probs = nn.functional.log_softmax(logits, dim=-1)
    return log_probs.gather(dim=-1, index=input_ids.unsqueeze(-1)).squeeze(-1)


def compute_log_probs(model, input_ids, logits_to_keep):
    logits = model(input_ids).logits[:, :-1, :]
    input_ids = input_ids[:, -logits_to_keep:]
    logits = logits[:, -logits_to_keep:, :]
    return selective_log_softmax(logits, input_ids)


def create_completion_mask(completion_ids, eos_token_id):
    is_eos = completion_ids == eos_token_id
    eos_idx = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long)
    mask_exists = is_eos.any(dim=1)
    eos_idx[mask_exists] = is_eos.int().argmax(dim=1)[mask_exists]
    sequence_indices = torch.arange(is_eos.size(1)).expand(is_eos.size(0), -1)
    return (sequence_indices <= eos_idx.unsqueeze(1)).int()


def build():
    torch.manual_seed(4)
    ref_model = TinyCausalLM()
    model = TinyCausalLM()
    model.load_state_dict(ref_model.state_dict())
    with torch.no_grad():
        model.lm_head.bias[PAD] -= 121.0
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-6)
    prompt_ids = torch.randint(2, 20, (4, 4))
    completion_ids = torch.randint(2, 20, (4, 8))
    for row, n in enumerate([4, 8, 7, 6]):
        if n < 8:
            completion_ids[row, n] = 1
            completion_ids[row, n + 1 :] = PAD
    completion_mask = create_completion_mask(completion_ids, eos_token_id=1)
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    with torch.no_grad():
        old_log_probs = compute_log_probs(model, input_ids, 8)
        ref_log_probs = compute_log_probs(ref_model, input_ids, 8)
    rollout_data = dict(
        input_ids=input_ids,
        completion_mask=completion_mask,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        logits_to_keep=8,
        rewards=torch.tensor([2.0, 0.0, 0.8, 0.0]),
        batch_size=1,
        num_generations=4,
    )
    return SimpleNamespace(model=model, optimizer=optimizer, rollout_data=rollout_data, beta=0.04, epsilon=0.2)


def grpo_loss(model, rollout_data, beta, epsilon):
    completion_mask = rollout_data["completion_mask"]
    old_log_probs = rollout_data["old_log_probs"]
    ref_log_probs = rollout_data["ref_log_probs"]
    token_log_probs = compute_log_probs(model, rollout_data["input_ids"], rollout_data["logits_to_keep"])
    ratio = torch.exp(token_log_probs - old_log_probs)
    rewards = rollout_data["rewards"].view(rollout_data["batch_size"], rollout_data["num_generations"])
    mean_rewards = rewards.mean(dim=1, keepdim=True)
    std_rewards = rewards.std(dim=1, keepdim=True)
    advantages = ((rewards - mean_rewards) / (std_rewards + 1e-4)).view(-1).unsqueeze(1)
    surr1 = ratio * advantages
    surr2 = torch.clamp(ratio, 1 - epsilon, 1 + epsilon) * advantages
    surrogate_loss = torch.min(surr1, surr2)
    kl_div = torch.exp(ref_log_probs - token_log_probs) - (ref_log_probs - token_log_probs) - 1
    per_token_loss = surrogate_loss - beta * kl_div
    loss = -((per_token_loss * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)).mean()
    return loss


def run(s=None):
    s = s or build()
    loss = grpo_loss(s.model, s.rollout_data, s.beta, s.epsilon)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=0.1)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
