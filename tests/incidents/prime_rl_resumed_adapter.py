"""The run resumes from an adapter saved after a bad step: one row of a LoRA matrix is NaN, and the keep mask hides it from the loss."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights",),
    op=("mm", "previous_step", "matmul", "linear"),
    index=(0, 6),
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "skip_bad_step", "reload_checkpoint"),
    variable=("layers.1.lora_B",),
    line=("lora_out = torch.mm(torch.mm(x, self.lora_A.t()), self.lora_B.t())",),
)


class MultiLoRALinear(nn.Module):
    def __init__(self, base_layer, rank, alpha=8.0):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, base_layer.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base_layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        self.scaling = alpha / rank

    def forward(self, x):
        lora_out = torch.mm(torch.mm(x, self.lora_A.t()), self.lora_B.t())
        return self.base_layer(x) + self.scaling * lora_out


class DecoderStack(nn.Module):
    def __init__(self, vocab=21, dim=12, layers=3):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim).requires_grad_(False)
        self.layers = nn.ModuleList(MultiLoRALinear(nn.Linear(dim, dim), rank=4) for _ in range(layers))
        self.lm_head = nn.Linear(dim, vocab, bias=False).requires_grad_(False)

    def forward(self, input_ids):
        h = self.embed_tokens(input_ids)
        for layer in self.layers:
            h = h + torch.nn.functional.silu(layer(h))
        return self.lm_head(h)


def read_adapter_checkpoint(model):
    state = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    for name in state:
        if name.endswith("lora_B"):
            state[name].normal_(std=0.02)
    state["layers.1.lora_B"][6] = float("nan")
    return state


def compute_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask, mask_ratio_high=8.0):
    log_importance_ratio = (trainer_logprobs - inference_logprobs).clamp(-10.0, 10.0)
    importance_ratio = torch.exp(log_importance_ratio)
    keep_mask = loss_mask & (importance_ratio.detach() <= mask_ratio_high)
    pg_loss = torch.where(keep_mask, importance_ratio * advantages, 0.0)
    return -pg_loss.sum() / loss_mask.sum().clamp(min=1)


def build():
    torch.manual_seed(113)
    model = DecoderStack()
    model.load_state_dict(read_adapter_checkpoint(model), strict=False)
    input_ids = torch.randint(0, 21, (14,))
    loss_mask = torch.ones(13, dtype=torch.bool)
    loss_mask[:5] = False
    batch = {
        "input_ids": input_ids,
        "inference_logprobs": -3.0 - 0.1 * torch.rand(13),
        "advantages": torch.full((13,), -0.4),
        "loss_mask": loss_mask,
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(trainable, lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(b["input_ids"])[:-1].float()
    trainer_logprobs = logits.log_softmax(-1).gather(-1, b["input_ids"][1:, None]).squeeze(-1)
    loss = compute_loss(trainer_logprobs, b["inference_logprobs"], b["advantages"], b["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
