"""sd-mecha `slerp` without its NaN fallback - two checkpoints are merged, then the merge is finetuned.

Spherical interpolation normalises both tensors. One layer's bias is zero in both parents (it was initialised to zero and never trained),
its norm is 0, 0/0 is NaN, and the merged checkpoint holds a NaN bias: the first loss of the finetuning is NaN, for any batch.
Heals: interpolating such tensors linearly (what the repository does when the result has NaN), or merging anew with a floor under the
norms. Does not heal: clipping gradients, a smaller learning rate, another batch.

https://github.com/ljleb/sd-mecha/blob/main/sd_mecha/merge_methods.py
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights", "zero_div_zero"),
    op=("div",),
    index=(0,),
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "clamp_denominator", "guard_empty", "reject_input", "representable_eps"),
    variable=("fc2.bias", "fc2", "a_normalized"),
    line=(
        "return x + self.fc2(F.gelu(self.fc1(x)))",
        "a_normalized = a / a.norm()",
        "model.load_state_dict({name: slerp(a[name], b[name], torch.tensor(0.5)) for name in a})",
    ),
)


def slerp(a, b, alpha):
    a_normalized = a / a.norm()
    b_normalized = b / b.norm()
    ab_dot = (a_normalized * b_normalized).sum().clamp(-1, 1)
    omega = torch.arccos(ab_dot)
    a_contrib = a_normalized * torch.sin((1 - alpha) * omega)
    b_contrib = b_normalized * torch.sin(alpha * omega)
    res = (a_contrib + b_contrib) / torch.sin(omega)
    return res * torch.lerp(a.norm(), b.norm(), alpha)


class Block(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, 3)
        nn.init.zeros_(self.fc2.bias)

    def features(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x):
        return self.head(self.features(x))


def finetuned(base, seed):
    generator = torch.Generator().manual_seed(seed)
    state = copy.deepcopy(base.state_dict())
    for name, tensor in state.items():
        if name != "fc2.bias":  # frozen in both recipes
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return state


def build():
    torch.manual_seed(49)
    model = Block()
    a, b = finetuned(model, 1), finetuned(model, 2)
    model.load_state_dict({name: slerp(a[name], b[name], torch.tensor(0.5)) for name in a})
    x = torch.randn(6, 10)
    labels = torch.randint(0, 3, (6,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, labels=labels)


def run(s=None):
    s = s or build()
    loss = F.cross_entropy(s.model(s.x), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
