"""CIC (Contrastive Intrinsic Control) - the contrastive loss of skills and transitions with the temperature lowered to 0.01.

The loss sums exponentials of cos / temperature; one transition fits its skill so well (cos about 0.99) that exp(99) is inf in float32, the
quotient is inf / inf and the loss NaN. Formula of https://github.com/rll-research/cic (agent/cic.py, compute_cpc_loss).
Cross entropy on the logits (logsumexp) heals and so does the old temperature; the clamp and the eps of the denominator do not, nor does
subtracting the positive from the sum.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(3, 3),
    masked=None,
    role=("logits", "ratio", "hidden", "loss"),
    fix=("stable_function", "validate_config", "clamp_exponent", "clamp_input", "safe_softmax"),
    variable=("sim",),
    line=("sim = torch.exp(cov / temperature)",),
)


class CIC(nn.Module):
    def __init__(self, obs_dim=10, skill_dim=8, hidden_dim=32):
        super().__init__()
        self.state_net = nn.Sequential(nn.Linear(obs_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, skill_dim))
        self.pred_net = nn.Sequential(nn.Linear(2 * skill_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, skill_dim))
        self.skill_net = nn.Linear(skill_dim, skill_dim)

    def forward(self, state, next_state, skill):
        query = self.skill_net(skill)
        key = self.pred_net(torch.cat([self.state_net(state), self.state_net(next_state)], 1))
        return query, key


def compute_cpc_loss(cic, obs, next_obs, skill, temperature, eps=1e-6):
    query, key = cic(obs, next_obs, skill)
    query = F.normalize(query, dim=1)
    key = F.normalize(key, dim=1)
    cov = torch.mm(query, key.T)
    sim = torch.exp(cov / temperature)
    pos = sim.diagonal()
    total = torch.clamp(sim.sum(dim=-1), min=eps)
    return -torch.log(pos / (total + eps))


def build():
    torch.manual_seed(21)
    cic = CIC()
    obs, next_obs, skill = torch.randn(6, 10), torch.randn(6, 10), torch.randn(6, 8)
    with torch.no_grad():  # a trained encoder: every skill is told apart, the fourth one almost perfectly
        query, key = cic(obs, next_obs, skill)
        hidden = F.relu(cic.pred_net[0](torch.cat([cic.state_net(obs), cic.state_net(next_obs)], 1)))
        spread = torch.tensor([0.35, 0.35, 0.35, 0.08, 0.35, 0.35])[:, None]
        wanted = F.normalize(query, dim=1) + spread * torch.randn(6, 8)
        cic.pred_net[2].weight += (torch.linalg.pinv(hidden) @ (wanted - key)).T
    optimizer = torch.optim.Adam(cic.parameters(), lr=1e-4)
    return SimpleNamespace(model=cic, obs=obs, next_obs=next_obs, skill=skill, temperature=0.01, optimizer=optimizer)


def run(s=None):
    s = s or build()
    loss = compute_cpc_loss(s.model, s.obs, s.next_obs, s.skill, s.temperature).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
