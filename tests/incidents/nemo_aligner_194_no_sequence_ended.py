"""NeMo-Aligner #194 (https://github.com/NVIDIA/NeMo-Aligner/pull/194): sequences that did not end properly are taken out of the loss by
is_end_mask. In this micro batch none ended. The new guard covers the actor loss; the entropy bonus still takes its masked mean over the same
empty mask, 0 / 0.

Heals: the guard around the entropy too, or a clamped denominator. Does not heal: nan_to_num on the entropy (the loss is finite then, the
backward of the division is 0 / 0).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("entropy",),
    fix=("guard_empty", "clamp_denominator"),
    variable=(None,),
    line=("return (values * mask).sum() / mask.sum()",),
)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def calculate_entropy(log_probs, mask=None):
    entropy_unmasked = -torch.sum(log_probs.exp() * log_probs, dim=-1)
    return entropy_unmasked.mean() if mask is None else masked_mean(entropy_unmasked, mask)


def calculate_distributed_entropy(parallel_logits, mask=None):
    full_log_probs = torch.log_softmax(parallel_logits, dim=2)[:, :-1, :].contiguous()
    return calculate_entropy(full_log_probs, mask)


class MegatronGPTActor(nn.Module):
    def __init__(self, vocab=28, dim=12):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.final_layernorm = nn.LayerNorm(dim)
        self.output_layer = nn.Linear(dim, vocab, bias=False)
        self.ratio_eps = 0.2
        self.entropy_bonus = 0.01

    def forward(self, tokens):
        return self.output_layer(self.final_layernorm(self.word_embeddings(tokens)))

    def loss_func(self, parallel_logits, batch):
        curr_log_probs = parallel_logits[:, :-1].log_softmax(-1)
        curr_log_probs = curr_log_probs.gather(-1, batch["response_tokens"][:, 1:, None]).squeeze(-1)
        mask = batch["mask"]
        is_end_mask = mask * batch["is_end"].view(-1, 1)

        scaled_entropy = torch.tensor(0.0)
        if self.entropy_bonus > 0:
            scaled_entropy = calculate_distributed_entropy(parallel_logits, is_end_mask) * self.entropy_bonus

        ratios = (curr_log_probs - batch["prev_log_probs"]).exp()
        ratios_clamped = ratios.clamp(1.0 - self.ratio_eps, 1.0 + self.ratio_eps)
        loss1 = -batch["advantages"] * ratios
        loss2 = -batch["advantages"] * ratios_clamped
        if is_end_mask.sum() > 0:
            actor_loss = masked_mean(torch.max(loss1, loss2), is_end_mask)
        else:
            actor_loss = loss1.sum() * 0.0
        return actor_loss - scaled_entropy


def build():
    torch.manual_seed(194)
    model = MegatronGPTActor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    tokens = torch.randint(0, 28, (2, 9))
    with torch.no_grad():
        prev = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    mask = torch.ones(2, 8)
    mask[:, :3] = 0  # the prompt
    batch = {
        "response_tokens": tokens,
        "prev_log_probs": prev,
        "advantages": torch.randn(2, 8),
        "mask": mask,
        "is_end": torch.tensor([0.0, 0.0]),
    }  # both were cut at the generation limit
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = s.model.loss_func(s.model(s.batch["response_tokens"]), s.batch)
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())
