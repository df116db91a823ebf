"""nano-aha-moment, compute_pg_loss - K3 penalty of a token that the policy gave up.

The policy has pushed one token to a log-prob near -97 while the reference keeps it likely; the answer was sampled by an older policy and contains it, on a
response position. exp(ref_logps - logps) is inf, the penalty and the loss too. (Source: McGill-NLP/nano-aha-moment, nano_r1_script.py, compute_pg_loss,
utils.py, compute_token_log_probs.) Heals: clamping ref_logratio to [-20, 20] before the exp; a floor on logps; leaving the answer out. Does not:
labels_mask (the token counts), expm1, a smaller KL_COEFFICIENT, clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 6),
    masked=False,
    role=("kl", "ratio"),
    fix=("clamp_exponent", "clamp_input", "drop_invalid_sample", "skip_bad_step"),
    variable=(None,),
    line=("kl_penalty = torch.exp(ref_logratio) - 1 - ref_logratio",),
)

TEMPERATURE = 1.0
KL_COEFFICIENT = 0.001


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def compute_token_log_probs(model, inputs, temperature):
    logits = model(inputs["input_ids"]) / temperature
    shift_logits = logits[..., :-1, :]
    shift_labels = inputs["labels"][..., 1:].clone()
    shift_labels_mask = inputs["labels_mask"][..., 1:]
    shift_labels[~(shift_labels_mask.bool())] = 0
    log_probs = shift_logits.log_softmax(dim=-1).gather(-1, shift_labels.unsqueeze(-1)).squeeze(-1)
    return log_probs * shift_labels_mask


def compute_pg_loss(policy_model, batch, total_response_len):
    labels_mask = batch["labels_mask"]
    advantages = batch["advantages"]
    ref_logps = batch["ref_log_probs"]

    logps = compute_token_log_probs(policy_model, batch, TEMPERATURE)
    labels_mask = labels_mask[..., 1:].to(logps.dtype)

    ref_logratio = ref_logps - logps
    kl_penalty = torch.exp(ref_logratio) - 1 - ref_logratio
    kl_penalty = kl_penalty * labels_mask

    policy_loss = -logps * advantages[..., 1:]
    policy_loss = policy_loss * labels_mask

    loss = (policy_loss + KL_COEFFICIENT * kl_penalty).sum() / total_response_len
    return loss


def build():
    torch.manual_seed(5)
    reference, policy = Policy(), Policy()
    policy.load_state_dict(reference.state_dict())
    with torch.no_grad():
        policy.lm_head.bias[9] -= 94.0
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    input_ids = torch.randint(10, 18, (3, 10))
    input_ids[1, 7] = 9
    labels = input_ids.clone()
    labels_mask = torch.ones(3, 10, dtype=torch.long)
    labels_mask[:, :4] = 0
    labels_mask[0, 8:] = 0
    labels_mask[2, 9:] = 0
    labels[labels_mask == 0] = -100
    batch = dict(input_ids=input_ids, labels=labels, labels_mask=labels_mask)
    with torch.no_grad():
        batch["ref_log_probs"] = compute_token_log_probs(reference, batch, TEMPERATURE)
    batch["advantages"] = torch.tensor([[0.75], [-1.1], [0.35]]).expand(3, 10) * labels_mask
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    loss = compute_pg_loss(s.model, s.batch, s.batch["labels_mask"].sum())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
