"""MallowsPO / RainbowPO trainer, loss_type="cauchy", in pure bfloat16: the Cauchy CDF atan(x)/pi + 0.5 of a misordered pair rounds to 0.

The preference probability is the Cauchy distribution function of the margin, and the loss its negative logarithm. For a margin of -240 the true value
is 0.0013. But atan(-240) = -1.5666 is rounded to -1.5703 in bfloat16 (eight bits), divided by pi this is -0.4999, which rounds to -0.5, the sum is
exactly 0 and log(0) is -inf. The gradient 1/0 follows. The second pair is such a one: the policy has drifted 4 nats per token off a 60-token answer.
Source: https://github.com/haoxian-chen/MallowsPO/blob/main/mallowsPO_trainer.py (dpo_loss, "cauchy"; the same in CapitalOne-Research/RainbowPO).
Heals: logits.float() before the loss; atan2(1, -x) / pi, which is the same function without cancellation; a floor under the argument of the log.
Does not: fp32 master weights with the loss still in bf16, a smaller learning rate, label smoothing, clipping the norm.
"""

import copy
import math
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1,),
    masked=None,
    role=("loss", "log_probs"),
    fix=("upcast_fp32", "stable_function", "clamp_input"),
    variable=(None,),
    line=("losses = -((self.beta * logits).atan() / math.pi + 0.5).log()",),
)

VOCAB, DIM = 48, 16


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.up = nn.Linear(DIM, DIM)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        h = self.embed_tokens(ids)
        return self.lm_head(h + torch.nn.functional.silu(self.up(h)))


class DPOTrainer:
    beta, home_advantage = 1.0, 0.0

    def __init__(self, model, ref_model, optimizer):
        self.model, self.ref_model, self.optimizer = model, ref_model, optimizer

    @staticmethod
    def get_batch_logps(logits, labels):
        labels = labels[:, 1:]
        loss_mask = labels != -100
        logps = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        return (logps * loss_mask).sum(-1)

    def dpo_loss(self, policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps):
        pi_logratios = policy_chosen_logps - policy_rejected_logps
        ref_logratios = reference_chosen_logps - reference_rejected_logps
        logits = pi_logratios - ref_logratios - self.home_advantage
        losses = -((self.beta * logits).atan() / math.pi + 0.5).log()
        chosen_rewards = self.beta * (policy_chosen_logps - reference_chosen_logps).detach()
        rejected_rewards = self.beta * (policy_rejected_logps - reference_rejected_logps).detach()
        return losses, (chosen_rewards > rejected_rewards).float().mean()

    def step(self, batch):
        ids, labels = batch["concatenated_input_ids"], batch["concatenated_labels"]
        half = len(ids) // 2
        logps = self.get_batch_logps(self.model(ids), labels)
        with torch.no_grad():
            ref_logps = self.get_batch_logps(self.ref_model(ids), labels)
        losses, accuracy = self.dpo_loss(logps[:half], logps[half:], ref_logps[:half], ref_logps[half:])
        loss = losses.mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), accuracy.item()


def build():
    torch.manual_seed(9)
    model = LM().to(torch.bfloat16)
    ref_model = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():  # tokens 40.. have been unlearned by the updates before
        model.lm_head.bias[40:] -= 4.2
    chosen = torch.randint(2, 40, (3, 64))
    chosen[1, 4:] = torch.randint(40, 48, (60,))
    rejected = torch.randint(2, 40, (3, 64))
    ids = torch.cat([chosen, rejected])
    labels = ids.clone()
    labels[:, :4] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = {"concatenated_input_ids": ids, "concatenated_labels": labels}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, trainer=DPOTrainer(model, ref_model, optimizer))


def run(s=None):
    s = s or build()
    return [s.trainer.step(s.batch) for _ in range(2)]


if __name__ == "__main__":
    print(run())
