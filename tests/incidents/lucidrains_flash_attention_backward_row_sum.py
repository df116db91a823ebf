"""memory-efficient-attention-pytorch, FlashAttentionFunction - the hand-written backward divides by a row sum of 0.

Attention is one autograd Function whose backward recomputes the probabilities from the saved row maximum and row sum. Prompts are padded on the
left, so the padded query rows of the shorter prompt see no key at all: their row sum is 0. Forward divides by `row_sum.clamp(min=EPSILON)` and
gives zeros; backward forgot the clamp and makes 0 / 0 = NaN. The loss ignores those rows and is finite, but NaN * 0 reaches dv and dk and
through them the projections.

Source: https://github.com/lucidrains/memory-efficient-attention-pytorch/blob/main/memory_efficient_attention_pytorch/flash_attention.py ;
the same symptom in the field: https://github.com/Dao-AILab/flash-attention/issues/1947

Heals: clamp the sum in backward as forward does, or mask the probabilities after the division. Does not heal: ignoring the padded rows in the
loss (done here), zeroing the attention's output there, gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "fully_masked_softmax"),
    op=("div",),
    index=(1, 0, 0, 0),
    masked=True,
    role=("attention", "grad"),
    fix=("clamp_denominator", "guard_empty", "safe_softmax", "finite_mask_fill"),
    variable=("p",),
    line=("p = exp_scores / row_sum",),
)

EPSILON = 1e-6


class FlashAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible):
        scale = q.shape[-1] ** -0.5
        scores = q @ k.mT * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        row_max = scores.amax(dim=-1, keepdim=True)
        row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
        exp_scores = torch.exp(scores - row_max)
        row_sum = exp_scores.sum(dim=-1, keepdim=True)
        o = exp_scores @ v / row_sum.clamp(min=EPSILON)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, o, row_max, row_sum, visible)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, row_max, row_sum, visible = ctx.saved_tensors
        scores = q @ k.mT * ctx.scale
        exp_scores = torch.exp(scores - row_max).masked_fill(~visible, 0.0)
        p = exp_scores / row_sum
        dv = p.mT @ do
        dp = do @ v.mT
        delta = (do * o).sum(dim=-1, keepdim=True)
        ds = p * ctx.scale * (dp - delta)
        return ds @ k, ds.mT @ q, dv, None


class Decoder(nn.Module):
    def __init__(self, vocab=19, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, attention_mask):
        b, n = ids.shape
        x = self.embed(ids)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        visible = torch.ones(n, n, dtype=torch.bool).tril() & attention_mask[:, None, None, :]
        out = FlashAttentionFunction.apply(q, k, v, visible)
        x = x + self.to_out(out.transpose(1, 2).reshape(b, n, -1))
        return self.lm_head(x)


def build():
    torch.manual_seed(2106)
    model = Decoder()
    ids = torch.randint(1, 19, (3, 6))
    attention_mask = torch.ones(3, 6, dtype=torch.bool)
    attention_mask[1, :2] = False  # two left pads
    ids[1, :2] = 0
    return SimpleNamespace(
        model=model,
        ids=ids,
        attention_mask=attention_mask,
        labels=ids.masked_fill(~attention_mask, -100),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    logits = s.model(s.ids, s.attention_mask)[:, :-1]
    labels = s.labels[:, 1:].masked_fill(~s.attention_mask[:, :-1], -100)  # a pad predicts nothing
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
