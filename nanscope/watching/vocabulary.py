"""The text of the token ids that a bad step is saved with, as the trainer's own tokenizer tells it.

watch(trainer, save_tokens=True)     trainer.processing_class, trainer.tokenizer, or the `tokenizer` of a processor
snapshot.texts                       {279: " the", 151643: "<|endoftext|>"}

Notable: a tokenizer is somebody's code. It is asked only when a step is bad, one id at a time, and whatever it does or raises, the run
goes on as if it had not been asked.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanscope.capture.seal import generators_kept
from nanscope.capture.source import variables
from nanscope.errors import words_of
from nanscope.locate.ids import INTEGERS, ids_among, ids_behind
from nanscope.program.local import local
from nanscope.roles import Role
from nanscope.snapshot.step import Snapshot
from nanscope.snapshot.texts import MOST, kept
from nanscope.watching.look import Look
from nanscope.watching.surroundings import find_trainer

PATIENCE = 64  # ids in a row at which a tokenizer raises, before it is not asked any more

SECONDS = 10.0  # that training waits for it, at a bad step

LOST = "\ufffd"  # stands for bytes that are no character by themselves


def picked_ids(look: Look) -> dict[Role, Tensor]:
    """Return the ids of the tokens that an origin tells something of, one each, by their role: what picked them out of the vocabulary may
    not be in the file."""
    if look.location is None or look.trace is None or look.location.origin.value_id not in look.trace.values:
        return {}
    origin, values = look.location.origin, look.trace.values
    shape = values[origin.value_id].shape
    found = ids_behind(look.trace, origin.value_id, shape)
    return {} if found is None else {Role.RESPONSE_IDS: values[found].reshape(shape)}


def with_texts(snapshot: Snapshot, targets: Sequence[Any]) -> Snapshot:
    """Return a snapshot with the text of the token ids in it, as far as there is a tokenizer that knows them. targets: what is watched."""
    ids = _ids_in(snapshot)
    tokenizer = _tokenizer(targets) if ids else None
    if tokenizer is None:
        return snapshot
    with generators_kept(), _as_it_was(tokenizer):
        texts, error = texts_of(tokenizer, ids)
    if error and not texts:
        return replace(snapshot, notes=(*snapshot.notes, ("no_token_text", f"token ids are saved without their text: {error}")))
    return replace(snapshot, texts=texts)


def _ids_in(snapshot: Snapshot) -> list[int]:
    """The ids of tokens in a snapshot, each once."""
    held = (local(snapshot.tensors[leaf]) for leaf in sorted(ids_among(snapshot.program)) if leaf in snapshot.tensors)
    parts = [tensor.detach().reshape(-1).cpu().long() for tensor in held if tensor is not None and tensor.dtype in INTEGERS]
    ids = torch.cat([torch.empty(0, dtype=torch.long), *parts]).unique()  # type: ignore[no-untyped-call]
    found: list[int] = ids[ids >= 0][:MOST].tolist()  # −100 and its like are no tokens
    return found


# -- the tokenizer -------------------------------------------------------------------------------------------------------------------------

_KEPT_AS = ("processing_class", "tokenizer", "processor")  # the first one without asking `tokenizer`: of some trainers that warns


def _tokenizer(targets: Sequence[Any]) -> Any:
    """The tokenizer of what is watched, of the trainer, or of whoever calls; None if none is seen."""
    return next(_tokenizers(targets), None)


def _tokenizers(targets: Sequence[Any]) -> Iterator[Any]:
    for owner in (*targets, find_trainer(targets)):
        if _tells(owner, "convert_ids_to_tokens"):
            yield owner
        yield from _of(owner)
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        held = variables(frame)
        for name in _KEPT_AS:
            yield from _itself(held.get(name))
        yield from _of(held.get("self"))
        frame = frame.f_back


def _of(owner: object) -> Iterator[Any]:
    for name in _KEPT_AS:
        yield from _itself(_attribute(owner, name))


def _itself(found: object) -> Iterator[Any]:
    """A tokenizer, or the one of a processor; a module that makes tokens of pictures is none."""
    for one in (_attribute(found, "tokenizer"), found):
        if not isinstance(one, (nn.Module, type)) and (_tells(one, "convert_ids_to_tokens") or _tells(one, "decode")):
            yield one


def _tells(found: object, name: str) -> bool:
    return not isinstance(found, (bytes, bytearray)) and callable(_attribute(found, name))


def _attribute(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001 - a property of the trainer's may do anything
        return None


@contextlib.contextmanager
def _as_it_was(tokenizer: object) -> Iterator[None]:
    """Whatever attributes a tokenizer sets in here are put back: some keep how they were last asked."""
    held = getattr(tokenizer, "__dict__", None)
    before = dict(held) if type(held) is dict else None
    try:
        yield
    finally:
        if (
            type(held) is dict
            and before is not None
            and (held.keys() != before.keys() or any(held[key] is not before[key] for key in held))
        ):
            held.clear()
            held.update(before)


# -- what it says --------------------------------------------------------------------------------------------------------------------------


def texts_of(tokenizer: Any, ids: Sequence[int]) -> tuple[dict[int, str], str]:
    """Return the text of each id that a tokenizer knows, and what it raised, "" for nothing."""
    piece, decode = _piece(tokenizer), _decode(tokenizer)
    unknown = _attribute(tokenizer, "unk_token_id")
    texts: dict[int, str] = {}
    error, in_a_row, end = "", 0, time.monotonic() + SECONDS
    for token in ids:
        if in_a_row >= PATIENCE or time.monotonic() > end:
            break
        try:
            text = _text(token, piece, decode, unknown)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # noqa: BLE001 - also what native code panics with, which is no Exception
            error, in_a_row = error or words_of(raised)[:200], in_a_row + 1
            continue
        in_a_row = 0
        if text:
            texts[token] = kept(text)
    return texts, error


_Tells = Callable[[int], object]


def _text(token: int, piece: _Tells | None, decode: _Tells | None, unknown: object) -> str:
    """What an id stands for, "" where the tokenizer does not know it."""
    name = piece(token) if piece is not None else None
    name = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    if piece is not None and (not isinstance(name, str) or (unknown not in (None, token) and name == piece(_number(unknown)))):
        return ""
    text = decode(token) if decode is not None else None
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not isinstance(name, str):
        return text if isinstance(text, str) else ""
    if not isinstance(text, str) or not text.strip(LOST):  # a part of a character, or none: how the tokenizer itself calls it
        return name
    return f" {text}" if name.startswith(_BEGINS) and not text[:1].isspace() else text


_BEGINS = "\u2581"  # how sentencepiece writes the blank before a word, which is lost where the word is decoded alone


def _number(found: object) -> int:
    return found if isinstance(found, int) else -1


def _piece(tokenizer: Any) -> _Tells | None:
    """How a tokenizer is asked what it calls an id."""
    for name in ("convert_ids_to_tokens", "id_to_token"):
        if _tells(tokenizer, name):
            ask: _Tells = getattr(tokenizer, name)
            return ask
    return None


_WHOLE: Mapping[str, bool] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def _decode(tokenizer: Any) -> _Tells | None:
    """How it is asked for the text of one."""
    if not _tells(tokenizer, "decode"):
        return None
    ask = tokenizer.decode
    try:
        takes = list(inspect.signature(ask).parameters.values())
    except (TypeError, ValueError):  # of native code that does not say
        takes = []
    any_word = any(one.kind is one.VAR_KEYWORD for one in takes)
    asked = {name: value for name, value in _WHOLE.items() if any_word or any(one.name == name for one in takes)}
    return lambda token: ask([token], **asked)
