"""What is in a snapshot, on the terminal.

run/step-000412.rank0.safetensors   step 412 · rank 0 · 6,704 bytes
  tensor     role           dtype  shape   bytes
  old_logps  old_log_probs  F32    [4, 6]     96
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from nanscope.report.clean import clean
from nanscope.report.console import STRONG, pairs, show, table
from nanscope.snapshot.header import Header

SETTINGS = ("reached", "environment", "settings", "objective", "observed")
FILES = 20  # sources named


def print_header(header: Header, path: str, program: bool, *, file: IO[str]) -> None:
    """Print everything that is in a snapshot file. program: also its calls."""
    about = header.about
    head = f"   step {clean(about.get('step'))} · rank {clean(about.get('rank'))} · {header.size:,} bytes"
    parts: list[RenderableType] = [Text.assemble((clean(path), STRONG), head), _tensors(header), _about(about)]
    parts += [Text(line) for line in _calls(about)] if program else []
    show(Group(*parts), file=file)


def _tensors(header: Header) -> RenderableType:
    shown = table("tensor", "dtype", "shape", "bytes")
    shown.padding = (0, 3, 0, 0)
    shown.columns[-1].justify = "right"
    for tensor in header.tensors:
        shown.add_row(clean(tensor.name), clean(tensor.dtype), str(list(tensor.shape)), f"{tensor.bytes:,}")
    return Padding(shown, (0, 2))


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
    told.add_row("history", f"{len(_items(about, 'history'))} steps")
    if about.get("opaque"):
        told.add_row("opaque", clean(", ".join(str(name) for name in about["opaque"])))
    return Padding(told, (1, 2))


def _calls(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield every recorded call with its source position, as far as the file makes sense."""
    sites = dict(enumerate(_items(about.get("program"), "sites")))
    for call in _items(about.get("program"), "calls"):
        fields = call if isinstance(call, list) else [call]
        site = sites.get(fields[4]) if len(fields) > 4 and isinstance(fields[4], int) else None
        place = f"{Path(str(site[0])).name}:{site[1]}" if isinstance(site, list) and len(site) > 1 else ""
        yield f"  {clean(fields[0] if fields else ''):40} {clean(place)}"


def _items(data: Any, key: str) -> list[Any]:
    found = data.get(key) if isinstance(data, dict) else None
    return found if isinstance(found, list) else []


def _flat(data: Any) -> str:
    if not isinstance(data, dict):
        return str(data)[:400]
    parts = (f"{key} {f'({_flat(value)})' if isinstance(value, dict) else value}" for key, value in data.items() if value is not None)
    return ", ".join(parts)[:1200]
