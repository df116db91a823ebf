"""state-spaces/mamba #352, #354, #445 - the loss of a Mamba-2 block is finite and its gradients are NaN.

Inside a chunk the decay between two positions is exp of a difference of cumulated dt * A. Below the diagonal the difference is negative;
above it, where nothing may flow, it is positive and exp overflows once heads decay fast. The selection by the causal mask comes after
the exp: the output is right and the backward multiplies the zero by the infinity.

Source: https://github.com/state-spaces/mamba/issues/352 and /354 ("this line of code causes NaN of dx"); ssd_minimal.py fills first.
Heals: fill the difference with -inf (or clamp it at 0) before exp. Does not heal: clamp the decay at 1 after exp; a chunk of one step
"heals" by giving up the chunks.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(0, 2, 0, 7),
    masked=True,
    role=("attention", "hidden"),
    fix=("mask_before_op", "clamp_exponent", "finite_mask_fill"),
    variable=("decay",),
    line=("decay = torch.exp(dA_cumsum[:, :, :, None] - dA_cumsum[:, :, None, :])",),
)


class SSDBlock(nn.Module):
    def __init__(self, d_model=12, n_heads=3, d_state=4):
        super().__init__()
        self.n_heads, self.d_state, self.headdim = n_heads, d_state, d_model // n_heads
        self.in_proj = nn.Linear(d_model, d_model + 2 * d_state + n_heads)
        self.A_log = nn.Parameter(torch.log(torch.tensor([1.0, 4.0, 16.0])))
        self.dt_bias = nn.Parameter(torch.zeros(n_heads))
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, u):
        batch, seqlen, d_model = u.shape
        x, B, C, dt = self.in_proj(u).split([d_model, self.d_state, self.d_state, self.n_heads], dim=-1)
        x = x.view(batch, seqlen, self.n_heads, self.headdim).transpose(1, 2)
        dt = F.softplus(dt + self.dt_bias).transpose(1, 2)
        A = -torch.exp(self.A_log)
        dA_cumsum = torch.cumsum(dt * A[None, :, None], dim=-1)

        decay = torch.exp(dA_cumsum[:, :, :, None] - dA_cumsum[:, :, None, :])
        cb = torch.einsum("bln,bsn->bls", C, B)[:, None] * dt[:, :, None, :]
        causal = torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
        scores = torch.where(causal, cb * decay, torch.zeros(()))
        y = (scores @ x).transpose(1, 2).reshape(batch, seqlen, d_model)
        return self.out_proj(y)


class LM(nn.Module):
    def __init__(self, vocab=20, d_model=12):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.mixer = SSDBlock(d_model)
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, input_ids):
        hidden_states = self.embedding(input_ids)
        hidden_states = hidden_states + self.mixer(hidden_states)
        return self.lm_head(self.norm(hidden_states))


def build():
    torch.manual_seed(352)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=torch.randint(0, 20, (2, 17)))


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
