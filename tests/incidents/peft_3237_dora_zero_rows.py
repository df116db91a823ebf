"""PEFT, DoRA on the o_proj of a policy whose checkpoint holds rows of zeros - GRPO step.

DoRA divides its magnitude by the norm of every output row of the base weight plus the adapter. Some checkpoints hold rows of exact zeros; the magnitude is
initialised from the same norm and lora_B starts at zero, so at step 0 the quotient of such a row is 0/0. Source: https://github.com/huggingface/peft/issues/2049 and
https://github.com/huggingface/peft/pull/3237, src/peft/tuners/lora/dora.py (DoraLinearLayer.get_weight_norm, forward).
Heals: clamp the norm from below before the division (the row stays zero, the others unchanged to the bit), torch.where on the norm (scale 1 where it is zero), leave the module without DoRA
(plain LoRA), load a checkpoint without rows of zeros. Does not: nan_to_num on the result (the gradient of the magnitude stays NaN), gradient clipping, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div", "truediv", "true_divide"),
    index=(3,),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "where_on_detached", "mask_before_op", "representable_eps", "avoid_singular_op", "fix_upstream"),
    variable=("mag_norm_scale", None),
    line=("mag_norm_scale = (magnitude / weight_norm).view(1, -1)",),
)


class DoraLinear(nn.Module):
    def __init__(self, base_layer, r=2, lora_alpha=4):
        super().__init__()
        self.base_layer = base_layer
        for p in base_layer.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = lora_alpha / r
        lora_weight = self.lora_B.weight @ self.lora_A.weight
        weight_norm = self.get_weight_norm(base_layer.weight, lora_weight, self.scaling)
        self.lora_magnitude_vector = nn.Parameter(weight_norm.detach().clone())

    def get_weight_norm(self, weight, lora_weight, scaling):
        weight = weight + scaling * lora_weight
        weight_norm = torch.linalg.norm(weight, dim=1).to(weight.dtype)
        return weight_norm

    def forward(self, x):
        result = self.base_layer(x)
        lora_weight = self.lora_B.weight @ self.lora_A.weight
        magnitude = self.lora_magnitude_vector
        weight = self.base_layer.weight
        weight_norm = self.get_weight_norm(weight, lora_weight.detach(), self.scaling)
        weight_norm = weight_norm.detach()
        mag_norm_scale = (magnitude / weight_norm).view(1, -1)
        lora_result = self.lora_B(self.lora_A(x))
        base_result = F.linear(x, weight)
        result_dora = (mag_norm_scale - 1) * base_result + mag_norm_scale * lora_result * self.scaling
        return result + result_dora


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        o_proj = nn.Linear(dim, dim, bias=False)
        with torch.no_grad():
            o_proj.weight[3] = 0.0
            o_proj.weight[6] = 0.0
        self.o_proj = DoraLinear(o_proj)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        h = self.embed_tokens(input_ids)
        q, k, v = self.qkv_proj(h).chunk(3, dim=-1)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.lm_head(h + self.o_proj(attn))


def build():
    torch.manual_seed(0)
    model = Policy()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    input_ids = torch.randint(0, 24, (4, 9))
    completion_mask = torch.ones(4, 5)
    completion_mask[1, 3:] = 0
    completion_mask[3, 4:] = 0
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, completion_mask=completion_mask, rewards=rewards)


def run(s=None):
    s = s or build()
    advantages = (s.rewards - s.rewards.mean()) / (s.rewards.std() + 1e-4)
    for _ in range(2):
        logits = s.model(s.input_ids)[:, -6:-1]
        completion_ids = s.input_ids[:, -5:]
        per_token_logps = logits.log_softmax(-1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
        coef_1 = torch.exp(per_token_logps - per_token_logps.detach())
        per_token_loss = -coef_1 * advantages.unsqueeze(1)
        loss = (per_token_loss * s.completion_mask).sum() / s.completion_mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
