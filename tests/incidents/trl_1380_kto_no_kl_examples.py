"""KTO mixes the mismatched KL pairs into the batch; a batch without any takes the mean of an empty tensor as the KL term.
https://github.com/huggingface/trl/pull/1380
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("mean",),
    index=(),
    masked=None,
    role=("kl",),
    fix=("guard_empty",),
    variable=("kl",),
    line=("kl = (policy[kind == 2] - reference[kind == 2]).mean().detach()",),
)


class LM(nn.Module):
    def __init__(self, vocab=15, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def sequence_logps(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))[:, :-1]
        labels = labels[:, 1:].clone()
        loss_mask = labels != -100
        labels[~loss_mask] = 0
        per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
        return (per_token * loss_mask).sum(-1)


class KTOTrainer:
    beta, desirable_weight, undesirable_weight = 0.1, 1.0, 1.33

    def __init__(self, model, ref_model):
        self.model, self.ref_model = model, ref_model

    def kto_loss(self, policy, reference, kind):
        kl = (policy[kind == 2] - reference[kind == 2]).mean().detach()
        kl = kl.clamp(min=0)
        logratios = policy - reference
        chosen_losses = 1 - F.sigmoid(self.beta * (logratios[kind == 1] - kl))
        rejected_losses = 1 - F.sigmoid(self.beta * (kl - logratios[kind == 0]))
        return torch.cat((self.desirable_weight * chosen_losses, self.undesirable_weight * rejected_losses), 0)

    def compute_loss(self, batch):
        policy = self.model.sequence_logps(batch["input_ids"], batch["labels"])
        with torch.no_grad():
            reference = self.ref_model.sequence_logps(batch["input_ids"], batch["labels"])
        return self.kto_loss(policy, reference, batch["kind"]).mean()


def build():
    torch.manual_seed(1380)
    model, ref_model = LM(), LM()
    ref_model.load_state_dict(model.state_dict())
    input_ids = torch.randint(1, 15, (4, 7))
    labels = input_ids.clone()
    labels[:, :3] = -100
    batch = {"input_ids": input_ids, "labels": labels, "kind": torch.tensor([1, 0, 0, 1])}  # 2 marks a KL pair
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, trainer=KTOTrainer(model, ref_model))


def run(s=None):
    s = s or build()
    loss = s.trainer.compute_loss(s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
