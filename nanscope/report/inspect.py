"""The head of a snapshot on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanscope.snapshot.header import Header

if TYPE_CHECKING:
    pass

from nanscope.report.console import QUIET, STRONG, console_for, safe
from nanscope.report.terminal import _flat, _items


def print_header(header: Header, path: str, program: bool, *, file: IO[str]) -> None:
    """Print everything that is in a snapshot file."""
    console = console_for(file)
    about = header.about
    console.print(
        Text.assemble((safe(path), STRONG), f"   step {safe(about.get('step'))} · rank {safe(about.get('rank'))} · {header.size:,} bytes")
    )
    tensors = Table(box=None, padding=(0, 3, 0, 0), header_style=QUIET, title=None)
    for name in ("tensor", "dtype", "shape", "bytes"):
        tensors.add_column(name, justify="right" if name == "bytes" else "left")
    for tensor in header.tensors:
        tensors.add_row(safe(tensor.name), safe(tensor.dtype), str(list(tensor.shape)), f"{tensor.bytes:,}")
    console.print(Padding(tensors, (0, 2)))
    recorded = about.get("program") if isinstance(about.get("program"), dict) else {}
    calls, sites = _items(recorded, "calls"), _items(recorded, "sites")
    files = sorted({str(site[0]) for site in sites if isinstance(site, list) and site})
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "program", f"{len(calls)} calls from {len(_items(recorded, 'leaves'))} tensors, {len(sites)} source positions with their lines"
    )
    for name in files[:20]:
        table.add_row("source of", safe(name))
    for key in ("reached", "environment", "settings", "objective", "observed"):
        if about.get(key):
            table.add_row(key, safe(_flat(about[key])))
    table.add_row("history", f"{len(_items(about, 'history'))} steps")
    if about.get("opaque"):
        table.add_row("opaque", safe(", ".join(str(name) for name in about["opaque"])))
    console.print(Padding(table, (1, 2)))
    if program:
        for call in calls:
            site = (
                sites[call[4]]
                if isinstance(call, list) and len(call) > 4 and isinstance(call[4], int) and 0 <= call[4] < len(sites)
                else None
            )
            place = f"{Path(str(site[0])).name}:{site[1]}" if isinstance(site, list) and len(site) > 1 else ""
            console.print(Text(f"  {safe(call[0] if isinstance(call, list) and call else call):40} {safe(place)}"))
