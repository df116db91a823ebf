"""The text of token ids in a bad step: from real tokenizers, only when asked for, and whatever a tokenizer does, the run is as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.report.terminal import incident_shown
from nanscope.snapshot.texts import LONGEST, MOST
from nanscope.verdict.token import Token
from nanscope.watching.vocabulary import SECONDS, texts_of

WORDS = ["<pad>", "<|endoftext|>", "the", " sum", "\n", "<b>&amp;</b>", "\x1b[31m\u202e", "x" * 500]


class Spelled:
    """A tokenizer that has no more than one method, and a list."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, ids: list[int]) -> str:
        return self.words[ids[0]]


def loss_of(logits: Tensor, old_log_probs: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1).gather(-1, input_ids.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(log_probs - old_log_probs)
    return (ratio * mask).sum() / mask.sum()


def run(tmp_path: Path, *targets: Any, vocabulary: int = 8, bad: bool = True, **options: Any) -> nanscope.Scope:
    """A plain loop of two steps; in the second one an old log-prob at [1, 2] is stale."""
    torch.manual_seed(0)
    model = nn.Embedding(vocabulary, vocabulary)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids, mask = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]), torch.ones(2, 4)
    ids[1, 2], mask[1, 2] = 1, 0.0
    with nanscope.watch(*targets, out=tmp_path / "run", **options) as scope:
        for step in range(2):
            old = torch.full((2, 4), -2.0)
            if step and bad:
                old[1, 2] = -200.0
            optimizer.zero_grad()
            loss_of(model(ids), old, ids, mask).backward()
            optimizer.step()
    return scope


def words_level() -> Any:
    """A real tokenizer of a few words."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS[:6])}, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|endoftext|>", unk_token="<pad>")


def pairs_of_bytes() -> Any:
    """A real tokenizer of bytes and their pairs, as GPT and Qwen have."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    found.train_from_iterator(["the cat on the mat"] * 4, trainer)
    return found


def test_a_step_is_saved_with_the_text_of_its_tokens(tmp_path: Path) -> None:
    """Of each id once, with special tokens and blanks as they are; the verdict names the token of the origin; a reader finds the same."""
    scope = run(tmp_path, SimpleNamespace(processing_class=Spelled(WORDS)), save_tokens=True)
    (snapshot, *_), (path, *_) = scope.snapshots, scope.paths
    assert snapshot.texts == {token: WORDS[token][:LONGEST] for token in (0, 1, 2, 3, 4, 5, 7)}
    assert path is not None and nanscope.load(path).texts == snapshot.texts
    (incident, *_) = scope.verdict.incidents
    assert incident.origin.index == (1, 2) and incident.token == Token(1, "<|endoftext|>")
    assert incident.tokens is not None and incident.tokens.texts == snapshot.texts
    assert scope.verdict.to_json()["incidents"][0]["token"] == {"id": 1, "text": "<|endoftext|>"}


def test_a_vocabulary_of_real_size_keeps_the_ids_of_its_tokens(tmp_path: Path) -> None:
    """What is over the vocabulary is not saved; the ids that picked out of it are, and their text."""
    scope = run(tmp_path, SimpleNamespace(tokenizer=Spelled(WORDS)), vocabulary=40_000, save_tokens=True)
    (snapshot, *_) = scope.snapshots
    assert max(tensor.numel() for tensor in snapshot.tensors.values()) == 8
    assert scope.verdict.incidents[0].token == Token(1, "<|endoftext|>")
    assert nanscope.replay(scope.paths[0]).location is not None


def test_a_step_that_did_not_ask_has_nothing_of_it(tmp_path: Path) -> None:
    """Neither ids nor text are in the file, and nobody asks the tokenizer."""

    class Silent:
        def decode(self, ids: list[int]) -> str:
            raise AssertionError("asked")

    scope = run(tmp_path, SimpleNamespace(tokenizer=Silent()))
    (path, *_) = scope.paths
    assert path is not None and b'"texts' not in path.read_bytes() and b"response_ids" not in path.read_bytes()
    (snapshot, *_) = scope.snapshots
    assert snapshot.texts == {} and scope.verdict.incidents[0].token is None and snapshot.notes == ()
    assert "token" not in scope.verdict.to_json()["incidents"][0]


def test_a_healthy_step_asks_no_tokenizer(tmp_path: Path) -> None:
    """Not even one that is saved because somebody wants it."""
    asked: list[list[int]] = []
    tokenizer = SimpleNamespace(decode=lambda ids: asked.append(ids) or "x")
    scope = run(tmp_path, SimpleNamespace(tokenizer=tokenizer), bad=False, save_tokens=True, save_steps=[1])
    assert scope.saved and not scope.snapshots and not asked and nanscope.load(scope.saved[0]).texts == {}


@pytest.mark.parametrize(
    "keeps",
    [
        lambda found: SimpleNamespace(processing_class=found),
        lambda found: SimpleNamespace(tokenizer=found),
        lambda found: SimpleNamespace(processing_class=SimpleNamespace(tokenizer=found, decode=lambda ids: "a picture")),
        lambda found: SimpleNamespace(processor=SimpleNamespace(tokenizer=found)),
        lambda found: found,
    ],
)
def test_a_tokenizer_is_found_where_trainers_keep_it(tmp_path: Path, keeps: Callable[[Any], Any]) -> None:
    """Under the names of the field, in a processor, or watched itself."""
    tokenizer = words_level()
    scope = run(tmp_path, keeps(tokenizer), save_tokens=True)
    assert scope.snapshots[0].texts == {token: WORDS[token] for token in range(6)}  # 7 is one that it does not know


