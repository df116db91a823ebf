"""Multi-token prediction beside a DPO/SFT loss, on the context-parallel rank that holds the tail of the sequence.

The MTP head shifts labels and loss mask by one.  On this rank the only supervised token is the first of the chunk: after the roll the mask is
empty, num_tokens is 0 and the masked MTP loss is divided by it.  The autograd function that hangs the MTP loss on the hidden states returns them
unchanged, so the loss that is logged stays finite; its backward sends a one into the division, 1/0 meets the zero mask, and all gradients are NaN.

Source: https://github.com/modelscope/mcore-bridge/pull/104 (and https://github.com/NVIDIA/Megatron-LM/pull/3396)
Heals: num_tokens.clamp(min=1), or no MTP term on a rank without tokens.
Does not: a smaller mtp_loss_scaling_factor, clipping of gradients, masking the MTP loss again after the division.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("empty_mask_mean", "zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=True,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "skip_disabled_term"),
    variable=("scaled_mtp_loss",),
    line=("scaled_mtp_loss = mtp_loss_scale * mtp_loss / num_tokens",),
)

VOCAB, HIDDEN = 32, 16


class MTPLossAutoScaler(torch.autograd.Function):
    main_loss_backward_scale = torch.tensor(1.0)

    @staticmethod
    def forward(ctx, output, mtp_loss):
        ctx.save_for_backward(mtp_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output):
        (mtp_loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(mtp_loss) * MTPLossAutoScaler.main_loss_backward_scale


def roll_tensor(tensor, shifts=-1, dims=-1):
    rolled = torch.roll(tensor, shifts=shifts, dims=dims)
    rolled.select(dims, shifts).fill_(0)
    return rolled, rolled.sum()


class GPTModelWithMTP(nn.Module):
    def __init__(self, mtp_loss_scaling_factor=0.1):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.decoder = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.mtp_proj = nn.Linear(2 * HIDDEN, HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.mtp_loss_scaling_factor = mtp_loss_scaling_factor

    def token_loss(self, hidden, labels):
        logits = self.output_layer(hidden)
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")

    def process_mtp_loss(self, hidden_states, input_ids, labels, loss_mask):
        mtp_ids, _ = roll_tensor(input_ids)
        mtp_labels, _ = roll_tensor(labels)
        mtp_mask, num_tokens = roll_tensor(loss_mask)
        mtp_hidden = torch.tanh(self.mtp_proj(torch.cat([hidden_states, self.embedding(mtp_ids)], dim=-1)))
        mtp_loss = mtp_mask * self.token_loss(mtp_hidden, mtp_labels)
        mtp_loss_scale = self.mtp_loss_scaling_factor
        scaled_mtp_loss = mtp_loss_scale * mtp_loss / num_tokens
        return MTPLossAutoScaler.apply(hidden_states, scaled_mtp_loss)

    def forward(self, input_ids, labels, loss_mask):
        hidden_states, _ = self.decoder(self.embedding(input_ids))
        hidden_states = self.process_mtp_loss(hidden_states, input_ids, labels, loss_mask)
        return self.token_loss(hidden_states, labels)


def build():
    torch.manual_seed(104)
    model = GPTModelWithMTP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1, VOCAB, (2, 9))
    loss_mask = torch.zeros(2, 8)
    loss_mask[:, 0] = 1.0  # last token of the answer; the rest of this rank's shard is padding
    batch = dict(input_ids=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), loss_mask=loss_mask)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        losses = s.model(**s.batch)
        loss_mask = s.batch["loss_mask"]
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
