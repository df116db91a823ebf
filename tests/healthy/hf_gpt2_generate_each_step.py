"""model.generate with temperature, top-k and top-p in every iteration (the processors write -inf), then one policy-gradient step."""

from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HEALTHY = "generation scores are full of -inf, and the model switches between eval and train with dropout"


def build():
    torch.manual_seed(328)
    config = GPT2Config(vocab_size=24, n_positions=24, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=23, pad_token_id=23)
    model = GPT2LMHeadModel(config)
    return SimpleNamespace(model=model, prompts=torch.randint(2, 20, (4, 3)), opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    torch.manual_seed(9)
    for _ in range(3):
        s.model.eval()
        out = s.model.generate(
            s.prompts,
            attention_mask=torch.ones_like(s.prompts),
            do_sample=True,
            temperature=0.7,
            top_k=6,
            top_p=0.9,
            max_new_tokens=5,
            min_new_tokens=5,
            return_dict_in_generate=True,
            output_scores=True,
        )
        s.model.train()
        ids = out.sequences
        reward = (ids[:, 3:] < 12).float().sum(1)
        adv = (reward - reward.mean()) / (reward.std() + 1e-4)
        logits = s.model(ids).logits[:, 2:-1]
        logp = logits.log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
        sampled = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, ids[:, 3:, None]).squeeze(-1)
        weight = (logp.detach() - sampled).exp().clamp(max=2.0)
        loss = -(weight * logp * adv[:, None]).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
