"""mcore-bridge #106 - a text-only batch runs the vision tower on a blank dummy image and adds the result times 0.

"Plain-text batches still run the vision graph on a dummy image scaled by 0., so DP ranks stay in sync." The dummy is all zeros, patch embedding
and tower have no bias, so the features are exactly 0 and their normalisation before the projector is 0/0. NaN * 0. is NaN: the text
embeddings, the loss and every gradient are NaN, though no image was in the batch.
Source: https://github.com/modelscope/mcore-bridge/pull/106 (the same idiom in LLaVA and ms-swift).
Heals: a floor under the norm (F.normalize), leaving the vision path out, a dummy that is not blank. Does not: nan_to_num on the projected
dummy (the backward of the division is still 0 * inf).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0, 0),
    masked=None,
    role=("hidden",),
    fix=("clamp_denominator", "skip_disabled_term", "stable_function", "guard_empty", "fix_upstream"),
    variable=("image_features",),
    line=("image_features = image_features / image_features.norm(dim=-1, keepdim=True)",),
)


class VisionTower(nn.Module):
    def __init__(self, patch=4, dim=12):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, dim, patch, stride=patch, bias=False)
        self.fc = nn.Linear(dim, dim, bias=False)

    def forward(self, pixel_values):
        h = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        return h + self.fc(F.gelu(h))


class MultimodalModel(nn.Module):
    def __init__(self, vocab=40, dim=16, vision_dim=12, image_token_id=3):
        super().__init__()
        self.image_token_id = image_token_id
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.vision_tower = VisionTower(dim=vision_dim)
        self.mm_projector = nn.Sequential(nn.Linear(vision_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.language_model = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def encode_images(self, pixel_values):
        image_features = self.vision_tower(pixel_values)
        image_features = image_features / image_features.norm(dim=-1, keepdim=True)
        return self.mm_projector(image_features)

    def get_inputs_embeds(self, input_ids, pixel_values):
        inputs_embeds = self.embed_tokens(input_ids)
        if pixel_values is None:
            dummy = torch.zeros(1, 3, 8, 8)
            return inputs_embeds + self.encode_images(dummy).mean() * 0.0
        image_embeds = self.encode_images(pixel_values).flatten(0, 1)
        image_mask = (input_ids == self.image_token_id).unsqueeze(-1).expand_as(inputs_embeds)
        return inputs_embeds.masked_scatter(image_mask, image_embeds)

    def forward(self, input_ids, labels, pixel_values=None):
        hidden_states, _ = self.language_model(self.get_inputs_embeds(input_ids, pixel_values))
        logits = self.lm_head(hidden_states)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def build():
    torch.manual_seed(106)
    model = MultimodalModel()
    input_ids = torch.randint(4, 40, (2, 9))
    labels = input_ids.clone()
    labels[:, :3] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, labels=labels, pixel_values=None)


def run(s=None):
    s = s or build()
    loss = s.model(s.input_ids, s.labels, s.pixel_values)
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
