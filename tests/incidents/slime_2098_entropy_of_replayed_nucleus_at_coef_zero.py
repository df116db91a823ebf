"""PPO actor loss on logits to which the top-p nucleus of the rollout is replayed; entropy_coef is 0.

The tokens outside the nucleus are filled with -inf, as the sampler did; the log-prob of the sampled token is fine. The actor loss however always asks
for the entropy of the full vocabulary and multiplies it by entropy_coef afterwards: p * log p = 0 * -inf = NaN, and NaN * 0.0 is still NaN.

Source: https://github.com/THUDM/slime/pull/2098 (policy_loss_function always requests the entropy and multiplies by args.entropy_coef, also at 0).
Heals: no entropy term at coefficient 0, a finite fill of the masked logits, a zero in place of log p where p is 0 (before the product), logsumexp - sum(p * finite logits).  Does not: torch.where after the product, xlogy or entr (their gradients are infinite at 0), a mask over the tokens.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(0, 0, 1),
    masked=False,
    role=("entropy", "hidden"),
    fix=(
        "skip_disabled_term",
        "finite_mask_fill",
        "stable_function",
        "mask_before_op",
        "where_on_detached",
        "clamp_input",
        "avoid_singular_op",
    ),
    variable=(None,),
    line=("entropy = -(probs * log_probs).sum(-1)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layer = nn.Linear(dim, dim)
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        return self.output_layer(torch.tanh(self.layer(self.embedding(tokens))))


def replay_top_p(logits, top_p=0.8):
    sorted_logits, order = logits.detach().sort(dim=-1, descending=True)
    cumulative = sorted_logits.softmax(-1).cumsum(-1)
    drop = (cumulative - sorted_logits.softmax(-1)) >= top_p
    outside = torch.zeros_like(drop).scatter(-1, order, drop)
    return outside


def get_log_probs_and_entropy(logits, labels):
    log_probs = F.log_softmax(logits, dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum(-1)
    return torch.gather(log_probs, -1, labels.unsqueeze(-1)).squeeze(-1), entropy


def build():
    torch.manual_seed(2102)
    actor = Actor()
    tokens = torch.randint(0, 24, (2, 6))
    with torch.no_grad():
        logits = actor(tokens)
        outside = replay_top_p(logits)
        log_probs = logits.masked_fill(outside, float("-inf")).log_softmax(-1)
        labels = torch.distributions.Categorical(logits=log_probs).sample()
        old_log_probs = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss_masks = torch.ones(2, 6)
    loss_masks[1, 4:] = 0
    batch = dict(
        tokens=tokens,
        labels=labels,
        outside=outside,
        old_log_probs=old_log_probs,
        loss_masks=loss_masks,
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 6),
    )
    args = SimpleNamespace(entropy_coef=0.0, eps_clip=0.2)
    return SimpleNamespace(model=actor, optimizer=torch.optim.Adam(actor.parameters(), lr=1e-3), batch=batch, args=args)


def policy_loss_function(args, model, batch):
    logits = model(batch["tokens"])
    logits = logits.masked_fill(batch["outside"], float("-inf"))
    log_probs, entropy = get_log_probs_and_entropy(logits, batch["labels"])
    ratio = (log_probs - batch["old_log_probs"]).clamp(-20, 20).exp()
    pg_loss = torch.maximum(-ratio * batch["advantages"], -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip) * batch["advantages"])
    mask = batch["loss_masks"]
    pg_loss = (pg_loss * mask).sum() / mask.sum()
    entropy_loss = (entropy * mask).sum() / mask.sum()
    return pg_loss - args.entropy_coef * entropy_loss


def run(s=None):
    s = s or build()
    loss = policy_loss_function(s.args, s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
