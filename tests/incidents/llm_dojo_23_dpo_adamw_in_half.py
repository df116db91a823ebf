"""DPO of a policy loaded in fp16 on a V100: the first loss is 0.69, and after one step every logit is NaN.

Loss and gradients of the first step are finite. The weights are fp16, so are AdamW's moments and its denominator sqrt(v) + eps, in which eps = 1e-8
rounds to 0. Tokens that are not in the batch have a gradient of exactly 0: 0 / 0 for their embeddings.
Source: https://github.com/mst272/LLM-Dojo/issues/23 ("step one normal, loss 0.69, after loss.backward() the policy's logits are all nan"; cured by fp32).
Heals: eps of 1e-4, fp32 weights or moments. Does not: gradient clipping, a smaller learning rate, a smaller beta.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero", "zero_denominator"),
    op=("addcdiv_", "addcdiv", "div", "adamw", "AdamW"),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("embed.weight", None),
    line=("s.optimizer.step()",),
)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mix(self.embed(ids))))


def get_batch_logps(logits, ids, mask):
    logp = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logp * mask[:, 1:]).sum(-1)


def build():
    torch.manual_seed(23)
    policy = Policy().half()
    ref = Policy().half()
    ref.load_state_dict(policy.state_dict())
    ref.requires_grad_(False)
    ids = torch.tensor([[1, 5, 9, 7, 2], [1, 5, 12, 3, 2], [1, 6, 8, 8, 2], [1, 6, 15, 4, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1]]).expand(4, -1).float()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    return SimpleNamespace(model=policy, ref=ref, optimizer=optimizer, batch=dict(ids=ids, mask=mask), beta=0.1)


def run(s=None):
    s = s or build()
    ids, mask = s.batch["ids"], s.batch["mask"]
    for _ in range(2):
        logps = get_batch_logps(s.model(ids), ids, mask)
        with torch.no_grad():
            ref_logps = get_batch_logps(s.ref(ids), ids, mask)
        margin = (logps - ref_logps)[0::2] - (logps - ref_logps)[1::2]
        loss = -F.logsigmoid(s.beta * margin).mean() * 256.0  # static loss scale, undone below
        s.optimizer.zero_grad()
        loss.backward()
        for p in s.model.parameters():
            p.grad.div_(256.0)
        s.optimizer.step()
    return float(loss.detach()) / 256.0


if __name__ == "__main__":
    print(run())
