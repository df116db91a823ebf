"""transformers MiniMax-M2, sigmoid router with a correction bias - every chosen expert of one token has the weight 0.

The experts are chosen by sigmoid + e_score_correction_bias, but weighted by the sigmoid alone. One outlier token has all router logits below -104: its sigmoids are exactly 0
and the renormalisation over the chosen experts is 0/0. Source: huggingface/transformers, modeling_minimax_m2.py, MiniMaxM2SparseMoeBlock.route_tokens_to_experts (first version,
without the 1e-20). Heals: + 1e-20 in the denominator; clamp of the sum; clamp of the logits at -80; softmax over the chosen logsigmoids; where on the denominator.
Does not: upcasting (the logits are float32 already); a torch.where after the division (its backward stays NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div", "truediv", "div_", "itruediv", "/="),
    index=(6, 0),
    masked=False,
    role=("router",),
    fix=("clamp_denominator", "representable_eps", "clamp_input", "stable_function", "avoid_singular_op", "mask_before_op", "fix_upstream"),
    variable=("top_k_weights",),
    line=("top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)",),
)


class MiniMaxM2Experts(nn.Module):
    def __init__(self, num_experts, hidden, inter):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * inter, hidden) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(num_experts, hidden, inter) * 0.2)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final_hidden_states = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in expert_mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[top_x]
            gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current = F.linear(F.silu(gate) * up, self.down_proj[expert_idx])
            current = current * top_k_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current)
        return final_hidden_states


class MiniMaxM2SparseMoeBlock(nn.Module):
    def __init__(self, hidden=16, num_local_experts=6, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, num_local_experts, bias=False)
        self.experts = MiniMaxM2Experts(num_local_experts, hidden, 24)
        self.register_buffer("e_score_correction_bias", torch.linspace(4.7, 4.9, num_local_experts))

    def route_tokens_to_experts(self, router_logits):
        routing_weights = torch.nn.functional.sigmoid(router_logits.float())
        scores_for_choice = routing_weights + self.e_score_correction_bias
        _, top_k_index = torch.topk(scores_for_choice, self.top_k, dim=-1, sorted=False)
        top_k_weights = routing_weights.gather(1, top_k_index)
        top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)
        return top_k_index, top_k_weights.to(router_logits.dtype)

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = self.gate(hidden_states)
        top_k_index, top_k_weights = self.route_tokens_to_experts(router_logits)
        hidden_states = self.experts(hidden_states, top_k_index, top_k_weights)
        return hidden_states.reshape(batch_size, sequence_length, hidden_dim)


class Policy(nn.Module):
    def __init__(self, vocab=30, hidden=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.mlp = MiniMaxM2SparseMoeBlock(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return self.lm_head(x + self.mlp(x))


def build():
    torch.manual_seed(1)
    model = Policy()
    with torch.no_grad():
        model.embed_tokens.weight[7] = 0.0
        model.embed_tokens.weight[7, 3] = 120.0
        model.mlp.gate.weight[:, 3] = -torch.linspace(1.0, 1.3, 6)
    input_ids = torch.randint(8, 30, (2, 5))
    input_ids[1, 1] = 7
    advantages = torch.tensor([[0.8], [-0.6]])
    completion_mask = torch.tensor([[0.0, 1, 1, 1], [1.0, 1, 1, 1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, advantages=advantages, completion_mask=completion_mask)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids)[:, :-1]
    per_token_logps = logits.log_softmax(-1).gather(-1, s.input_ids[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(per_token_logps - per_token_logps.detach())
    per_token_loss = -ratio * s.advantages
    loss = (per_token_loss * s.completion_mask).sum() / s.completion_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
