"""A tiny Hugging Face Llama, left-padded prompts and a GRPO loss with logits_to_keep, all in the library's own attention."""

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEALTHY = "left-padded rows have queries without any key, the library fills the mask with finfo.min"


def build():
    torch.manual_seed(327)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(1, 32, (4, 10))
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :3] = 0
    attention_mask[3, :4] = 0
    return SimpleNamespace(
        model=model,
        ids=ids.masked_fill(attention_mask == 0, 0),
        attention_mask=attention_mask,
        opt=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None, keep=5):
    s = s or build()
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0])
    adv = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    for _ in range(3):
        logits = s.model(input_ids=s.ids, attention_mask=s.attention_mask, logits_to_keep=keep + 1).logits[:, :-1]
        logp = logits.log_softmax(-1).gather(-1, s.ids[:, -keep:, None]).squeeze(-1)
        loss = -((logp - logp.detach()).exp() * adv[:, None]).mean()
        s.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.opt.step()
    return loss
