"""A critic built on the meta device for FSDP: the checkpoint of the language model has no value head, and nobody initialises it.

to_empty() gives every parameter fresh memory, load_state_dict(strict=False) fills the backbone, and "score.weight" stays what the
allocator returned (torch fills it with NaN here, as deterministic mode does). values, vf_loss and grad_norm are NaN from the first step.

Source: https://github.com/verl-project/verl/issues/4060 and #498 (critic/grad_norm:nan, vpred_mean:nan from step 1); verl load_valuehead_model with
meta-device init. Heals: initialising the missing head after the load. Does not: a lower critic learning rate, clipping, skipping the step.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("linear", "mm", "addmm", "matmul", "empty_like"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("score.weight",),
    line=("return self.score(hidden).squeeze(-1)", 'critic.to_empty(device="cpu")'),
)


class ValueModel(nn.Module):
    def __init__(self, vocab=18, hidden=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layer = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, input_ids):
        hidden = torch.nn.functional.silu(self.layer(self.embed(input_ids)))
        return self.score(hidden).squeeze(-1)


def load_valuehead_model(state_dict):
    with torch.device("meta"):
        critic = ValueModel()
    torch.use_deterministic_algorithms(True)
    critic.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    missing, unexpected = critic.load_state_dict(state_dict, strict=False)
    assert not unexpected
    return critic


def compute_value_loss(vpreds, returns, values, response_mask, cliprange_value=0.5):
    vpredclipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    vf_losses1 = (vpreds - returns) ** 2
    vf_losses2 = (vpredclipped - returns) ** 2
    return 0.5 * (torch.max(vf_losses1, vf_losses2) * response_mask).sum() / response_mask.sum()


def build():
    torch.manual_seed(6)
    pretrained = {"embed.weight": torch.randn(18, 12) * 0.1, "layer.weight": torch.randn(12, 12) * 0.2, "layer.bias": torch.zeros(12)}
    critic = load_valuehead_model(pretrained)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-5)
    mask = torch.ones(3, 6)
    mask[2, 4:] = 0
    batch = {"responses": torch.randint(0, 18, (3, 6)), "returns": torch.rand(3, 6), "values": torch.zeros(3, 6), "response_mask": mask}
    return SimpleNamespace(model=critic, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        vpreds = s.model(b["responses"])
        vf_loss = compute_value_loss(vpreds, b["returns"], b["values"], b["response_mask"])
        s.optimizer.zero_grad()
        vf_loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return vf_loss.item()


if __name__ == "__main__":
    print(run())
