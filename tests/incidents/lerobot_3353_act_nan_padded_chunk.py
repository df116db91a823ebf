"""ACT trains on chunks of future actions; where the episode ends inside the chunk the rest is padding, flagged in action_is_pad. The
recorder of this data set pads with NaN. The loss (squared error here, as in the diffusion policies of the same thread) is multiplied by the
negated flag: NaN * 0 is NaN, the loss and all gradients are lost although every real action is fine.

Source: https://github.com/huggingface/lerobot/issues/3353 and https://github.com/huggingface/lerobot/pull/3377 (loss with reduction="none"
times ~action_is_pad, then mean, in ACT, Diffusion and MultiTaskDiT).
Heals: select the real steps before the error is taken (or pad with the last action). Multiplying once more by the mask, or dividing by the
number of real steps as the issue proposes, does not.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("any", "sub", "mse_loss"),
    index=(1, 5, 0),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "fix_upstream", "finite_mask_fill", "clamp_input", "drop_invalid_sample", "reject_input"),
    variable=("action",),
    line=("return (batch[key] - self.mean[key]) / (self.std[key] + 1e-8)",),
)


@dataclass
class ACTConfig:
    chunk_size: int = 8
    state_dim: int = 7
    action_dim: int = 7
    dim_model: int = 24
    use_vae: bool = False


class Normalize(nn.Module):
    def __init__(self, stats):
        super().__init__()
        self.mean = {k: v["mean"] for k, v in stats.items()}
        self.std = {k: v["std"] for k, v in stats.items()}

    def _apply_stats(self, batch, key):
        return (batch[key] - self.mean[key]) / (self.std[key] + 1e-8)

    @torch.no_grad()
    def forward(self, batch):
        batch = dict(batch)
        for key in self.mean:
            batch[key] = self._apply_stats(batch, key)
        return batch


class ACT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.state_proj = nn.Linear(config.state_dim, config.dim_model)
        self.queries = nn.Embedding(config.chunk_size, config.dim_model)
        self.attention = nn.MultiheadAttention(config.dim_model, 2, batch_first=True)
        self.action_head = nn.Linear(config.dim_model, config.action_dim)

    def forward(self, state):
        memory = self.state_proj(state).unsqueeze(1)
        queries = self.queries.weight.expand(state.shape[0], -1, -1)
        return self.action_head(queries + self.attention(queries, memory, memory)[0])


class ACTPolicy(nn.Module):
    def __init__(self, config, stats):
        super().__init__()
        self.normalize = Normalize(stats)
        self.model = ACT(config)

    def forward(self, batch):
        batch = self.normalize(batch)
        actions_hat = self.model(batch["observation.state"])
        error = F.mse_loss(batch["action"], actions_hat, reduction="none")
        mse_loss = (error * ~batch["action_is_pad"].unsqueeze(-1)).mean()
        return mse_loss, {"mse_loss": mse_loss.item()}


def build():
    torch.manual_seed(3353)
    config = ACTConfig()
    stats = {
        "action": {"mean": torch.randn(7), "std": torch.rand(7) + 0.5},
        "observation.state": {"mean": torch.randn(7), "std": torch.rand(7) + 0.5},
    }
    policy = ACTPolicy(config, stats)
    action = torch.randn(4, config.chunk_size, 7)
    action_is_pad = torch.zeros(4, config.chunk_size, dtype=torch.bool)
    action_is_pad[1, 5:] = True  # the episode ends here
    action[action_is_pad] = float("nan")
    batch = {"observation.state": torch.randn(4, 7), "action": action, "action_is_pad": action_is_pad}
    return SimpleNamespace(model=policy, batch=batch, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4))


def run(s=None):
    s = s or build()
    loss, _ = s.model(s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss
