"""The training run that ``nanscope demo`` watches: GRPO on a toy task, which ends in a NaN loss by itself.

Nothing here is mocked and no tensor is altered to make the run fail. A two-layer transformer learns to repeat a letter
as often as its prompt asks and then to stop, and its mean reward rises. Meanwhile nothing holds the policy to its
reference at padding positions, where the completion mask is 0, so their log-probabilities drift apart. Once a gap
passes 88.72 nats, ``exp`` in the KL estimate overflows float32 to inf, the mask turns it into ``inf * 0 = NaN``, and
the sum takes that NaN into the loss. Until then every weight and input is finite, and no counted token looks unusual.

The drift is quick because positions enter the model as a multiple of one learned direction and no norm precedes the
output head: what the policy learns about when to stop goes on growing, position by position, through the padding.
The module needs only torch, writes no files and prints nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PAD_ID = 0
END_ID = 1
FIRST_COUNT_ID = 2


@dataclass(frozen=True)
class DemoSettings:
    """Everything that decides the run; the same settings give the same run on the same machine.

    ``steps`` counts optimizer steps and is where a run that stays healthy ends. ``letters`` and ``max_repeats`` size
    the task, ``width``, ``layers`` and ``heads`` the policy.
    """

    steps: int = 200
    prompts_per_batch: int = 8
    group_size: int = 8
    updates_per_batch: int = 2
    max_new_tokens: int = 32
    letters: int = 3
    max_repeats: int = 3
    width: int = 32
    layers: int = 2
    heads: int = 2
    learning_rate: float = 2e-2
    warmup_steps: int = 20
    beta: float = 0.04
    clip: float = 0.2
    max_grad_norm: float = 1.0
    seed: int = 9

    @property
    def first_letter_id(self) -> int:
        """The token id of the first letter; the ids of the counts 1 to ``max_repeats`` come before it."""
        return FIRST_COUNT_ID + self.max_repeats

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids: padding, end of sequence, counts and letters."""
        return self.first_letter_id + self.letters


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did. ``step`` counts from 1; reward and length are means over the step's batch."""

    step: int
    loss: float
    mean_reward: float
    mean_length: float


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states (batch, length, width) to hidden states of the same shape."""
        batch, length, width = hidden.shape
        query_key_value = self.query_key_value(self.attention_norm(hidden))
        per_head = query_key_value.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(per_head[0], per_head[1], per_head[2], is_causal=True)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).reshape(batch, length, width))
        feed_forward: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + feed_forward


class TinyPolicy(nn.Module):
    """A decoder-only transformer language model, small enough to train in seconds on a CPU."""

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(settings.vocabulary_size, settings.width)
        self.position_direction = nn.Parameter(torch.randn(settings.width))
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.output_head = nn.Linear(settings.width, settings.vocabulary_size, bias=False)
        # A head of zeros starts the policy, and so its reference, at the uniform distribution.
        nn.init.zeros_(self.output_head.weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map token ids (batch, length) to the logits of the token after each (batch, length, vocabulary)."""
        positions = torch.arange(token_ids.shape[1]).unsqueeze(1)
        hidden = self.token_embedding(token_ids) + positions * self.position_direction
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.output_head(hidden)
        return logits


def sample_prompts(settings: DemoSettings, generator: torch.Generator) -> Tensor:
    """Draw one batch of prompts (prompts * group, 2), each a count and a letter, repeated for every group member."""
    shape = (settings.prompts_per_batch,)
    counts = torch.randint(FIRST_COUNT_ID, settings.first_letter_id, shape, generator=generator)
    letters = torch.randint(settings.first_letter_id, settings.vocabulary_size, shape, generator=generator)
    return torch.stack([counts, letters], dim=1).repeat_interleave(settings.group_size, dim=0)


