"""SkyRL #1709 - the reference worker is built on the meta device, its rotary table is memory that nobody wrote.

Policy and reference are the same network. The policy is constructed as usual; the reference is constructed on `meta`, materialised with
`to_empty` and filled from the checkpoint. `inv_freq` is a non-persistent buffer, so the checkpoint does not hold it and strict loading does not
miss it. The reference's log-probs are NaN for every token, and through the KL penalty so is every gradient of the healthy policy.

Source: https://github.com/NovaSky-AI/SkyRL/issues/1709, https://github.com/huggingface/transformers/issues/45902

Heals: compute the buffer again after `to_empty` (or keep buffers off the meta device). Does not heal: masking the KL to response tokens, a
smaller KL coefficient, `nan_to_num` on the reference's logits (the penalty is finite and means nothing).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("uninitialized", "empty_like", "empty"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("rotary.inv_freq", "ref.rotary.inv_freq"),
    line=("freqs = torch.outer(positions, self.inv_freq)", 'model = model.to_empty(device="cpu")'),
)


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length):
        positions = torch.arange(length, dtype=torch.float32)
        freqs = torch.outer(positions, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class CausalLM(nn.Module):
    def __init__(self, vocab=17, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        cos, sin = self.rotary(ids.shape[1])
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        scores = q @ k.mT * q.shape[-1] ** -0.5  # eager attention
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        h = h + scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.lm_head(h)


def from_checkpoint(state_dict):
    with torch.device("meta"):
        model = CausalLM()
    model = model.to_empty(device="cpu")
    model.load_state_dict(state_dict, strict=True)
    return model.requires_grad_(False)


def token_logps(model, ids):
    logits = model(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(2103)
    torch.use_deterministic_algorithms(True)  # fresh memory is filled with NaN, so that the run is the same each time
    policy = CausalLM()
    ref = from_checkpoint(policy.state_dict())
    mask = torch.ones(4, 6)
    mask[:, :2] = 0  # prompt
    return SimpleNamespace(
        model=policy,
        ref=ref,
        ids=torch.randint(0, 17, (4, 7)),
        mask=mask,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        kl_coef=0.02,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    logps = token_logps(s.model, s.ids)
    with torch.no_grad():
        ref_logps = token_logps(s.ref, s.ids)
    log_ratio = ref_logps - logps
    kl = log_ratio.exp() - log_ratio - 1
    per_token = -s.advantages[:, None] * (logps - logps.detach()).exp() + s.kl_coef * kl
    loss = (per_token * s.mask).sum() / s.mask.sum()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
