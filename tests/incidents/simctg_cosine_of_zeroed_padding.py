"""SimCTG token contrastive loss - the loss is NaN for every batch with padding, though the loss matrix is multiplied by the padding mask.

The encoder returns zeros for padded positions. The hidden states are divided by their norm, which makes 0 / 0 of these rows; in the matrix of
cosine scores they give whole NaN rows and columns, and NaN * 0 in the mask is NaN.
Source: https://github.com/yxuansu/SimCTG (simctg/lossfunction.py, simctg.py: last_hidden_states / last_hidden_states.norm(dim=2, keepdim=True))
Heals: F.normalize (a floor under the norm), or giving the padded rows another value before the division. Does not: where or nan_to_num on the loss
matrix, whose gradient still passes the division.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "nan_times_zero_mask", "zero_denominator"),
    op=("div", "truediv"),
    index=(0, 5, 0),
    masked=True,
    role=("hidden",),
    fix=("clamp_denominator", "mask_before_op", "avoid_singular_op", "representable_eps", "stable_function", "fix_upstream"),
    variable=("norm_rep",),
    line=("norm_rep = last_hidden_states / last_hidden_states.norm(dim=2, keepdim=True)",),
)


class Encoder(nn.Module):
    def __init__(self, vocab=30, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(input_ids), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=input_ids.size(1))
        return hidden, self.lm_head(hidden)


def contrastive_loss(margin, score_matrix, input_ids, pad_token_id):
    gold_score = torch.diagonal(score_matrix, dim1=1, dim2=2).unsqueeze(-1)
    difference_matrix = gold_score - score_matrix
    loss_matrix = F.relu(margin - difference_matrix)
    input_mask = input_ids.ne(pad_token_id).float()
    pair_mask = input_mask[:, :, None] * input_mask[:, None, :] * (1 - torch.eye(input_ids.size(1)))
    masked_loss_matrix = loss_matrix * pair_mask
    return masked_loss_matrix.sum() / pair_mask.sum()


def compute_cosine_matrix(last_hidden_states):
    norm_rep = last_hidden_states / last_hidden_states.norm(dim=2, keepdim=True)
    return torch.matmul(norm_rep, norm_rep.transpose(1, 2))


def build():
    torch.manual_seed(6)
    pad_token_id = 0
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = torch.tensor([5, 8, 7])
    input_ids = torch.randint(1, 30, (3, 8))
    input_ids[torch.arange(8)[None] >= lengths[:, None]] = pad_token_id
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, lengths=lengths, pad_token_id=pad_token_id, margin=0.5)


def run(s=None):
    s = s or build()
    last_hidden_states, logits = s.model(s.input_ids, s.lengths)
    labels = s.input_ids.masked_fill(s.input_ids == s.pad_token_id, -100)
    mle_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    cosine_scores = compute_cosine_matrix(last_hidden_states)
    cl_loss = contrastive_loss(s.margin, cosine_scores, s.input_ids, s.pad_token_id)
    loss = mle_loss + cl_loss
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
