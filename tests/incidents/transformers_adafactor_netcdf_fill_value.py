"""transformers Adafactor on a DLinear forecaster whose series was read without masking: one cell still holds the netCDF fill value 9.97e36.
The L1 loss and the gradients are finite (huge), but Adafactor squares the gradient in fp32: inf, then inf / inf in the row factor.

https://github.com/huggingface/transformers/blob/main/src/transformers/optimization.py (Adafactor)
https://github.com/cure-lab/LTSF-Linear/blob/main/models/DLinear.py
Masking the fill value in the reader heals. A smaller clip_threshold (it works on the finished update) or a Huber loss does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("magnitude_overflow", "bad_input"),
    op=("pow", "square", "mul"),
    index=(0, 8),
    masked=None,
    role=("optimizer", "grad"),
    fix=("clamp_input", "fix_upstream", "reject_input", "drop_invalid_sample", "skip_bad_step"),
    variable=(None, "update"),
    line=('update = (grad**2) + group["eps"][0]',),
)

FILL_VALUE = 9.96921e36


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8):
        super().__init__(params, dict(lr=lr, eps=eps, clip_threshold=clip_threshold, decay_rate=decay_rate))

    @staticmethod
    def _rms(tensor):
        return tensor.norm(2) / (tensor.numel() ** 0.5)

    @staticmethod
    def _approx_sq_grad(exp_avg_sq_row, exp_avg_sq_col):
        r_factor = (exp_avg_sq_row / exp_avg_sq_row.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
        c_factor = exp_avg_sq_col.unsqueeze(-2).rsqrt()
        return torch.mul(r_factor, c_factor)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg_sq_row"] = torch.zeros(grad.shape[:-1])
                    state["exp_avg_sq_col"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:])
                state["step"] += 1
                beta2t = 1.0 - state["step"] ** group["decay_rate"]
                update = (grad**2) + group["eps"][0]
                state["exp_avg_sq_row"].mul_(beta2t).add_(update.mean(dim=-1), alpha=1.0 - beta2t)
                state["exp_avg_sq_col"].mul_(beta2t).add_(update.mean(dim=-2), alpha=1.0 - beta2t)
                update = self._approx_sq_grad(state["exp_avg_sq_row"], state["exp_avg_sq_col"]).mul_(grad)
                update.div_((self._rms(update) / group["clip_threshold"]).clamp_(min=1.0))
                p.add_(update, alpha=-group["lr"])


class DLinear(nn.Module):
    def __init__(self, seq_len=16, pred_len=6, kernel=3):
        super().__init__()
        self.kernel = kernel
        self.Linear_Seasonal = nn.Linear(seq_len, pred_len, bias=False)
        self.Linear_Trend = nn.Linear(seq_len, pred_len, bias=False)

    def forward(self, x):
        pad = (self.kernel - 1) // 2
        trend = F.avg_pool1d(F.pad(x.unsqueeze(1), (pad, pad), mode="replicate"), self.kernel, stride=1).squeeze(1)
        return self.Linear_Seasonal(x - trend) + self.Linear_Trend(trend)


def build():
    torch.manual_seed(97)
    history = torch.randn(4, 16)
    history[2, 9] = FILL_VALUE  # land cell: the reader did not apply the mask of the variable
    model = DLinear()
    optimizer = Adafactor(model.parameters())
    return SimpleNamespace(model=model, optimizer=optimizer, history=history, future=torch.randn(4, 6))


def run(s=None):
    s = s or build()
    loss = F.l1_loss(s.model(s.history), s.future)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
