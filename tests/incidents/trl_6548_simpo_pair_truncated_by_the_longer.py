"""TRL #6548 - CPOTrainer with loss_type="simpo": both responses are cut by the length of the longer one.

The slice bound max_length - longer is negative when the longer response does not fit; the short response is cut from its end until
nothing is left. Its labels are all -100, and the length-normalised log-probability of that response is 0 / 0. Source:
https://github.com/huggingface/trl/issues/6548 . Truncating each response by its own room, dropping such a pair or dividing by at least
one token heals; masking with nan_to_num after the log-sigmoid does not (the gradient still passes 0 / 0).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(3,),
    masked=None,
    role=("log_probs",),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample", "fix_upstream"),
    variable=("all_logps", "logps"),
    line=("all_logps = (token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)",),
)

MAX_LENGTH = 12


class TinyLM(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.mix(self.embed(ids))[0])


def tokenize_row(prompt, chosen, rejected):
    longer = max(len(chosen), len(rejected))
    if len(prompt) + longer > MAX_LENGTH:
        prompt = prompt[-4:]
    if len(prompt) + longer > MAX_LENGTH:
        chosen, rejected = chosen[: MAX_LENGTH - longer], rejected[: MAX_LENGTH - longer]
    return [(prompt + answer, [-100] * len(prompt) + answer) for answer in (chosen, rejected)]


def collate(rows):
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([lab + [-100] * (width - len(lab)) for _, lab in rows])
    return input_ids, labels


def get_batch_logps(logits, labels):
    labels = labels[:, 1:]
    loss_mask = labels != -100
    token_logps = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    all_logps = (token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)
    return all_logps


def build():
    torch.manual_seed(6548)
    g = torch.Generator().manual_seed(1)
    words = lambda n: torch.randint(1, 32, (n,), generator=g).tolist()
    pairs = [(words(4), words(5), words(6)), (words(6), words(17), words(3))]
    rows = [tokenize_row(*pair) for pair in pairs]
    input_ids, labels = collate([r[0] for r in rows] + [r[1] for r in rows])
    model = TinyLM()
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), input_ids=input_ids, labels=labels, beta=2.0, gamma=0.5
    )


def run(s=None):
    s = s or build()
    logps = get_batch_logps(s.model(s.input_ids), s.labels)
    chosen, rejected = logps.chunk(2)
    losses = -F.logsigmoid(s.beta * (chosen - rejected) - s.gamma)
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
