"""NeMo-Aligner regression reward model - a null among the attribute labels of one response.

Five attributes are fitted by squared error, and the value -100 says that an attribute was not annotated. One row of the file has a
JSON null instead, which the reader turns into NaN; NaN != -100 is true, so the mask keeps it and the loss is NaN. Source: `loss_func` in
https://github.com/NVIDIA/NeMo-Aligner/blob/main/nemo_aligner/models/nlp/gpt/megatron_gpt_regression_reward_model.py .
Refusing or dropping the row, or taking the NaN out of the labels before the subtraction, heals; nan_to_num on the squared error
repairs the loss and not the gradient.
"""

import json
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(2, 3),
    masked=False,
    role=("rewards",),
    fix=("reject_input", "drop_invalid_sample", "mask_before_op", "fix_upstream"),
    variable=("labels", "label_tensor", "s.labels"),
    line=(
        "mask = label_tensor != mask_val",
        "squared_diff = (output_tensor - label_tensor) ** 2 * mask",
        'labels = torch.tensor([[math_nan(v) for v in r["label"]] for r in rows])',
        "loss = loss_func(s.model(s.inputs), s.labels)",
        'return float("nan") if value is None else float(value)',
    ),
)

ROWS = """
{"tokens": [3, 8, 1, 12, 7], "label": [4, 4, 4, 2, 1]}
{"tokens": [5, 2, 9, 9, 4], "label": [2, 1, 3, -100, 2]}
{"tokens": [11, 6, 10, 1, 2], "label": [3, 3, 4, null, 2]}
{"tokens": [7, 13, 3, 8, 5], "label": [0, 1, 2, 1, 0]}
"""


def math_nan(value):
    return float("nan") if value is None else float(value)


class RegressionRewardModel(nn.Module):
    def __init__(self, vocab=16, dim=12, attributes=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.rm_head = nn.Linear(dim, attributes)

    def forward(self, inputs):
        return self.rm_head(self.encoder(self.embed(inputs))[0][:, -1])


def loss_func(output_tensor, label_tensor, mask_val=-100.0):
    mask = label_tensor != mask_val
    squared_diff = (output_tensor - label_tensor) ** 2 * mask
    return squared_diff.sum() / mask.float().sum()


def build():
    torch.manual_seed(100)
    rows = [json.loads(line) for line in ROWS.strip().splitlines()]
    labels = torch.tensor([[math_nan(v) for v in r["label"]] for r in rows])
    inputs = torch.tensor([r["tokens"] for r in rows])
    model = RegressionRewardModel()
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=9e-6), inputs=inputs, labels=labels)


def run(s=None):
    s = s or build()
    loss = loss_func(s.model(s.inputs), s.labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
