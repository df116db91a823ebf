"""unsloth-zoo #962 - Adam whose second moment is kept as 8-bit affine groups with bf16 scale and bias. The code of a (nearly) zero entry is
`255 * scale + bias`, two rounded numbers that cancel to a small negative one; in the second step its square root is NaN and so is the weight.

https://github.com/unslothai/unsloth-zoo/pull/962 ("the second moment is not quantized": the affine code reconstructs v poorly near zero,
sqrt(v) is the denominator, 1.06 -> 0.86 -> 19 -> 10 -> nan). Heals: clamp v at zero before the root, or keep v in fp32 (what was merged).
Tempting and useless: a larger eps, or a clamp of the denominator after the root.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("sqrt_negative",),
    op=("sqrt",),
    index=(9, 0),
    masked=None,
    role=("optimizer",),
    fix=("clamp_input", "upcast_fp32"),
    variable=("rms",),
    line=("rms = exp_avg_sq.sqrt()",),
)

GROUP_SIZE, BINS = 64, 255


def quantize(w):
    """Affine groups as MLX makes them: the edge of the larger magnitude is exact, the codes count away from it."""
    g = w.reshape(-1, GROUP_SIZE)
    w_max, w_min = g.amax(1, keepdim=True), g.amin(1, keepdim=True)
    scale = ((w_max - w_min) / BINS).clamp(min=1e-12)
    low_edge = w_min.abs() > w_max.abs()
    scale = torch.where(low_edge, scale, -scale)
    edge = torch.where(low_edge, w_min, w_max)
    q0 = (edge / scale).round()
    scale = torch.where(q0 != 0, edge / q0, scale)
    bias = torch.where(q0 == 0, torch.zeros_like(edge), edge)
    codes = ((g - bias) / scale).round().clamp(0, BINS).to(torch.uint8)
    return codes, scale.bfloat16(), bias.bfloat16()


def dequantize(packed, shape):
    codes, scale, bias = packed
    return (codes.float() * scale.float() + bias.float()).reshape(shape)


class QuantizedMomentAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = quantize(torch.zeros_like(p))
                state["step"] += 1
                exp_avg = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                exp_avg_sq = dequantize(state["exp_avg_sq"], p.shape)
                exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * p.grad * p.grad
                state["exp_avg_sq"] = quantize(exp_avg_sq)
                rms = exp_avg_sq.sqrt()
                correction = (1 - beta2 ** state["step"]) ** 0.5
                denom = rms / correction + group["eps"]
                step_size = group["lr"] / (1 - beta1 ** state["step"])
                p.sub_(step_size * exp_avg / denom)


class TinyLM(nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.SiLU())
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return self.lm_head(hidden + self.mlp(hidden))


def build():
    torch.manual_seed(962)
    model = TinyLM()
    optimizer = QuantizedMomentAdam(model.parameters(), lr=1e-3)
    seen = torch.randperm(64)[:24]  # short instruction batches: 24 of the 64 token ids occur
    batches = [seen[torch.randint(0, 24, (4, 12))] for _ in range(2)]
    return SimpleNamespace(model=model, optimizer=optimizer, batches=batches)


def run(s=None):
    s = s or build()
    for input_ids in s.batches:
        s.optimizer.zero_grad()
        logits = s.model(input_ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
