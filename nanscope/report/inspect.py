"""What is in a snapshot, on the terminal.

run/step-000412.rank0.safetensors   step 412 · rank 0 · 6,704 bytes
  tensor     role           dtype  shape   bytes
  old_logps  old_log_probs  F32    [4, 6]     96
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.report.clean import clean
from nanscope.report.console import HARM, QUIET, STRONG, pairs, show, table
from nanscope.roles import Role, fitting, role_of
from nanscope.snapshot.header import Header
from nanscope.snapshot.texts import legible
from nanscope.text import count, line_in

if TYPE_CHECKING:
    from nanscope.snapshot.step import Snapshot  # needs torch

SETTINGS = ("reached", "environment", "settings", "objective", "observed")
FILES = 20  # sources named
WORDS, WORD = 5, 20  # texts of tokens that are shown, and characters of one


def print_header(header: Header, path: str, program: bool, snapshot: Snapshot | None = None, *, file: IO[str]) -> None:
    """Print everything that is in a snapshot file. program: also its calls. snapshot: the file, read, to tell what its tensors hold."""
    about = header.about
    head = f"   step {clean(about.get('step'))} · rank {clean(about.get('rank'))} · {header.size:,} bytes"
    parts: list[RenderableType] = [Text.assemble((clean(path), STRONG), head), *_text_of(about), _tensors(header, snapshot), _about(about)]
    parts += [Text(line) for line in _calls(about)] if program else []
    show(Group(*parts), file=file)


def _text_of(about: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield what says that the file tells the text of the batch, with a few of its words."""
    texts = about.get("texts")
    if not isinstance(texts, dict) or not texts:
        return
    some = ", ".join(f"“{legible(text, WORD)}”" for text in itertools.islice(texts.values(), WORDS) if isinstance(text, str))
    more = ", …" if len(texts) > WORDS else ""
    yield Text(f"  holds token ids and their text ({count(len(texts), 'token')}): who gets it can read the batch. {some}{more}", HARM)


def _tensors(header: Header, snapshot: Snapshot | None) -> RenderableType:
    heads = ("tensor", "dtype", "shape", "bytes") if snapshot is None else ("tensor", "role", "bytes", "holds")
    shown = table(*heads)
    shown.padding = (0, 3, 0, 0)
    shown.columns[heads.index("bytes")].justify = "right"
    held = {} if snapshot is None else dict(_held(header, snapshot))
    for tensor in header.tensors:
        name, size = clean(tensor.name), f"{tensor.bytes:,}"
        if tensor.name in held:
            role, line = held[tensor.name]
            shown.add_row(name, role, size, Text(line, HARM if "!" in line else ""))
        elif snapshot is None:
            shown.add_row(name, clean(tensor.dtype), str(list(tensor.shape)), size)
        else:
            shown.add_row(name, "", size, Text("not part of the step", QUIET))
    return Padding(shown, (0, 2))


def _held(header: Header, snapshot: Snapshot) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield every tensor's name in the file, its role, and what it holds; what the mask of its shape leaves out is told apart."""
    from nanscope.program.summary import summarise

    names = {int(value): str(name) for value, name in header.about["tensors"].items()}
    real = {value for value, tensor in snapshot.tensors.items() if tensor.is_floating_point() or tensor.is_complex()}
    roles = {leaf.id: leaf.role or fitting(role_of(leaf.name), leaf.id in real) or "" for leaf in snapshot.program.leaves}
    masks = {tuple(tensor.shape): tensor for value, tensor in snapshot.tensors.items() if roles.get(value) == Role.MASK}
    for value, tensor in snapshot.tensors.items():
        mask = masks.get(tuple(tensor.shape))
        yield names[value], (clean(roles.get(value, "")), str(summarise(tensor, None if mask is tensor else mask)))
    for value, grad in snapshot.grads.items():
        yield f"grad/{names[value]}", (str(Role.GRAD), str(summarise(grad, masks.get(tuple(grad.shape)))))
    if snapshot.loss is not None:
        yield "loss", (str(Role.LOSS), str(summarise(snapshot.loss)))


def _about(about: Mapping[str, Any]) -> RenderableType:
    recorded = about.get("program")
    calls, sites = _items(recorded, "calls"), _items(recorded, "sites")
    told = pairs()
    leaves = len(_items(recorded, "leaves"))
    told.add_row("program", f"{len(calls)} calls from {leaves} tensors, {len(sites)} source positions with their lines")
    for name in sorted({str(site[0]) for site in sites if isinstance(site, list) and site})[:FILES]:
        told.add_row("source of", clean(name))
    for key in SETTINGS:
        if about.get(key):
            told.add_row(key, clean(_flat(about[key])))
    told.add_row("history", count(len(_items(about, "history")), "step"))
    if opaque := _items(about, "opaque"):
        told.add_row("opaque", clean(", ".join(map(str, opaque))))
    return Padding(told, (1, 2))


def _calls(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield every recorded call with its source position, as far as the file makes sense."""
    sites = dict(enumerate(_items(about.get("program"), "sites")))
    for call in _items(about.get("program"), "calls"):
        fields = call if isinstance(call, list) else [call]
        site = sites.get(fields[4]) if len(fields) > 4 and isinstance(fields[4], int) else None
        place = line_in(str(site[0]), site[1]) if isinstance(site, list) and len(site) > 1 else ""
        yield f"  {clean(fields[0] if fields else ''):40} {clean(place)}"


def _items(data: Any, key: str) -> list[Any]:
    found = data.get(key) if isinstance(data, dict) else None
    return found if isinstance(found, list) else []


def _flat(data: Any) -> str:
    if not isinstance(data, dict):
        return str(data)[:400]
    parts = (f"{key} {f'({_flat(value)})' if isinstance(value, dict) else value}" for key, value in data.items() if value is not None)
    return ", ".join(parts)[:1200]
