"""An LSTM value model on packed variable-length episodes; the padded tail comes back as zeros and is masked."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

HEALTHY = "episodes of length one and outputs that are exactly 0 behind the end of an episode"


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 9, num_layers=2, batch_first=True)
        self.v = nn.Linear(9, 1)

    def forward(self, obs, lengths):
        packed = pack_padded_sequence(obs, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=obs.shape[1])
        return self.v(out).squeeze(-1)


def build():
    torch.manual_seed(231)
    critic = Critic()
    lengths = torch.tensor([3, 7, 1, 5])
    obs = torch.randn(4, 7, 5)
    return SimpleNamespace(
        critic=critic, lengths=lengths, obs=obs, target=torch.randn(4, 7), opt=torch.optim.Adam(critic.parameters(), lr=1e-2)
    )


def run(s=None):
    s = s or build()
    mask = torch.arange(7) < s.lengths[:, None]
    for _ in range(3):
        value = s.critic(s.obs, s.lengths)
        loss = nn.functional.huber_loss(value[mask], s.target[mask])
        s.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.critic.parameters(), 0.5)
        s.opt.step()
    return loss