def test_the_tokenizer_of_a_plain_loop_is_found(tmp_path: Path) -> None:
    """It is a local variable of whoever trains."""

    def main() -> nanscope.Scope:
        tokenizer = words_level()
        scope = run(tmp_path, save_tokens=True)
        tokenizer.eos_token_id  # noqa: B018 - it is still needed
        return scope

    assert main().snapshots[0].texts[1] == "<|endoftext|>"


def test_a_module_that_decodes_is_no_tokenizer(tmp_path: Path) -> None:
    """One that makes pictures of tokens would run a model."""

    class Pictures(nn.Module):
        def decode(self, ids: list[int]) -> str:
            raise AssertionError("asked")

    scope = run(tmp_path, SimpleNamespace(tokenizer=Pictures()), save_tokens=True)
    assert scope.snapshots[0].texts == {} and scope.snapshots[0].notes == ()


def test_pairs_of_bytes_are_read_as_words() -> None:
    """With their blank; a byte that is no character by itself is called as the tokenizer calls it; an id beyond the vocabulary is nothing."""
    transformers, plain = pytest.importorskip("transformers"), pairs_of_bytes()
    both = (plain, transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>"))
    the, special, byte = plain.token_to_id("Ġthe"), plain.token_to_id("<|endoftext|>"), plain.token_to_id("ĉ")
    part = plain.token_to_id("Ċ")
    for tokenizer in both:
        texts, error = texts_of(tokenizer, [the, special, byte, part, 1_000_000])
        assert texts == {the: " the", special: "<|endoftext|>", byte: "\t", part: "\n"} and not error
        broken = plain.token_to_id("ð")
        assert texts_of(tokenizer, [broken])[0] == {broken: "ð"}


def test_a_word_of_sentencepiece_keeps_its_blank() -> None:
    """Which is lost where it is decoded alone."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁the": 0, "the": 1, "<0xF0>": 2, "<s>": 3}, unk_token="<s>"))
    found.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()])
    assert texts_of(found, range(4))[0] == {0: " the", 1: "the", 2: "<0xF0>", 3: "<s>"}


def test_an_unknown_id_has_no_text() -> None:
    """Not the sign for what is unknown, which a tokenizer answers instead."""
    tokenizer = SimpleNamespace(unk_token_id=0, convert_ids_to_tokens=lambda token: ["<unk>", "a"][token] if token < 2 else "<unk>")
    assert texts_of(tokenizer, range(5))[0] == {0: "<unk>", 1: "a"}
    assert texts_of(SimpleNamespace(decode=dict.__getitem__), [1])[0] == {}


class Broken(Exception):
    pass


@pytest.mark.parametrize(
    "raised", [Broken("no\nwords"), SystemExit(3), RecursionError(), type("PanicException", (BaseException,), {})("panic")]
)
def test_a_tokenizer_that_raises_leaves_one_note(tmp_path: Path, raised: BaseException) -> None:
    """The step is saved, with its ids and without their text, and training goes on."""

    class Raising:
        def decode(self, ids: list[int]) -> str:
            raise raised

    scope = run(tmp_path, SimpleNamespace(tokenizer=Raising()), save_tokens=True)
    (snapshot, *_) = scope.snapshots
    assert snapshot.texts == {} and [slug for slug, _ in snapshot.notes] == ["no_token_text"]
    assert type(raised).__name__ in snapshot.notes[0][1] and scope.steps == 2 and not scope._failsafe.failures
    assert scope.verdict.incidents[0].token == Token(1, None)


def test_an_attribute_that_raises_is_none(tmp_path: Path) -> None:
    """A trainer's property may do anything."""

    class Trainer:
        @property
        def processing_class(self) -> None:
            raise Broken

        tokenizer = Spelled(WORDS)

    assert run(tmp_path, Trainer(), save_tokens=True).snapshots[0].texts[1] == "<|endoftext|>"


def test_who_is_asked_stays_as_it_was(tmp_path: Path) -> None:
    """Attributes that a tokenizer sets as it is asked, and all that it draws, are as if it had not been."""

    class Restless(Spelled):
        asked = 0

        def decode(self, ids: list[int]) -> str:
            self.asked, self.last = self.asked + 1, ids
            torch.rand(3), random.random()
            return super().decode(ids)

    after = []
    for save_tokens in (False, True):
        tokenizer = Restless(WORDS)
        random.seed(1)
        run(tmp_path, SimpleNamespace(tokenizer=tokenizer), save_tokens=save_tokens)
        after.append((random.random(), torch.rand(2).tolist(), vars(tokenizer)))
    assert after[0] == after[1]


def test_training_does_not_wait_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told until then is kept."""
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr("nanscope.watching.vocabulary.time.monotonic", lambda: float(next(clock)))
    texts, error = texts_of(SimpleNamespace(decode=lambda ids: "x"), range(MOST))
    assert 0 < len(texts) <= SECONDS and not error


def test_a_hostile_text_commands_nothing(tmp_path: Path) -> None:
    """In the terminal, as Markdown and on the page it is one line of visible characters, and no markup."""
    from rich.console import Console

    from nanscope.report.html import render_html
    from nanscope.report.markdown import render_markdown

    words = list(WORDS)
    words[1] = "</script>\x1b]0;x\x07\u202e\n`@all|<img src=x>"
    verdict = run(tmp_path, SimpleNamespace(tokenizer=Spelled(words)), save_tokens=True).verdict
    console = Console(width=200)
    with console.capture() as shown:
        console.print(incident_shown(verdict.incidents[0]))
    for text in (shown.get(), render_markdown(verdict), render_html(verdict)):
        assert "⟨U+202E⟩" in text and not set(text) & set("\x1b\x07\u202e") and "<img src=x" not in text and "token id" in text
    assert "@all" not in render_markdown(verdict)
