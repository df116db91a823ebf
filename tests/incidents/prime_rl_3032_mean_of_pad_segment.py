"""Padding-free RL trainer: the padding at the end of a pack is a segment of its own in seq_lens, and its mean log-prob is 0 / 0.

prime-rl's pack boundary contract appends the padding of an underfull pack as an explicit final segment. A length-normalised sequence loss sums the
log-probs per segment with index_add and divides by the number of loss tokens. The padding segment has none, its mean is NaN and is cut off right away
(`[: len(advantages)]`), so the loss is fine. In backward the division passes 0 / 0 = NaN to the sum of that segment, from there to the padding tokens,
where the loss mask of 0 does not stop it.
Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3032 and #2944 ("padding as its own seq_lens segment"); https://github.com/EleutherAI/bergson/pull/461 is the same trap with rows.
Heals: counts.clamp(min=1); cut the padding segment off before the division.
Does not: nan_to_num or torch.where on the means, multiplying by the mask once more, dropping the segment from the mean of the loss (it is dropped).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(3,),
    masked=True,
    role=("log_probs", "loss", "hidden"),
    fix=("clamp_denominator", "guard_empty", "mask_before_op", "drop_invalid_sample", "where_on_detached"),
    variable=("seq_logprobs",),
    line=("seq_logprobs = segment_sum / segment_count",),
)


class Trainee(nn.Module):
    def __init__(self, vocab=30, dim=16, max_len=64):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.embed_positions = nn.Embedding(max_len, dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, position_ids, segment_ids):
        x = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        n = x.shape[0]
        blocked = (segment_ids[:, None] != segment_ids[None]) | torch.ones(n, n, dtype=torch.bool).triu(1)
        y, _ = self.attn(x[None], x[None], x[None], attn_mask=blocked, need_weights=False)
        return self.lm_head(self.norm(x + y[0]))


def pack(samples, seq_len, pad_token_id=0):
    input_ids = [t for s in samples for t in s["ids"]]
    loss_mask = [m for s in samples for m in s["mask"]]
    seq_lens = [len(s["ids"]) for s in samples]
    padding_len = seq_len - len(input_ids)
    if padding_len:
        input_ids += [pad_token_id] * padding_len
        loss_mask += [0] * padding_len
        seq_lens.append(padding_len)
    seq_lens = torch.tensor(seq_lens)
    return dict(
        input_ids=torch.tensor(input_ids),
        loss_mask=torch.tensor(loss_mask, dtype=torch.float32),
        seq_lens=seq_lens,
        position_ids=torch.cat([torch.arange(n) for n in seq_lens]),
        segment_ids=torch.repeat_interleave(torch.arange(len(seq_lens)), seq_lens),
        advantages=torch.tensor([s["advantage"] for s in samples]),
    )


def sequence_loss(logprobs, mb):
    n = len(mb["seq_lens"])
    segment_sum = logprobs.new_zeros(n).index_add(0, mb["segment_ids"], logprobs * mb["loss_mask"])
    segment_count = logprobs.new_zeros(n).index_add(0, mb["segment_ids"], mb["loss_mask"])
    seq_logprobs = segment_sum / segment_count
    seq_logprobs = seq_logprobs[: len(mb["advantages"])]
    return -(mb["advantages"] * seq_logprobs).mean()


def build():
    torch.manual_seed(2)
    model = Trainee()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    g = torch.Generator().manual_seed(4)
    samples = []
    for prompt_len, length, advantage in ((4, 13, 0.9), (3, 8, -0.5), (6, 17, -0.4)):
        ids = torch.randint(1, 30, (length,), generator=g).tolist()
        samples.append(dict(ids=ids, mask=[0] * prompt_len + [1] * (length - prompt_len), advantage=advantage))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=pack(samples, seq_len=48))


def run(s=None):
    s = s or build()
    mb = s.batch
    history = []
    for _ in range(2):
        logits = s.model(mb["input_ids"], mb["position_ids"], mb["segment_ids"])
        targets = mb["input_ids"].roll(-1)
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1).roll(1)
        loss = sequence_loss(logprobs, mb)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        history.append(loss.item())
    return history


if __name__ == "__main__":
    print(run())
