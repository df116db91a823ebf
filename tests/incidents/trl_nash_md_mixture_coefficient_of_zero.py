"""Nash-MD: the opponent is a geometric mixture of the reference and the policy, and the schedule of its coefficient starts at 0.

The mixture is coef * ref_logits + (1 - coef) * model_logits. The reference is served with its vocabulary padding set to -inf, which a mixture takes
well for every coef > 0. In the first epoch of the schedule (0.0, 0.1, 0.2) the coefficient is 0, and 0 * -inf is NaN: the log-softmax carries it over
the whole row, and the KL to the mixture makes the loss NaN.

Source: https://github.com/huggingface/trl (GeometricMixtureWrapper of the Nash-MD trainer, `mixture_coef` may be a list per epoch)
Heals: taking the policy alone when the coefficient is 0; a finite fill of the padding rows.
Does not: clamping the KL or its exponent (NaN stays), masking the response tokens (answered tokens are hit), a smaller KL coefficient.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef",),
    op=("mul", "setitem", "fill_"),
    index=(0, 0, 26),
    masked=None,
    role=("logits", "ref_log_probs"),
    fix=("skip_disabled_term", "finite_mask_fill", "mask_before_op", "clamp_input", "where_on_detached", "validate_config"),
    variable=("ref_part", "ref_logits"),
    line=("ref_part = self.mixture_coef * ref_logits", 'ref_logits[..., REAL:] = float("-inf")'),
)

REAL, PADDED = 26, 32


class Policy(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.embed = nn.Embedding(PADDED, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, PADDED)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class GeometricMixture:
    def __init__(self, model, ref_model, mixture_coef):
        self.model, self.ref_model, self.mixture_coef = model, ref_model, mixture_coef

    @torch.no_grad()
    def log_probs(self, tokens):
        ref_logits = self.ref_model(tokens)
        ref_logits[..., REAL:] = float("-inf")
        ref_part = self.mixture_coef * ref_logits
        model_part = (1.0 - self.mixture_coef) * self.model(tokens)
        return torch.log_softmax(ref_part + model_part, dim=-1)


def build():
    torch.manual_seed(17)
    model, ref_model = Policy(16), Policy(16)
    ref_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {
        "tokens": torch.randint(0, REAL, (4, 9)),
        "mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]] * 3 + [[0, 0, 1, 1, 1, 0, 0, 0]]).float(),
        "preference": torch.tensor([0.7, 0.4, 0.55, 0.2]),
        "mixture_coef": (0.0, 0.1, 0.2),
    }
    return SimpleNamespace(model=model, ref_model=ref_model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b, losses = s.batch, []
    for epoch in range(2):
        mixture = GeometricMixture(s.model, s.ref_model, b["mixture_coef"][epoch])
        inputs, targets = b["tokens"][:, :-1], b["tokens"][:, 1:, None]
        mixture_logps = mixture.log_probs(inputs).gather(2, targets).squeeze(-1)
        logps = torch.log_softmax(s.model(inputs), dim=-1).gather(2, targets).squeeze(-1)
        score = (b["preference"] - 0.5) * (logps * b["mask"]).sum(dim=1)
        kl = ((logps - mixture_logps).detach() * logps)[b["mask"].bool()].sum() / len(b["tokens"])
        loss = -score.mean() + 0.1 * kl
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
