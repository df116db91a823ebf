"""FreeLB, adversarial steps on the embeddings of a half reward model - a pair that is already ranked with certainty.

FreeLB divides the gradient of its perturbation by its norm per row, clamped at 1e-8. In half 1e-8 is 0: a pair whose margin has saturated has a gradient of exact zeros, 0/0 becomes the
perturbation and the next adversarial forward is NaN. Source: https://github.com/zhuchen03/FreeLB/issues/8 (cast to float before the norm), run_glue_freelb.py (adversarial loop).
Heals: take norm and quotient in float32, a floor that half can hold (1e-4), torch.where on the norm (1 where it is 0; all of it is
detached, so nan_to_num of the quotient does as well).
Does not: the clamp at 1e-8 of the script, gradient clipping after the loop, a smaller adv_lr, the later clamp by adv_max_norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div", "truediv", "true_divide"),
    index=(1, 0, 0),
    masked=None,
    role=("grad", "hidden"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "where_on_detached", "mask_before_op"),
    variable=(None,),
    line=("delta = (delta + s.adv_lr * delta_grad / denorm).detach()",),
)


class RewardModel(nn.Module):
    def __init__(self, vocab=32, dim=8):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.dense = nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, inputs_embeds, attention_mask):
        h = torch.tanh(F.linear(inputs_embeds, self.dense.weight.half(), self.dense.bias.half()))
        m = attention_mask.unsqueeze(-1).half()
        pooled = (h * m).sum(1) / m.sum(1)
        return F.linear(pooled, self.score.weight.half()).squeeze(-1)


def build():
    torch.manual_seed(4)
    model = RewardModel()
    chosen = torch.randint(0, 16, (4, 5))
    rejected = torch.randint(0, 16, (4, 5))
    chosen[1] = 20
    rejected[1] = 21
    with torch.no_grad():
        w = model.score.weight[0]
        model.word_embeddings.weight[20] = 4.0 * (w @ model.dense.weight)
        model.word_embeddings.weight[21] = -4.0 * (w @ model.dense.weight)
        a = model(model.word_embeddings(chosen).half(), torch.ones(4, 5)) - model(model.word_embeddings(rejected).half(), torch.ones(4, 5))
        model.score.weight.mul_(26.0 / a[1].float())
    mask = torch.ones(4, 5)
    mask[2, 4:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6)
    return SimpleNamespace(
        model=model, optimizer=optimizer, chosen=chosen, rejected=rejected, mask=mask, adv_steps=3, adv_lr=0.02, adv_max_norm=0.3
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    delta = torch.zeros(s.chosen.size(0), s.chosen.size(1), s.model.word_embeddings.embedding_dim).half()
    tr_loss = 0.0
    for astep in range(s.adv_steps):
        delta.requires_grad_()
        embeds_init = s.model.word_embeddings(s.chosen).half()
        reward_chosen = s.model(embeds_init + delta, s.mask)
        reward_rejected = s.model(s.model.word_embeddings(s.rejected).half(), s.mask)
        loss = -F.logsigmoid(reward_chosen - reward_rejected).mean() / s.adv_steps
        tr_loss = tr_loss + loss.detach()
        loss.backward()
        if astep == s.adv_steps - 1:
            break
        delta_grad = delta.grad.clone().detach()
        denorm = torch.norm(delta_grad.view(delta_grad.size(0), -1), dim=1).view(-1, 1, 1)
        denorm = torch.clamp(denorm, min=1e-8)
        delta = (delta + s.adv_lr * delta_grad / denorm).detach()
        delta_norm = torch.norm(delta.view(delta.size(0), -1).float(), p=2, dim=1).detach()
        exceed_mask = (delta_norm > s.adv_max_norm).to(embeds_init)
        reweights = (s.adv_max_norm / delta_norm.clamp(min=1e-6) * exceed_mask + (1 - exceed_mask)).view(-1, 1, 1)
        delta = (delta * reweights).detach().to(embeds_init)
    s.optimizer.step()
    return tr_loss


if __name__ == "__main__":
    print(run())
