"""Distillation from a multimodal teacher that is served under no_grad: the bf16 checkpoint falls back to fp16 on the older card.

The patch embedder of the teacher has an outlier channel, harmless in bf16. In half its output passes 65504 and becomes inf, the RMSNorm behind it makes NaN of the row,
and every teacher logit of that sample is NaN. The student reads them through the KL and is lost in the first step, although it is kept in fp32 itself.
Source: https://github.com/vllm-project/vllm/issues/48231
Heals: serving the teacher in fp32 (or bf16), clamping the activation to the range of half.  Does not: fp32 student, upcasting the teacher's logits, a temperature.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("linear", "addmm", "mm", "matmul"),
    index=(1, 2, 5),
    masked=None,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input", "validate_config"),
    variable=("patches",),
    line=("patches = self.patch_embed(pixel_values)",),
)


class VisionTower(nn.Module):
    def __init__(self, patch_dim, dim):
        super().__init__()
        self.patch_embed = nn.Linear(patch_dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, pixel_values):
        patches = self.patch_embed(pixel_values)
        return self.proj(F.gelu(self.norm(patches))).mean(dim=1, keepdim=True)


class VLM(nn.Module):
    def __init__(self, vocab=28, dim=12, patch_dim=12):
        super().__init__()
        self.vision = VisionTower(patch_dim, dim)
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, pixel_values):
        h = self.embed(ids) + self.vision(pixel_values.to(self.head.weight.dtype))
        return self.head(self.norm(h))


def load_teacher(dtype):
    teacher = VLM().to(torch.bfloat16)
    with torch.no_grad():
        teacher.vision.patch_embed.weight[5] = 2400.0
    return teacher.to(dtype).eval().requires_grad_(False)


def kl_to_teacher(student_logits, teacher_logits, temperature=2.0):
    student = F.log_softmax(student_logits / temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits.float() / temperature, dim=-1)
    return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean() * temperature**2


def build():
    torch.manual_seed(7)
    supports_bf16 = False
    teacher = load_teacher(torch.bfloat16 if supports_bf16 else torch.float16)
    student = VLM()
    pixel_values = torch.rand(2, 4, 12)
    pixel_values[1, 2] = 2.64  # a saturated white patch after normalisation
    batch = {"input_ids": torch.randint(0, 28, (2, 6)), "pixel_values": pixel_values}
    return SimpleNamespace(model=student, teacher=teacher, optimizer=torch.optim.AdamW(student.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        with torch.no_grad():
            teacher_logits = s.teacher(s.batch["input_ids"], s.batch["pixel_values"])
        loss = kl_to_teacher(s.model(s.batch["input_ids"], s.batch["pixel_values"]), teacher_logits)
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
