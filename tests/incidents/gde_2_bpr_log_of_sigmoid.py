"""Graph recommender with BPR: -log(sigmoid(score)) as two functions, of a score in which the negative is paired with the positive item.

The bpr branch takes positive * negative in place of user * negative. Two popular items have long, aligned embeddings; their product is beyond 200, the
difference far below -104 and the sigmoid underflows to 0 in fp32. Its log is -inf, the loss inf; backward multiplies inf by the sigmoid's slope of 0.
Source: https://github.com/tanatosuu/GDE/pull/2 (GDE.py, loss_type other than adaptive; "otherwise, loss will be nan when using the bpr loss function").
Heals: F.logsigmoid, a floor under the sigmoid's value before the log, the product that was meant. Does not: gradient clipping, a smaller regulariser.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1,),
    masked=None,
    role=("loss", "log_probs", "hidden"),
    fix=("stable_function", "clamp_input", "representable_eps", "fix_upstream", "clamp_exponent"),
    variable=(None,),
    line=("res = (-torch.log(out)).sum()",),
)


class GDE(nn.Module):
    def __init__(self, user_size=6, item_size=8, latent_size=4, reg=0.01):
        super().__init__()
        self.user_embed = nn.Embedding(user_size, latent_size)
        self.item_embed = nn.Embedding(item_size, latent_size)
        self.reg = reg
        self.register_buffer("L_u", torch.eye(user_size) * 0.6 + 0.4 / user_size)
        self.register_buffer("L_i", torch.eye(item_size) * 0.6 + 0.4 / item_size)

    def forward(self, u, p, nega):
        final_user = self.L_u[u].mm(self.user_embed.weight)
        final_pos = self.L_i[p].mm(self.item_embed.weight)
        final_nega = self.L_i[nega].mm(self.item_embed.weight)
        out = ((final_user * final_pos).sum(1) - (final_pos * final_nega).sum(1)).sigmoid()
        reg_term = self.reg * (final_user**2 + final_pos**2 + final_nega**2).sum()
        res = (-torch.log(out)).sum()
        return res + reg_term


def build():
    torch.manual_seed(2)
    model = GDE()
    with torch.no_grad():
        model.item_embed.weight[5] = torch.tensor([30.0, -20.0, 25.0, 10.0])  # bought by nearly everybody
        model.item_embed.weight[2] = torch.tensor([6.0, -4.0, 5.0, 2.0])
    batch = dict(u=torch.tensor([0, 3, 2, 4]), p=torch.tensor([1, 2, 0, 6]), nega=torch.tensor([4, 5, 7, 3]))
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.model(s.batch["u"], s.batch["p"], s.batch["nega"])
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())
