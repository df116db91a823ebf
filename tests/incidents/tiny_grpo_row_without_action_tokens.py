"""tiny-grpo, per-row masked mean over a completion without action tokens.

The padding token is the end token, so an answer that ends at once has an action mask of zeros; masked_mean(..., dim=-1) divides 0 by 0 for its row and the mean over rows is NaN.
(Source: open-thought/tiny-grpo, loss.py, masked_mean and GRPOLoss; train.py, rollout and its action_mask; train.py skips a batch of
non-finite loss, this loop has no such check.) Heals: clamping the denominator at 1; leaving the row out of the
batch before the loss; an epsilon in the denominator; skipping the
batch. Does not: nanmean over the rows (loss finite, gradient NaN); nan_to_num on the row means.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div", "truediv"),
    index=(2,),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "representable_eps", "fix_upstream", "skip_bad_step"),
    variable=(None,),
    line=("return (tensor * mask).sum(axis=dim) / mask.sum(axis=dim)",),
)

EOS = 2


class Llama(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed_tokens(input_ids))[0])


def approx_kl_divergence(log_probs, log_probs_ref, action_mask):
    log_ratio = log_probs_ref.float() - log_probs.float()
    if action_mask is not None:
        log_ratio = log_ratio * action_mask
    return log_ratio.exp() - log_ratio - 1


def masked_mean(tensor, mask, dim=None):
    if mask is None:
        return tensor.mean(axis=dim)
    return (tensor * mask).sum(axis=dim) / mask.sum(axis=dim)


class GRPOLoss(nn.Module):
    def __init__(self, clip_eps, kl_weight):
        super().__init__()
        self.clip_eps = clip_eps
        self.kl_weight = kl_weight

    def forward(self, log_probs, experience):
        kl = approx_kl_divergence(log_probs, experience.log_probs_ref, experience.action_mask)
        ratio = (log_probs - experience.action_log_probs).exp()
        surr1 = ratio * experience.advantages
        surr2 = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * experience.advantages
        loss = -torch.min(surr1, surr2) + self.kl_weight * kl
        loss = masked_mean(loss, experience.action_mask, dim=-1).mean()
        return loss, kl.mean()


def sequences_log_probs(model, sequence_ids):
    logits = model(sequence_ids)[:, :-1].to(torch.float32)
    return logits.log_softmax(dim=-1).gather(-1, sequence_ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def group_advantages(returns, eps=1e-8):
    return (returns - returns.mean()) / (returns.std() + eps)


def build():
    torch.manual_seed(23)
    model = Llama()
    prompt_length = 4
    sequence_ids = torch.randint(3, 24, (4, 12))
    sequence_ids[0, 10:] = EOS
    sequence_ids[2, prompt_length:] = EOS
    sequence_ids[3, 7:] = EOS
    action_mask = torch.zeros_like(sequence_ids, dtype=torch.bool)
    action_mask[:, prompt_length:] = True
    action_mask[sequence_ids == EOS] = False
    log_probs = sequences_log_probs(model, sequence_ids).detach()
    experience = SimpleNamespace(
        sequences=sequence_ids,
        action_log_probs=log_probs,
        log_probs_ref=log_probs + 0.05 * torch.randn_like(log_probs),
        advantages=group_advantages(torch.tensor([1.0, 0.5, 0.0, 0.0])).unsqueeze(1),
        action_mask=action_mask[:, 1:],
    )
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-4),
        objective=GRPOLoss(clip_eps=0.2, kl_weight=0.01),
        experience=experience,
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    log_probs = sequences_log_probs(s.model, s.experience.sequences)
    loss, kl = s.objective(log_probs, s.experience)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
