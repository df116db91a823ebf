"""transformers #10674 - label smoothing of a model in pure fp16: the smoothed term sums the negative log-probabilities of the whole
vocabulary in half precision, 4096 values of about 20 are more than 65504, so every token's smoothed loss is inf and so is the loss.

https://github.com/huggingface/transformers/issues/10674 ("in fp32 the return values are 863637 ... in fp16 these turn inf").
Heals: sum in fp32 (`sum(..., dtype=torch.float32)`, the fix that was merged), or cast the log-probs. Tempting and useless: casting the
sum or the loss to fp32 afterwards. Gradients stay finite; what is lost is the loss itself (and the best checkpoint chosen by it).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("sum",),
    index=(0, 0, 0),
    masked=False,
    role=("log_probs", "loss"),
    fix=("upcast_fp32",),
    variable=("smoothed_loss",),
    line=("smoothed_loss = log_probs.sum(dim=-1, keepdim=True)",),
)


class LabelSmoother:
    """Adds label smoothing to a pre-computed output, ignoring the padding."""

    def __init__(self, epsilon=0.1, ignore_index=-100):
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def __call__(self, logits, labels):
        log_probs = -nn.functional.log_softmax(logits, dim=-1)
        labels = labels.unsqueeze(-1)
        padding_mask = labels.eq(self.ignore_index)
        nll_loss = log_probs.gather(dim=-1, index=labels.clamp(min=0))
        smoothed_loss = log_probs.sum(dim=-1, keepdim=True)

        nll_loss = nll_loss.masked_fill(padding_mask, 0.0)
        smoothed_loss = smoothed_loss.masked_fill(padding_mask, 0.0)

        num_active = padding_mask.numel() - padding_mask.long().sum()
        nll_loss = nll_loss.sum() / num_active
        smoothed_loss = smoothed_loss.sum() / (num_active * log_probs.shape[-1])
        return (1 - self.epsilon) * nll_loss + self.epsilon * smoothed_loss


class TinySeq2Seq(nn.Module):
    def __init__(self, vocab=4096, dim=16):
        super().__init__()
        self.shared = nn.Embedding(vocab, dim)
        self.decoder = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.lm_head.weight, std=2.0)

    def forward(self, decoder_input_ids):
        hidden = self.shared(decoder_input_ids)
        return self.lm_head(hidden + torch.tanh(self.decoder(hidden)))


def shift_right(labels, start_id=0):
    shifted = labels.clamp(min=0).roll(1, dims=-1)
    shifted[:, 0] = start_id
    return shifted


def build():
    torch.manual_seed(10674)
    model = TinySeq2Seq().half()
    labels = torch.randint(1, 4096, (2, 6))
    labels[1, 4:] = -100  # the second summary is shorter
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, labels=labels, label_smoother=LabelSmoother(0.1))


def run(s=None):
    s = s or build()
    logits = s.model(shift_right(s.labels))
    loss = s.label_smoother(logits, s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
