"""radixark/miles, truncated importance sampling - the rollout engine answered null for one token's log-prob.

SGLang's JSON carries a NaN as null, the loader makes NaN of it again and the token is a counted one. The truncation keeps it, weight and loss are NaN.
(Source: radixark/miles PR 2662, fail fast on invalid rollout_log_probs.) Heals: refusing or dropping the sample before training; taking the trainer's own old log-prob for this token (weight 1);
leaving the token out (where before the subtraction, mask 0). Does not: torch.clamp(tis, max) (NaN passes); setting only the loss mask of the token to 0 (NaN * 0); a lower cap.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("input",),
    index=(1, 2),
    masked=False,
    role=("rollout_log_probs",),
    fix=("drop_invalid_sample", "reject_input", "mask_before_op", "fix_upstream", "where_on_detached"),
    variable=("rollout_log_probs", 'batch["rollout_log_probs"]'),
    line=(
        'tis = torch.exp(old_log_probs - batch["rollout_log_probs"])',
        'rollout_log_probs = torch.tensor([[float("nan") if x is None else x for x in row] for row in noisy])',
    ),
)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layer = nn.GRU(dim, dim, batch_first=True)
        self.output_layer = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.output_layer(self.layer(self.embedding(tokens))[0])


def token_log_probs(model, tokens, response_length):
    logits = model(tokens)[:, -response_length - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, -response_length:, None]).squeeze(-1)


def build():
    torch.manual_seed(2662)
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    tokens = torch.randint(0, 16, (4, 10))
    loss_masks = torch.ones(4, 6)
    loss_masks[3, 4:] = 0
    with torch.no_grad():
        log_probs = token_log_probs(model, tokens, 6)
    noisy = (log_probs + 0.02 * torch.randn(4, 6)).clamp(max=0.0).tolist()
    noisy[1][2] = None
    rollout_log_probs = torch.tensor([[float("nan") if x is None else x for x in row] for row in noisy])
    batch = dict(
        tokens=tokens,
        loss_masks=loss_masks,
        log_probs=log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=torch.tensor([1.0, -0.6, 0.9, -1.3]),
    )
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, eps_clip=0.2, tis_clip=2.0)


def policy_loss(model, batch, eps_clip, tis_clip):
    old_log_probs = batch["log_probs"]
    loss_masks = batch["loss_masks"]
    log_probs = token_log_probs(model, batch["tokens"], 6)
    advantages = batch["advantages"].unsqueeze(1)
    ratio = (log_probs - old_log_probs).exp()
    pg_loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages)
    tis = torch.exp(old_log_probs - batch["rollout_log_probs"])
    tis_weights = torch.clamp(tis, max=tis_clip)
    pg_loss = pg_loss * tis_weights
    return (pg_loss * loss_masks).sum() / loss_masks.sum().clamp(min=1)


def run(s=None):
    s = s or build()
    loss = policy_loss(s.model, s.batch, s.eps_clip, s.tis_clip)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
