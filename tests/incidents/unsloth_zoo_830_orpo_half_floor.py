"""ORPO floors 1 - p at 1e-12, which is 0 in float16, so a certain rejected answer still reaches the log as zero.
https://github.com/unslothai/unsloth-zoo/pull/830
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(1,),
    masked=False,
    role=("log_probs",),
    fix=("representable_eps", "upcast_fp32", "stable_function", "clamp_input"),
    variable=(None,),
    line=("log_odds = (logp_c - torch.log(val_c)) - (logp_r - torch.log(val_r))",),
)


class ChatModel(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def orpo_terms(logits, batch, mask, beta=0.1):
    logp_all = logits[:, :-1].log_softmax(-1)
    logp_tok = logp_all.gather(-1, batch[:, 1:, None]).squeeze(-1) * mask
    ntok_row = mask.sum(1)
    logp = logp_tok.sum(1) / torch.clamp(ntok_row, min=1.0)
    half = batch.shape[0] // 2
    logp_c, logp_r = logp[:half], logp[half:]
    sft = -logp_c.mean()
    floor = torch.tensor(1e-12, dtype=logp.dtype)
    val_c = torch.maximum(-torch.expm1(logp_c), floor)
    val_r = torch.maximum(-torch.expm1(logp_r), floor)
    log_odds = (logp_c - torch.log(val_c)) - (logp_r - torch.log(val_r))
    return sft - beta * F.logsigmoid(log_odds).mean()


def build():
    torch.manual_seed(830)
    model = ChatModel()
    with torch.no_grad():
        model.embed.weight[7] = 5.0
        model.head.weight[3] = 2.0
    model = model.half()
    batch = torch.randint(0, 7, (6, 5))
    batch[4] = torch.tensor([1, 6, 2, 7, 3])
    mask = torch.ones(6, 4, dtype=torch.float16)
    mask[4, :3] = 0  # single-token answer
    mask[0, 0] = 0
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=(batch, mask))


def run(s=None):
    s = s or build()
    batch, mask = s.batch
    loss = orpo_terms(s.model(batch), batch, mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