@torch.no_grad()
def sample_completions(policy: TinyPolicy, prompts: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample a completion of each prompt (batch, 2) from the policy at temperature 1.

    Returns the completions (batch, length), padded after the end of sequence, and their mask of the same
    shape: 1.0 up to and including the end of sequence, 0.0 at padding.
    """
    batch, prompt_length = prompts.shape
    token_ids = torch.full((batch, prompt_length + length), PAD_ID)
    token_ids[:, :prompt_length] = prompts
    completion_mask = torch.zeros(batch, length)
    running = torch.ones(batch, dtype=torch.bool)
    for index in range(length):
        position = prompt_length + index
        probabilities = torch.softmax(policy(token_ids[:, :position])[:, -1], dim=-1)
        next_ids = torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(1)
        token_ids[:, position] = next_ids.masked_fill(~running, PAD_ID)
        completion_mask[:, index] = running.float()
        running = running & (next_ids != END_ID)
        if not bool(running.any()):
            break
    return token_ids[:, prompt_length:], completion_mask


def rewards_of(prompts: Tensor, completions: Tensor, completion_mask: Tensor) -> Tensor:
    """Score completions (batch, length) of prompts (batch, 2): the share of right tokens, 0 to 1 (batch).

    Right is the prompt's letter as often as its count says, then the end of sequence. Tokens missing from a completion
    that is too short, and those of one that is too long, count as wrong.
    """
    repeats = prompts[:, :1] - FIRST_COUNT_ID + 1
    letter = prompts[:, 1:]
    positions = torch.arange(completions.shape[1])
    right_letter = (positions < repeats) & (completions == letter)
    right_end = (positions == repeats) & (completions == END_ID)
    right_tokens = (right_letter | right_end).sum(dim=1)
    target_length = repeats.squeeze(1) + 1
    return right_tokens / torch.maximum(target_length, completion_mask.sum(dim=1))


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Normalise rewards (batch) within each group of completions of one prompt; returns advantages (batch)."""
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    # A group whose rewards are all equal has a standard deviation of 0.
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def completion_logps(policy: TinyPolicy, prompts: Tensor, completions: Tensor) -> Tensor:
    """Log-probabilities (batch, length) that the policy gives to every token of completions (batch, length).

    Padding tokens get theirs like any other, as in TRL: leaving them out is the loss's affair.
    """
    token_ids = torch.cat([prompts, completions], dim=1)
    logits = policy(token_ids)[:, prompts.shape[1] - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(2, completions.unsqueeze(2)).squeeze(2)


def grpo_loss(
    logps: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    beta: float,
    clip: float,
) -> Tensor:
    """The GRPO loss: clipped policy gradient plus ``beta`` times the k3 estimate of the KL to the reference.

    ``logps``, ``old_logps``, ``ref_logps`` and ``completion_mask`` are (batch, length), ``advantages`` is (batch);
    returns a scalar, the mean over completions of each one's mean over its counted tokens.
    """
    token_advantages = advantages.unsqueeze(1)
    log_ratio = logps - old_logps
    ratio = torch.exp(log_ratio)
    clipped_ratio = torch.clamp(ratio, 1 - clip, 1 + clip)
    per_token_loss = -torch.min(ratio * token_advantages, clipped_ratio * token_advantages)
    ref_log_ratio = ref_logps - logps
    per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1
    per_token_loss = per_token_loss + beta * per_token_kl
    # The fault this demo is about: multiplying by the mask after the exp turns an inf at padding into NaN.
    masked_loss = per_token_loss * completion_mask
    completion_loss = masked_loss.sum(dim=1) / completion_mask.sum(dim=1)
    return completion_loss.mean()


def train(settings: DemoSettings) -> Iterator[StepRecord]:
    """Train a fresh policy, yielding a record after each optimizer step, until ``settings.steps`` are done.

    A step whose loss is not finite is taken and yielded like any other, and leaves the weights NaN: stop iterating
    there. A caller that goes on gets the RuntimeError of sampling from NaN probabilities. While the iterator is alive
    torch computes on one thread.
    """
    threads = torch.get_num_threads()
    # The tensors are tiny: on a busy machine a second thread makes the run 20 times slower.
    torch.set_num_threads(1)
    try:
        yield from _steps(settings)
    finally:
        torch.set_num_threads(threads)


def _steps(settings: DemoSettings) -> Iterator[StepRecord]:
    # Layers draw their first weights from the global generator, whose state belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        policy = TinyPolicy(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / settings.warmup_steps))
    step = 0
    while step < settings.steps:
        prompts = sample_prompts(settings, generator)
        completions, completion_mask = sample_completions(policy, prompts, settings.max_new_tokens, generator)
        rewards = rewards_of(prompts, completions, completion_mask)
        advantages = group_advantages(rewards, settings.group_size)
        with torch.no_grad():
            old_logps = completion_logps(policy, prompts, completions)
            ref_logps = completion_logps(reference, prompts, completions)
        mean_reward = rewards.mean().item()
        mean_length = completion_mask.sum(dim=1).mean().item()
        for _ in range(min(settings.updates_per_batch, settings.steps - step)):
            logps = completion_logps(policy, prompts, completions)
            loss = grpo_loss(logps, old_logps, ref_logps, advantages, completion_mask, settings.beta, settings.clip)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
            optimizer.step()
            warmup.step()
            step += 1
            yield StepRecord(step, loss.item(), mean_reward, mean_length)
