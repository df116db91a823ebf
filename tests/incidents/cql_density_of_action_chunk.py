"""CQL(H) with importance sampling - the density of uniform actions is 0.5 ** action_dim, and the action is a chunk of 16 x 14 joints.

0.5 ** 224 = 4e-68 is below the smallest fp32 number: the tensor holds 0, its logarithm is -inf, q - (-inf) = +inf enters the logsumexp, the
conservative loss is inf and its gradient NaN. (numpy's float64 hides it in the originals.)
Source: min_q_version 3 of https://github.com/aviralkumar2907/CQL/blob/master/d4rl/rlkit/torch/sac/cql.py and its many ports
(tinkoff-ai/CORL algorithms/offline/cql.py, cql_importance_sample).
Heals: action_dim * log(0.5). Does not: a clamp on the logsumexp (backward still makes 0 * NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(0, 0),
    masked=None,
    role=("log_probs",),
    fix=("stable_function", "upcast_fp32", "clamp_input", "avoid_singular_op"),
    variable=("random_density",),
    line=("random_density = torch.full_like(q_rand, 0.5**action_dim).log()",),
)

OBS, CHUNK, JOINTS, BATCH, N_ACTIONS = 10, 16, 14, 4, 5
ACTION = CHUNK * JOINTS


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS + ACTION, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs, actions):
        if actions.dim() == 3:
            obs = obs.unsqueeze(1).expand(-1, actions.shape[1], -1)
        return self.net(torch.cat([obs, actions], dim=-1)).squeeze(-1)


def conservative_loss(q_rand, q_next, q_curr, next_log_pi, curr_log_pi, q_pred, action_dim, temp=1.0):
    random_density = torch.full_like(q_rand, 0.5**action_dim).log()
    cat_q = torch.cat([q_rand - random_density, q_next - next_log_pi.detach(), q_curr - curr_log_pi.detach()], dim=1)
    min_qf_loss = torch.logsumexp(cat_q / temp, dim=1).mean() * temp
    return min_qf_loss - q_pred.mean()


def build():
    torch.manual_seed(20)
    qf = Critic()
    batch = SimpleNamespace(
        obs=torch.randn(BATCH, OBS),
        actions=torch.rand(BATCH, ACTION) * 2 - 1,
        target=torch.randn(BATCH),
        next_actions=torch.tanh(torch.randn(BATCH, N_ACTIONS, ACTION)),
        curr_actions=torch.tanh(torch.randn(BATCH, N_ACTIONS, ACTION)),
        next_log_pi=-torch.rand(BATCH, N_ACTIONS) * 20 - 140,
        curr_log_pi=-torch.rand(BATCH, N_ACTIONS) * 20 - 140,
    )
    optimizer = torch.optim.Adam(qf.parameters(), lr=3e-4)
    return SimpleNamespace(model=qf, optimizer=optimizer, batch=batch, min_q_weight=5.0)


def run(s=None):
    s = s or build()
    b = s.batch
    q_pred = s.model(b.obs, b.actions)
    random_actions = torch.rand(BATCH, N_ACTIONS, ACTION) * 2 - 1
    q_rand = s.model(b.obs, random_actions)
    q_next = s.model(b.obs, b.next_actions)
    q_curr = s.model(b.obs, b.curr_actions)
    min_qf_loss = conservative_loss(q_rand, q_next, q_curr, b.next_log_pi, b.curr_log_pi, q_pred, b.actions.shape[-1])
    qf_loss = F.mse_loss(q_pred, b.target) + s.min_q_weight * min_qf_loss
    s.optimizer.zero_grad()
    qf_loss.backward()
    s.optimizer.step()
    return qf_loss


if __name__ == "__main__":
    print(run())
