"""unsloth-zoo - GRPO in float16 with loss scale 2**16: the loss is finite and the activations stay far below 65504, but in backward the
gradient of the residual stream is multiplied by a large norm gain of one outlier channel and overflows half precision. grad_norm is
NaN, and a loop without a found-inf check writes that into every weight.

https://github.com/unslothai/unsloth-zoo/pull/866 (gemma4, qwen3_moe, glm4_moe: finite loss, NaN grad_norm in fp16, fine in bf16)
Heals: the norm (its gain included) in float32, or a smaller loss scale; a scaler that skips the step protects the weights. Does not:
clip_grad_norm_, a clamp of the logits.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("mul", "MulBackward0", "mul_backward"),
    index=(0, 5),
    masked=None,
    role=("grad", "hidden"),
    fix=("upcast_fp32", "validate_config"),
    variable=(None, "normed"),
    line=("return normed * self.weight.half()", "(loss * s.loss_scale).backward()", None),
)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        x = x.float()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).half()
        return normed * self.weight.half()


class Policy(nn.Module):
    """float32 master weights, float16 compute."""

    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.up_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed_tokens(ids).half()
        h = h + F.linear(F.silu(F.linear(h, self.up_proj.weight.half())), self.down_proj.weight.half())
        return F.linear(self.norm(h), self.lm_head.weight.half()).float()


def build():
    torch.manual_seed(866)
    model = Policy()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2.0)
        model.norm.weight[5] = 22.0  # the outlier channel that large checkpoints have
        model.embed_tokens.weight.mul_(4.0)
        model.up_proj.weight.mul_(0.5)
        model.lm_head.weight.mul_(0.4)
        model.lm_head.weight[:, 5] = 0.12 * torch.randn(20).sign()
    model.norm.requires_grad_(False)  # adapters train below, norm and head are frozen
    model.lm_head.requires_grad_(False)
    ids = torch.randint(0, 20, (5,))  # one packed micro batch: 4 completion tokens
    advantages = torch.tensor([1.2, 1.2, -0.8, -0.8])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, advantages=advantages, loss_scale=2.0**16)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:-1])
    logps = logits.log_softmax(-1).gather(-1, s.ids[1:].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logps - logps.detach())
    loss = -(ratio * s.advantages).mean()
    s.optimizer.zero_grad()
    (loss * s.loss_scale).backward()
    trainable = [p for p in s.model.parameters() if p.requires_grad]
    for p in trainable:
        p.grad.div_(s.loss_scale)
    s.grad_norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
