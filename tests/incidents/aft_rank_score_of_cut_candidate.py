"""AFT (alignment fine-tuning), rank loss over candidates - a candidate whose answer was cut away has no label.

One of four candidates came after a prompt that fills the model's maximum length: all of its labels are -100, its score is a sum of nothing over a length of 0 (0/0), and the
comparisons of the ranking loss carry the NaN. Source: RankTrainer.get_score and aft_rank_loss of the public AFT code (find_string id 13458176271; derived from GanjinZero/RRHF).
Heals: length.clamp(min=1); leaving the candidate out before scoring; eps in the denominator. Does not: nan_to_num on the scores or the loss (backward stays NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div", "truediv", "/"),
    index=(2,),
    masked=None,
    role=("log_probs", "loss", "logits"),
    fix=("clamp_denominator", "drop_invalid_sample", "guard_empty", "representable_eps", "mask_before_op", "fix_upstream", "reject_input"),
    variable=("scores",),
    line=("scores = logit_label.sum(-1) / (length**self.args.length_penalty)",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab=32, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, input_ids, attention_mask=None):
        hidden, _ = self.rnn(self.embed(input_ids))
        return (self.lm_head(hidden),)


class RankTrainer:
    def __init__(self, model, args):
        self.model = model
        self.args = args

    def gather_logits_labels(self, logits, labels):
        mask = (labels != -100).float()
        new_logits = logits.clone()  # B x S x hidsize
        new_labels = labels.clone()
        new_labels[labels == -100] = 0  # B x S
        output = torch.gather(new_logits, dim=-1, index=new_labels.unsqueeze(-1)).squeeze(-1)
        output = output * mask  # B * L
        return output

    def get_score(self, logit_label, labels):
        mask = (labels != -100).float()
        length = mask.sum(-1)
        scores = logit_label.sum(-1) / (length**self.args.length_penalty)
        return scores

    def aft_rank_loss(self, scores, rw_scores):
        tmp = 0
        sorted_indexs = rw_scores.argsort(dim=-1, descending=True)
        sorted_rw_scores = rw_scores[sorted_indexs]
        sorted_scores = scores[sorted_indexs]

        positive_lower_boundary = 10000
        for i in range(0, len(sorted_rw_scores) - 1):
            pos_scores = sorted_scores[i]
            pos_rw_score = sorted_rw_scores[i].item()
            neg_start = None

            positive_lower_boundary = min(pos_scores.item(), positive_lower_boundary)
            for kk in range(i + 1, len(sorted_rw_scores)):
                if sorted_rw_scores[kk].item() < pos_rw_score:
                    neg_start = kk
                    break
            if neg_start is None:
                continue

            for neg_score in sorted_scores[neg_start:]:
                tmp += torch.exp((neg_score - pos_scores) / self.args.temperature)
                tmp += torch.exp(2 * positive_lower_boundary - 2 * self.args.beta - pos_scores.item() - neg_score)

        if tmp != 0:
            loss = torch.log(1 + tmp)
        else:
            loss = 0
        return loss

    def compute_loss(self, inputs):
        logits = self.model(input_ids=inputs.get("input_ids"), attention_mask=inputs.get("attention_mask"))[0]
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = inputs.get("labels")[..., 1:].contiguous()
        logits = F.log_softmax(shift_logits, dim=-1)
        logit_label = self.gather_logits_labels(logits, shift_labels)
        scores = self.get_score(logit_label, shift_labels)
        return self.aft_rank_loss(scores, inputs.get("scores").squeeze())


def build():
    torch.manual_seed(0)
    model = CausalLM()
    args = SimpleNamespace(length_penalty=1.0, temperature=1.0, beta=0.5)
    input_ids = torch.randint(1, 32, (4, 12))
    labels = input_ids.clone()
    for row, prompt in enumerate([6, 6, 12, 6]):
        labels[row, :prompt] = -100
    batch = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": labels,
        "scores": torch.tensor([[1.0, 0.0, 0.0, 1.0]]),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, trainer=RankTrainer(model, args), batch=batch)


def run(s=None):
    s = s or build()
    loss = s.trainer.compute_loss(s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
