"""REFIL's entity attention: an agent that is not in this scenario sees no entity, its row of logits is all -inf and its softmax NaN. The code
writes 0 over the NaN weights, and although softmax' backward is NaN in that row too, the mask of the logits takes the gradient of every
entity of the row away again. Loss, gradients and weights are finite and the same as without that agent.

https://github.com/shariqiqbal2810/REFIL/blob/master/src/modules/layers/attention.py (EntityAttentionLayer.forward)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class EntityAttentionLayer(nn.Module):
    def __init__(self, in_dim=7, embed_dim=16, out_dim=16, n_heads=2):
        super().__init__()
        self.n_heads = n_heads
        self.embed_dim = embed_dim
        self.head_dim = embed_dim // n_heads
        self.scale_factor = self.head_dim**0.5
        self.in_trans = nn.Linear(in_dim, embed_dim * 3, bias=False)
        self.out_trans = nn.Linear(embed_dim, out_dim)

    def split_heads(self, x):
        bs, n, _ = x.shape
        return x.view(bs, n, self.n_heads, self.head_dim).transpose(1, 2).reshape(bs * self.n_heads, n, self.head_dim)

    def forward(self, entities, pre_mask, post_mask):
        n_agents = post_mask.shape[1]
        query, key, value = self.in_trans(entities).chunk(3, dim=2)
        query_spl, key_spl, value_spl = self.split_heads(query[:, :n_agents]), self.split_heads(key), self.split_heads(value)
        attn_logits = torch.bmm(query_spl, key_spl.transpose(1, 2)) / self.scale_factor
        pre_mask_rep = pre_mask.repeat_interleave(self.n_heads, dim=0)
        masked_attn_logits = attn_logits.masked_fill(pre_mask_rep.bool(), -float("Inf"))
        attn_weights = F.softmax(masked_attn_logits, dim=2)
        # some weights might be NaN (if agent is inactive and all entities were masked)
        attn_weights = attn_weights.masked_fill(attn_weights != attn_weights, 0)
        attn_outs = torch.bmm(attn_weights, value_spl)
        attn_outs = attn_outs.view(-1, self.n_heads, n_agents, self.head_dim).transpose(1, 2).reshape(-1, n_agents, self.embed_dim)
        attn_outs = self.out_trans(attn_outs)
        return attn_outs.masked_fill(post_mask.bool().unsqueeze(2), 0)


class EntityAgent(nn.Module):
    def __init__(self, actions=5):
        super().__init__()
        self.attn = EntityAttentionLayer()
        self.fc = nn.Linear(16, actions)

    def forward(self, entities, obs_mask, agent_mask):
        return self.fc(F.relu(self.attn(entities, obs_mask, agent_mask)))


def build():
    torch.manual_seed(2211)
    model = EntityAgent()
    batch, n_agents, n_entities = 3, 4, 6
    entities = torch.randn(batch, n_entities, 7)
    agent_mask = torch.zeros(batch, n_agents)
    agent_mask[1, 3] = 1.0  # only three agents in the second scenario
    obs_mask = (torch.rand(batch, n_agents, n_entities) < 0.3).float()
    obs_mask[:, range(n_agents), range(n_agents)] = 0.0
    obs_mask[1, 3] = 1.0
    obs_mask[1, :, 3] = 1.0
    targets = torch.randn(batch, n_agents)
    actions = torch.randint(0, 5, (batch, n_agents, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4, alpha=0.99, eps=1e-5)
    return SimpleNamespace(
        model=model, optimizer=optimizer, entities=entities, obs_mask=obs_mask, agent_mask=agent_mask, actions=actions, targets=targets
    )


def run(s=None):
    s = s or build()
    q = s.model(s.entities, s.obs_mask, s.agent_mask).gather(2, s.actions).squeeze(2)
    live = 1.0 - s.agent_mask
    loss = ((q - s.targets).square() * live).sum() / live.sum()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
