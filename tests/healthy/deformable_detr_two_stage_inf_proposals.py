"""Deformable DETR, two stages: proposals of padded or border cells are filled with +inf on purpose before the sigmoid.

The inverse sigmoid of a proposal outside (0.01, 0.99) is set to inf; the regressed offset added to it stays inf, the sigmoid of it is 1, and
its gradient is 1 * (1 - 1) = 0. Scores of these cells are finite, top-k may even choose one. Loss, gradients and weights are finite.

Source: https://github.com/fundamentalvision/Deformable-DETR/blob/main/models/deformable_transformer.py (gen_encoder_output_proposals)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def gen_encoder_output_proposals(memory, padding_mask, shape):
    B, (H, W) = memory.shape[0], shape
    mask = padding_mask.view(B, H, W)
    valid_h = (~mask[:, :, 0]).sum(1)
    valid_w = (~mask[:, 0, :]).sum(1)
    grid_y, grid_x = torch.meshgrid(torch.linspace(0, H - 1, H), torch.linspace(0, W - 1, W), indexing="ij")
    grid = torch.stack([grid_x, grid_y], -1)
    scale = torch.stack([valid_w, valid_h], -1).view(B, 1, 1, 2)
    grid = (grid.unsqueeze(0).expand(B, -1, -1, -1) + 0.5) / scale
    wh = torch.ones_like(grid) * 0.05
    proposals = torch.cat((grid, wh), -1).view(B, -1, 4)
    valid = ((proposals > 0.01) & (proposals < 0.99)).all(-1, keepdim=True)
    proposals = torch.log(proposals.clamp(1e-5, 1 - 1e-5) / (1 - proposals.clamp(1e-5, 1 - 1e-5)))
    proposals = proposals.masked_fill(padding_mask.unsqueeze(-1), float("inf"))
    proposals = proposals.masked_fill(~valid, float("inf"))
    output_memory = memory.masked_fill(padding_mask.unsqueeze(-1), 0.0).masked_fill(~valid, 0.0)
    return output_memory, proposals


class TwoStage(nn.Module):
    def __init__(self, dim=16, classes=3, num_queries=14):
        super().__init__()
        self.num_queries = num_queries
        self.enc_output = nn.Linear(dim, dim)
        self.enc_output_norm = nn.LayerNorm(dim)
        self.class_embed = nn.Linear(dim, classes)
        self.bbox_embed = nn.Linear(dim, 4)

    def forward(self, memory, padding_mask, shape):
        output_memory, proposals = gen_encoder_output_proposals(memory, padding_mask, shape)
        output_memory = self.enc_output_norm(self.enc_output(output_memory))
        enc_class = self.class_embed(output_memory)
        enc_coord_unact = self.bbox_embed(output_memory) + proposals
        topk = torch.topk(enc_class[..., 0], self.num_queries, dim=1)[1]
        boxes = enc_coord_unact.sigmoid()
        reference = torch.gather(enc_coord_unact, 1, topk.unsqueeze(-1).repeat(1, 1, 4)).detach().sigmoid()
        return enc_class, boxes, reference, topk


def build():
    torch.manual_seed(9)
    model = TwoStage()
    memory = torch.randn(2, 30, 16)
    padding_mask = torch.zeros(2, 5, 6, dtype=torch.bool)
    padding_mask[1, 3:, :] = True
    padding_mask[1, :, 4:] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        memory=memory,
        padding_mask=padding_mask.flatten(1),
        shape=(5, 6),
        labels=torch.randint(0, 3, (2, 30)),
        boxes=torch.rand(2, 14, 4),
    )


def run(s=None):
    s = s or build()
    enc_class, boxes, reference, topk = s.model(s.memory, s.padding_mask, s.shape)
    chosen = torch.gather(boxes, 1, topk.unsqueeze(-1).repeat(1, 1, 4))
    loss_bbox = F.l1_loss(chosen, s.boxes) + 0.1 * (reference - s.boxes).abs().mean()
    loss = F.cross_entropy(enc_class.flatten(0, 1), s.labels.flatten()) + 5.0 * loss_bbox
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    s.optimizer.step()
    return loss
