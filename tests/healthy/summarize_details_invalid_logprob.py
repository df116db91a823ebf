"""summarize-from-feedback style PPO - the pad token is forbidden (-inf) and every padding position has the log-prob -inf.

Healthy: logprobs are filled with INVALID_LOGPROB before the difference with the old ones, the ratio of padding is exp(0); the backward of masked_fill gives the -inf rows a zero
gradient and log_softmax multiplies it with exp(-inf) = 0. All losses, gradients and weights are finite.
(Source: vwxyzjn/summarize_from_feedback_details, PPO loop: INVALID_LOGPROB = 1.0, masked_fill(logprobs, padding_mask, INVALID_LOGPROB).)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

INVALID_LOGPROB = 1.0


class Policy(nn.Module):
    def __init__(self, vocab=24, hidden=16, pad_id=0):
        super().__init__()
        self.pad_id = pad_id
        self.embed = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, vocab)
        self.critic = nn.Linear(hidden, 1)

    def forward(self, ids, temperature=0.7):
        hidden, _ = self.rnn(self.embed(ids))
        logits = self.lm_head(hidden)
        forbidden = torch.zeros(logits.size(-1), dtype=torch.bool)
        forbidden[self.pad_id] = True
        logits = logits.masked_fill(forbidden, float("-inf"))
        return logits / (temperature + 1e-7), self.critic(hidden).squeeze(-1)


def build():
    torch.manual_seed(0)
    model = Policy()
    query = torch.randint(1, 24, (4, 4))
    response = torch.randint(1, 24, (4, 6))
    lengths = torch.tensor([6, 3, 5, 2])
    padding_mask = torch.arange(6)[None] >= lengths[:, None]
    response[padding_mask] = 0
    ids = torch.cat([query, response], 1)
    with torch.no_grad():
        logits, values = model(ids[:, :-1])
        all_logprobs = F.log_softmax(logits[:, 3:], dim=-1)
        logprobs = torch.gather(all_logprobs, 2, response.unsqueeze(-1)).squeeze(-1)
        logprobs = torch.masked_fill(logprobs, padding_mask, INVALID_LOGPROB)
        values = torch.masked_fill(values[:, 3:], padding_mask, 0)
    scores = torch.tensor([1.2, -0.3, 0.4, 0.9])
    advantages = torch.masked_fill(scores[:, None] - values, padding_mask, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-5)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        ids=ids,
        response=response,
        padding_mask=padding_mask,
        logprobs=logprobs,
        values=values,
        advantages=advantages,
    )


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def run(s=None):
    s = s or build()
    for _ in range(3):
        logits, vpred = s.model(s.ids[:, :-1])
        new_all_logprobs = F.log_softmax(logits[:, 3:], dim=-1)
        new_logprobs = torch.gather(new_all_logprobs, 2, s.response.unsqueeze(-1)).squeeze(-1)
        new_logprobs = torch.masked_fill(new_logprobs, s.padding_mask, INVALID_LOGPROB)
        vpred = torch.masked_fill(vpred[:, 3:], s.padding_mask, 0)
        ratio = (new_logprobs - s.logprobs).exp()
        pg_losses = -s.advantages * ratio
        pg_losses2 = -s.advantages * torch.clamp(ratio, 0.8, 1.2)
        pg_loss = masked_mean(torch.max(pg_losses, pg_losses2), ~s.padding_mask)
        returns = s.advantages + s.values
        vf_loss = 0.5 * masked_mean(torch.square(vpred - returns), ~s.padding_mask)
        loss = pg_loss + 0.1 * vf_loss
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
