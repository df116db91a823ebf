"""SFT with a fused linear + cross entropy Function: a micro-batch whose labels are all -100 divides by zero valid tokens.

The hidden states go in chunks through the head inside a custom autograd.Function that makes loss and gradients together (no logits kept).
The mean divides by the number of labels that are not ignored. The second micro-batch of the accumulation is a conversation whose answer was
truncated away, so no label is left: 0 / 0 is NaN, and the NaN is added to the good gradients of the first micro-batch.
Source: https://github.com/nvidia-cosmos/cosmos-rl/pull/155 (all-masked labels), in the form of Liger-Kernel's ops/fused_linear_cross_entropy.py
Heals: n_non_ignore.clamp(min=1), or returning 0 / dropping the micro-batch. Does not: clipping the norm, a stable softmax, fp32.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div", "FusedLinearCrossEntropy"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample"),
    variable=("loss",),
    line=("loss = loss_sum / n_non_ignore",),
)


class FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _input, weight, target, ignore_index=-100, chunk_size=4):
        grad_input = torch.zeros_like(_input)
        grad_weight = torch.zeros_like(weight)
        loss_sum = torch.zeros((), dtype=torch.float32)
        n_non_ignore = (target != ignore_index).sum()
        for lo in range(0, _input.shape[0], chunk_size):
            x, t = _input[lo : lo + chunk_size], target[lo : lo + chunk_size]
            keep = t != ignore_index
            logp = torch.log_softmax((x @ weight.T).float(), dim=-1)
            picked = logp.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            loss_sum -= picked[keep].sum()
            g = logp.exp()
            g[torch.arange(t.numel()), t.clamp(min=0)] -= 1.0
            g = g * keep.unsqueeze(-1)
            grad_input[lo : lo + chunk_size] = g @ weight
            grad_weight += g.T @ x
        loss = loss_sum / n_non_ignore
        ctx.save_for_backward(grad_input, grad_weight, n_non_ignore)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        grad_input, grad_weight, n_non_ignore = ctx.saved_tensors
        scale = grad_output / n_non_ignore
        return grad_input * scale, grad_weight * scale, None, None, None


class CausalLM(nn.Module):
    def __init__(self, vocab=20, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 16), nn.SiLU(), nn.Linear(16, hidden))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids, labels):
        h = self.embed(ids)
        h = h + self.mlp(h)
        h = h[:, :-1].reshape(-1, h.shape[-1])
        return FusedLinearCrossEntropy.apply(h, self.lm_head.weight, labels[:, 1:].reshape(-1))


def build():
    torch.manual_seed(3)
    model = CausalLM()
    ids = torch.randint(0, 20, (4, 7))
    labels = ids.clone()
    labels[:2, :3] = -100
    labels[2:] = -100  # max_length cut both conversations inside the prompt
    micro = [{"input_ids": ids[:2], "labels": labels[:2]}, {"input_ids": ids[2:], "labels": labels[2:]}]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=micro)


def run(s=None):
    s = s or build()
    out = []
    s.optimizer.zero_grad()
    for m in s.batch:
        loss = s.model(m["input_ids"], m["labels"])
        (loss / len(s.batch)).backward()
        out.append(loss.item())
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return out


if __name__ == "__main__":
    print(run())
