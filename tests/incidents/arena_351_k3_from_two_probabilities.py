"""ARENA 3.0, chapter 2.4 RLHF, calc_kl_penalty - the k3 estimator with a ratio of two probabilities.

Both log-probs of a sampled token are near -150: each exp underflows to 0 in float32, their quotient is 0 / 0, though the log ratio is 0.4 only.
(Source: callummcdougall/ARENA_3.0 PR 351, part4_rlhf, the implementation that its test is written against.) Heals: (ref_logprobs - logprobs).exp(); clamping both probabilities
at 1e-30 from below or both log-probs at -40 (finite, the ratio of the underflowed pair
becomes 1); clamping the denominator alone. Does not: an epsilon of 1e-50; nan_to_num of the KL (the gradient stays NaN); a smaller kl_coef.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div", "truediv", "/"),
    index=(1, 4),
    masked=None,
    role=("ratio", "kl"),
    fix=(
        "stable_function",
        "clamp_denominator",
        "clamp_input",
        "clamp_exponent",
        "avoid_singular_op",
        "mask_before_op",
        "representable_eps",
        "drop_invalid_sample",
    ),
    variable=("ratio",),
    line=("ratio = ref_logprobs.exp() / logprobs.exp()",),
)


class TransformerWithValueHead(nn.Module):
    def __init__(self, d_vocab=25, d_model=16):
        super().__init__()
        self.embed = nn.Embedding(d_vocab, d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 32), nn.ReLU(), nn.Linear(32, d_model))
        self.unembed = nn.Linear(d_model, d_vocab)
        self.value_head = nn.Linear(d_model, 1)

    def forward(self, input_ids):
        resid = self.embed(input_ids)
        resid = resid + self.mlp(resid)
        return self.unembed(resid), self.value_head(resid).squeeze(-1)


def get_logprobs(logits, tokens, prefix_len):
    logprobs = logits.log_softmax(-1)[:, prefix_len - 1 : -1]
    return logprobs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1)


def calc_kl_penalty(logprobs, ref_logprobs, kl_coef):
    ratio = ref_logprobs.exp() / logprobs.exp()
    kl = ratio - 1 - (ref_logprobs - logprobs)
    return kl_coef * kl.sum(dim=1).mean()


def calc_clipped_surrogate_objective(logprobs, mb_logprobs, mb_advantages, clip_coef):
    ratio = torch.exp(logprobs - mb_logprobs)
    non_clipped = ratio * mb_advantages
    clipped = torch.clip(ratio, 1 - clip_coef, 1 + clip_coef) * mb_advantages
    return torch.minimum(non_clipped, clipped).mean()


def build():
    torch.manual_seed(351)
    args = SimpleNamespace(prefix_len=3, kl_coef=1.0, clip_coef=0.2, vf_coef=0.15)
    model = TransformerWithValueHead()
    with torch.no_grad():
        model.unembed.bias[24] = -147.0
    ref_model = TransformerWithValueHead()
    ref_model.load_state_dict(model.state_dict())
    with torch.no_grad():
        ref_model.unembed.bias[24] += 0.4
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, maximize=True)
    sample_ids = torch.randint(0, 24, (4, 9))
    sample_ids[1, 7] = 24
    with torch.no_grad():
        mb_logprobs = get_logprobs(model(sample_ids)[0], sample_ids, args.prefix_len)
        ref_logprobs = get_logprobs(ref_model(sample_ids)[0], sample_ids, args.prefix_len)
    rewards = torch.tensor([1.2, -0.3, 0.4, -1.3])
    returns = rewards[:, None].expand(4, 6)
    return SimpleNamespace(
        args=args,
        model=model,
        optimizer=optimizer,
        sample_ids=sample_ids,
        mb_logprobs=mb_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=returns - returns.mean(),
        returns=returns,
    )


def run(s=None):
    s = s or build()
    args = s.args
    logits, values = s.model(s.sample_ids)
    logprobs = get_logprobs(logits, s.sample_ids, args.prefix_len)
    value_loss = args.vf_coef * (values[:, args.prefix_len - 1 : -1] - s.returns).pow(2).mean()
    surrogate = calc_clipped_surrogate_objective(logprobs, s.mb_logprobs, s.advantages, args.clip_coef)
    kl_penalty = calc_kl_penalty(logprobs, s.ref_logprobs, args.kl_coef)
    total_objective_function = surrogate - value_loss - kl_penalty
    s.optimizer.zero_grad()
    total_objective_function.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=1.0)
    s.optimizer.step()
    return total_objective_function


if __name__ == "__main__":
    print(run())
