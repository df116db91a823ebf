"""verl-style sleep mode - between two updates the optimizer state gives its memory to the rollout engine. The offload keeps a copy of
`step` and `exp_avg` only; after the rollout exp_avg_sq is a fresh buffer that nobody writes. Loss and gradients of the second update are
finite, the AdamW update is not, and all weights are lost.

https://github.com/verl-project/verl/blob/main/verl/utils/fsdp_utils.py (offload_fsdp_optimizer, load_fsdp_optimizer)
Heals: keep a copy of every state tensor (or zero the buffer). Does not: gradient clipping, a larger eps, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("uninitialized",),
    op=("empty_like", "empty", "empty_strided", "mul", "mul_", "addcmul_", "sqrt", "addcdiv_"),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("buffer", "exp_avg_sq", None),
    line=("buffer = torch.empty_like(value)", "s.optimizer.step()", None),
)


class OptimizerOffload:
    """Frees the state of an optimizer while the rollout engine runs."""

    def __init__(self, optimizer, keep=("step", "exp_avg")):
        self.optimizer, self.keep, self.saved = optimizer, keep, {}

    @torch.no_grad()
    def offload(self):
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                for key, value in self.optimizer.state[param].items():
                    if torch.is_tensor(value) and key in self.keep:
                        self.saved[param, key] = value.clone()

    @torch.no_grad()
    def load(self):
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                for key, value in list(state.items()):
                    if (param, key) in self.saved:
                        state[key] = self.saved[param, key]
                    else:
                        buffer = torch.empty_like(value)
                        state[key] = buffer
        self.saved.clear()


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed_tokens(ids)))


def rollout(actor, prompts, length=5):
    ids = prompts
    with torch.no_grad():
        for _ in range(length):
            probs = actor(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids


def update_actor(s, ids):
    logps = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)[:, s.prompt_length - 1 :]
    rewards = (ids[:, s.prompt_length :] % 2 == 0).float().mean(-1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    loss = -(torch.exp(logps - logps.detach()) * advantages.unsqueeze(-1)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.grad_norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


def build():
    torch.manual_seed(77)
    torch.use_deterministic_algorithms(True)  # PyTorch then fills fresh torch.empty memory with NaN
    actor = Actor()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    prompts = torch.randint(0, 16, (6, 3))
    return SimpleNamespace(model=actor, optimizer=optimizer, offload=OptimizerOffload(optimizer), prompts=prompts, prompt_length=3)


def run(s=None):
    s = s or build()
    update_actor(s, rollout(s.model, s.prompts))
    s.offload.offload()
    ids = rollout(s.model, s.prompts)
    s.offload.load()
    return update_actor(s, ids)


if __name__ == "__main__":
    run()
