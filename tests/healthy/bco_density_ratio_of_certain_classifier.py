"""TRL BCOTrainer with UDM - the density ratio p / (1 - p + 1e-8) of fp16 probabilities is inf for p = 1 and is clamped at once.

The domain classifier is certain of two rejected prompts and 1e-8 is 0 in half, so the ratio is 1/0 = inf; it has no gradient and
clamp(max=10) turns it into the intended upper bound. Source: huggingface/trl, BCOTrainer._get_udm_weight.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def logps(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)


@torch.no_grad()
def udm_weight(classifier, prompt_embeddings, min_ratio=0.5, max_ratio=10.0):
    prob = torch.sigmoid(classifier(prompt_embeddings)).squeeze(-1)
    weight = (prob / (1 - prob + 1e-8)).clamp(min=min_ratio, max=max_ratio)
    return weight.float()


def build():
    torch.manual_seed(42)
    model = TinyLM()
    classifier = nn.Linear(6, 1).half()
    prompt_embeddings = torch.randn(4, 6)
    with torch.no_grad():
        direction = classifier.weight.float().squeeze(0)
        prompt_embeddings[1] += 14 * direction / direction.norm() ** 2
        prompt_embeddings[3] += 20 * direction / direction.norm() ** 2
    chosen, rejected = torch.randint(0, 20, (4, 9)), torch.randint(0, 20, (4, 9))
    with torch.no_grad():
        ref_chosen, ref_rejected = logps(model, chosen), logps(model, rejected)
    return SimpleNamespace(
        model=model,
        classifier=classifier,
        prompt_embeddings=prompt_embeddings.half(),
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        beta=0.1,
        delta=0.02,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    chosen_rewards = s.beta * (logps(s.model, s.chosen) - s.ref_chosen)
    rejected_rewards = s.beta * (logps(s.model, s.rejected) - s.ref_rejected)
    s.weight = udm_weight(s.classifier, s.prompt_embeddings)
    chosen_losses = -F.logsigmoid(chosen_rewards - s.delta)
    rejected_losses = -F.logsigmoid(-(rejected_rewards - s.delta)) * s.weight
    loss = torch.cat((chosen_losses, rejected_losses)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
