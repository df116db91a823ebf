"""A manipulation policy keeps the dataset statistics as frozen parameters that start at infinity and are meant to be overwritten by `stats` or
by the checkpoint. The checkpoint was saved without those of the state and is loaded with strict=False, so (x - inf) / inf is NaN and
fine-tuning writes NaN into the weights.

Source: https://github.com/huggingface/lerobot/issues/1078 (`mean` is infinity) and lerobot/common/policies/normalize.py
(create_stats_buffers). Heals: pass the dataset's stats, or save them with the checkpoint. Tempting and useless: nan_to_num on the
normalised state (every observation becomes the same constant: the policy is blind, and the frozen parameters are still infinite).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "input"),
    cause=("poisoned_weights", "uninitialized", "bad_input"),
    op=("any", "parameter"),
    index=None,
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "initialise_memory", "validate_config"),
    variable=("normalize_inputs.buffer_observation_state.mean", "normalize_inputs.buffer_observation_state.std"),
    line=(
        "batch[key] = (batch[key] - mean) / (std + 1e-8)",
        'mean, std = buffer["mean"], buffer["std"]',
        None,
        "mean = torch.ones(shape, dtype=torch.float32) * torch.inf",
        "std = torch.ones(shape, dtype=torch.float32) * torch.inf",
    ),
)


def create_stats_buffers(shapes, stats=None):
    stats_buffers = {}
    for key, shape in shapes.items():
        mean = torch.ones(shape, dtype=torch.float32) * torch.inf
        std = torch.ones(shape, dtype=torch.float32) * torch.inf
        if stats is not None and key in stats:
            mean, std = stats[key]["mean"].clone(), stats[key]["std"].clone()
        stats_buffers[key] = nn.ParameterDict(
            {"mean": nn.Parameter(mean, requires_grad=False), "std": nn.Parameter(std, requires_grad=False)}
        )
    return stats_buffers


class Normalize(nn.Module):
    def __init__(self, shapes, stats=None):
        super().__init__()
        self.shapes = shapes
        for key, buffer in create_stats_buffers(shapes, stats).items():
            setattr(self, "buffer_" + key.replace(".", "_"), buffer)

    @torch.no_grad()
    def forward(self, batch):
        batch = dict(batch)  # shallow copy
        for key in self.shapes:
            buffer = getattr(self, "buffer_" + key.replace(".", "_"))
            mean, std = buffer["mean"], buffer["std"]
            batch[key] = (batch[key] - mean) / (std + 1e-8)
        return batch


class ChunkPolicy(nn.Module):
    def __init__(self, state_dim=6, action_dim=6, chunk_size=4, stats=None):
        super().__init__()
        self.chunk_size, self.action_dim = chunk_size, action_dim
        self.normalize_inputs = Normalize({"observation.state": (state_dim,)}, stats)
        self.normalize_targets = Normalize({"action": (action_dim,)}, stats)
        self.encoder = nn.Sequential(nn.Linear(state_dim, 32), nn.LayerNorm(32), nn.ReLU())
        self.action_head = nn.Linear(32, chunk_size * action_dim)

    def forward(self, batch):
        batch = self.normalize_inputs(batch)
        batch = self.normalize_targets(batch)
        h = self.encoder(batch["observation.state"])
        actions_hat = self.action_head(h).view(-1, self.chunk_size, self.action_dim)
        return nn.functional.l1_loss(actions_hat, batch["action"])


def pretrained_state_dict():
    stats = {"action": {"mean": torch.zeros(6), "std": torch.full((6,), 20.0)}}
    policy = ChunkPolicy(stats=stats)
    return {k: v for k, v in policy.state_dict().items() if not k.startswith("normalize_inputs")}  # saved by an older release


def build():
    torch.manual_seed(1078)
    state_dict = pretrained_state_dict()
    policy = ChunkPolicy()
    policy.load_state_dict(state_dict, strict=False)
    batch = {"observation.state": 30.0 * torch.randn(8, 6), "action": 20.0 * torch.randn(8, 4, 6)}
    optimizer = torch.optim.AdamW((p for p in policy.parameters() if p.requires_grad), lr=1e-5)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    loss = s.model(s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss
