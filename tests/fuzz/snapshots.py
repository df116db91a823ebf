"""Damages snapshots in thousands of ways and opens them: load and inspect, or replay, report, audit and measure.

    python tests/fuzz/snapshots.py read   [--cases 100000]
    python tests/fuzz/snapshots.py replay [--cases 10000] [--case K]

Half of the files are damaged byte by byte, half by somebody who knows the format: other operators, arguments out of all bounds, other ids,
shapes, strides and dtypes, calls of any kind put in between, nesting, words that are terminal codes or markup. They are given a checksum that
holds, for most of them, so that the search gets behind it. What must not happen: a traceback, a signal, a hang, more memory than `MEMORY`
beside the process, an error of more than one line, or a code or tag of the file's that reaches a terminal or a page.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from children import Limits, Tally, Wrong, hunt
from operators import ALL, INTS, REALS

import nanscope
from nanscope.__main__ import main as command
from nanscope.demo import DemoSettings, train
from nanscope.errors import SnapshotError
from nanscope.report.inspect import print_header
from nanscope.snapshot.checksum import seal
from nanscope.snapshot.file import load
from nanscope.snapshot.header import KEY, read_header

sys.path.insert(0, str(Path(__file__).parents[1] / "incidents"))
import new

torch.set_num_threads(1)
warnings.filterwarnings("ignore")

SCRIPTS = (
    "inf_times_zero_mask_k3_padding",  # forward
    "where_grad_trap_clip_min_positive_adv",  # backward
    "half_rmsprop_unused_rows",  # an optimizer's update
    "verl_fused_logprob_backward",  # the backward of a custom function
    "fp16_overflow_attention_scores_before_scaling",  # inside the model
    "seq_ratio_overflow_packed_index_add",
    "inf_grad_norm_clip_huge_finite_grad",
)
MEMORY = 384 << 20  # bytes: twice what the bounds of a small file let one call take
CODE, TAG = "\x1b[31m", "<nsx onload=alert(1)>"
DTYPES = (
    (1, "BOOL"), (1, "U8"), (1, "I8"), (1, "F8_E4M3"), (1, "F8_E5M2"), (1, "F8_E8M0"), (2, "F16"), (2, "BF16"), (2, "I16"), (2, "U16"),
    (4, "F32"), (4, "I32"), (4, "U32"), (8, "F64"), (8, "I64"), (8, "U64"), (8, "C64"),
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 2.5, 10**30, 2**63, -(2**63), 1e308, float("inf"), float("nan"), "", "x", "inf", "loss", [], [[]], {}, {"v": 0},
    {"v": -7}, {"v": "x"}, {"dtype": "load"}, {"dtype": "quint8"}, {"dtype": "float64"}, {"float": "inf"}, {"a": 1, "b": 2}, [1, 2, 3], [[1, 2], [3]],
    {"memory_format": "channels_last"}, {"layout": "sparse_coo"}, {"device": "cuda"}, CODE, TAG, "a\nb\rc\x00d", "\u202eabc", "[bold red]x[/]", "{{7*7}}",
    "x" * 10_000, "../../etc/passwd", "aten.exp.default", "optimizer", "backward", "forward", "activation", "update", "gradient", 412,
)  # fmt: skip


def seeds(folder: Path) -> list[Path]:
    """Snapshots of real steps that went wrong in each of the ways there are, and of one that did not."""
    found = []
    for name in SCRIPTS:
        with contextlib.redirect_stdout(io.StringIO()):
            new.watched(new.load(Path(new.__file__).parent / f"{name}.py"), folder / name)
        found.append(min((folder / name).rglob("*.safetensors")))
    with nanscope.watch(out=folder / "asked", save_steps=(2,)):
        for step, _ in enumerate(train(DemoSettings(steps=3, seed=3))):
            if step == 2:
                break
    return [*found, min((folder / "asked").rglob("*.safetensors"))]


class Mutant:
    """One damaged file, made from a seed."""

    def __init__(self, whole: bytes, chance: random.Random) -> None:
        self.random = chance
        (length,) = struct.unpack("<Q", whole[:8])
        self.head = json.loads(whole[8 : 8 + length])
        self.data = bytearray(whole[8 + length :])
        self.about = json.loads(self.head["__metadata__"][KEY])

    def changed(self) -> bytes:
        changes = (
            self.anywhere, self.operator, self.operator, self.argument, self.argument, self.argument, self.inserted, self.inserted,
            self.tensor, self.strides, self.content, self.ids, self.text, self.moved, self.observed,
        )  # fmt: skip
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 5))):
            change = self.random.choice(changes)
            with contextlib.suppress(IndexError, KeyError, TypeError, ValueError, AttributeError):
                change()
        self.head["__metadata__"][KEY] = json.dumps(self.about)
        raw = json.dumps(self.head).encode()
        return struct.pack("<Q", len(raw)) + raw + bytes(self.data)

    def junk(self) -> Any:
        if self.random.random() < 0.05:
            deep: Any = 1
            for _ in range(self.random.choice((5, 9, 50, 400))):
                deep = [deep]
            return deep
        return copy.deepcopy(self.random.choice(JUNK))

    def anywhere(self) -> None:
        place: Any = self.about
        for _ in range(12):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = self.random.choice(keys)
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or self.random.random() < 0.25:
                break
            place = inner
        if self.random.random() < 0.2:
            del place[key]
        elif isinstance(place, list) and self.random.random() < 0.2:
            place.insert(key, copy.deepcopy(self.random.choice(place)))
        else:
            place[key] = self.junk()

    def call(self) -> Any:
        return self.random.choice(self.about["program"]["calls"])

    def operator(self) -> None:
        self.call()[0] = self.random.choice(ALL)

    def known(self) -> list[int]:
        program = self.about["program"]
        return [leaf[0] for leaf in program["leaves"]] + [out for call in program["calls"] for out in call[3] if out is not None]

    def value(self) -> Any:
        pick = self.random
        kind = pick.randrange(12)
        if kind < 4:
            return {"v": pick.choice(self.known())}
        if kind < 7:
            return pick.choice(INTS)
        if kind == 7:
            real = pick.choice(REALS)
            return real if abs(real) < 1e307 else {"float": str(real)}
        if kind == 8:
            return [pick.choice(INTS) for _ in range(pick.choice((0, 1, 2, 3, 4)))]
        if kind == 9:
            return [{"v": pick.choice(self.known())} for _ in range(pick.choice((1, 2, 3)))]
        if kind == 10:
            return pick.choice((True, False, None, "sum", "floor", "trunc", {"dtype": "float16"}, {"dtype": "int64"}, {"dtype": "quint8"}))
        return self.junk()

    def argument(self) -> None:
        call = self.call()
        if call[2] and self.random.random() < 0.2:
            call[2][self.random.choice(list(call[2]))] = self.value()
        elif self.random.random() < 0.15:
            call[1].append(self.value())
        else:
            call[1][self.random.randrange(len(call[1]))] = self.value()

    def inserted(self) -> None:
        """A call of any operator, on values that are there, whose result takes the place of one of them."""
        program, pick = self.about["program"], self.random
        index = pick.randrange(len(program["calls"]) + 1)
        made = [leaf[0] for leaf in program["leaves"]] + [out for call in program["calls"][:index] for out in call[3] if out is not None]
        op, own = pick.choice(ALL), 9000 + pick.randrange(1000)
        args = []
        for argument in self.arguments(op):
            kind = str(argument.real_type)
            if "List[Tensor]" in kind or "List[Optional" in kind:
                args.append([{"v": pick.choice(made)} for _ in range(pick.choice((1, 2)))])
            elif "Tensor" in kind:
                args.append({"v": pick.choice(made)})
            elif "List[int]" in kind:
                args.append([pick.choice(INTS) for _ in range(pick.choice((1, 2, 3)))])
            elif "int" in kind or "number" in kind or "float" in kind:
                args.append(pick.choice(INTS) if pick.random() < 0.5 else pick.choice((0, 1, 2, -1)))
            elif "bool" in kind:
                args.append(pick.random() < 0.5)
            else:
                args.append(None)
        replaced = pick.choice(made)
        for call in program["calls"][index:]:
            call[1] = json.loads(json.dumps(call[1]).replace(json.dumps({"v": replaced}), json.dumps({"v": own})))
        program["calls"].insert(index, [op, args, {}, [own], pick.choice((-1, 0, 1)), pick.random() < 0.7, ""])
        if program["output"] == replaced:
            program["output"] = own

    @staticmethod
    def arguments(op: str) -> list[Any]:
        _, name, variant = op.split(".")
        schema = getattr(getattr(torch.ops.aten, name), variant)._schema
        return [argument for argument in schema.arguments if not argument.kwarg_only]

    def tensor(self) -> None:
        """Another dtype or shape for the same bytes, or ones that do not fit."""
        entry = self.head[self.random.choice([name for name in self.head if name != "__metadata__"])]
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        if self.random.random() < 0.2:
            entry[self.random.choice(list(entry))] = self.junk()
            return
        width, dtype = self.random.choice(DTYPES)
        if size % width == 0:
            count = size // width
            entry["dtype"] = dtype
            entry["shape"] = self.random.choice(
                ([count], [1, count], [count, 1], [count // 2, 2] if count % 2 == 0 else [count], [1] * 20 + [count])
            )

    def strides(self) -> None:
        self.about["strides"] = {
            key: [self.random.choice((0, 1, 2, 3, 1000, 2**39, -1, 2**70)) for _ in range(self.random.choice((1, 2, 3)))]
            for key in self.about["tensors"]
        }

    def content(self) -> None:
        start = self.random.randrange(len(self.data))
        many = self.random.choice((1, 8, 64, len(self.data)))
        fill = self.random.choice((b"\x00", b"\xff", b"\x7f", b"\x80", None))
        for place in range(start, min(start + many, len(self.data))):
            self.data[place] = self.random.randrange(256) if fill is None else fill[0]

    def ids(self) -> None:
        program, pick = self.about["program"], self.random
        match pick.randrange(5):
            case 0:
                program["output"] = pick.choice(self.known())
            case 1:
                self.call()[3] = [pick.choice([*self.known(), None, -1, 10**30])]
            case 2:
                pick.choice(program["leaves"])[0] = pick.choice(self.known())
            case 3:
                program["computes"] = pick.choice(("loss", "gradient", "update", "activation"))
            case 4:
                self.about["tensors"][pick.choice(list(self.about["tensors"]))] = pick.choice(list(self.about["tensors"].values()))

    def text(self) -> None:
        """A terminal code or a tag where a word stands."""
        bad, program = self.random.choice((CODE, TAG, "\x07\x00\r", "\x9b31m", "[red]x[/red]")), self.about["program"]
        match self.random.randrange(5):
            case 0:
                site = self.random.choice(program["sites"])
                site[self.random.choice((0, 2, 6, 7, 8))] = bad
            case 1:
                self.random.choice(program["leaves"])[self.random.choice((1, 2, 4, 5))] = bad
            case 2:
                self.about["settings"][bad] = bad
            case 3:
                self.about["notes"] = [[bad, bad]]
            case 4:
                self.random.choice(program["sites"])[10] = [[1, bad], [2, bad]]

    def moved(self) -> None:
        calls = self.about["program"]["calls"]
        calls.insert(self.random.randrange(len(calls)), calls.pop(self.random.randrange(len(calls))))

    def observed(self) -> None:
        seen = self.about["observed"]
        seen[self.random.choice([*seen, "phase", "kind", "origin", "chain", "facts", "tried", "optimizer"])] = self.junk()


def byte_by_byte(whole: bytes, chance: random.Random) -> bytes:
    """The file with a few bytes changed, put in, taken out, or cut off."""
    data = bytearray(whole)
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place = chance.randrange(8 + length if chance.random() < 0.8 else len(data)) % max(1, len(data))
        match chance.randrange(8):
            case 0:
                data[place] = chance.randrange(256)
            case 1 | 2 | 3:
                data[place] ^= 1 << chance.randrange(8)
            case 4:
                data[place : place + 1] = bytes([chance.choice(b'0123456789{}[],:"\\-.eE')])
            case 5:
                del data[place : place + chance.choice((1, 2, 30))]
            case 6:
                data[place:place] = bytes(chance.choice((1, 3))) if chance.random() < 0.5 else data[place : place + 20]
            case 7 if chance.random() < 0.1:
                del data[place:]
            case _:
                data[place] = ord(chance.choice("0123456789"))
    return bytes(data)


def damaged(case: int, wholes: list[bytes]) -> tuple[bytes, bool]:
    """A damaged file, and whether it gets a checksum that holds."""
    chance = random.Random(case)
    whole = chance.choice(wholes)
    if chance.random() < 0.3:
        return byte_by_byte(whole, chance), chance.random() < 0.7
    return Mutant(whole, chance).changed(), chance.random() < 0.95


def make(case: int, wholes: list[bytes], path: Path) -> None:
    data, sealed = damaged(case, wholes)
    if sealed:
        with contextlib.suppress(Exception):  # no head, no place: then it has none
            path.write_bytes(data)
            seal(path)
            return
    path.write_bytes(data)


def read(case: int, wholes: list[bytes], folder: Path) -> str:
    """Load and inspect."""
    path = folder / f"{os.getpid()}.safetensors"
    make(case, wholes, path)
    try:
        header = read_header(path)
    except SnapshotError as error:
        _line(str(error))
        return error.slug
    out, snapshot, said = io.StringIO(), None, "loaded"
    try:
        snapshot = load(path)
    except SnapshotError as error:
        _line(str(error))
        said = error.slug
    print_header(header, "x", case % 8 == 0, snapshot, file=out)
    _harmless(out.getvalue())
    return said


def replay(case: int, wholes: list[bytes], folder: Path) -> str:
    """Replay, report, audit and measure, as the command line does."""
    path, page = folder / f"{os.getpid()}.safetensors", folder / f"{os.getpid()}.html"
    make(case, wholes, path)
    said = _called("replay", str(path))
    if said.startswith("1 snapshot-"):
        return said
    page.unlink(missing_ok=True)
    _called("report", str(path), "-o", str(page))
    if page.exists() and TAG in page.read_text(encoding="utf-8"):
        raise Wrong("a tag of the file's stands in the page")
    _called("audit", str(path))
    _called("precision", str(path))
    return said


def _called(*arguments: str) -> str:
    """Run a verb in this process; return its exit status, and the first word of an error."""
    sys.argv = ["nanscope", *arguments]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            command()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    _harmless(out.getvalue())
    if status not in (0, 1, 3, 4):
        raise Wrong(f"{arguments[0]} ended with status {status}: {err.getvalue()[-500:]}")
    if status == 1:
        _line(err.getvalue().rstrip("\n"))
    return f"{status}"


def _line(text: str) -> None:
    if "\n" in text or not text.strip() or len(text) > 2000:
        raise Wrong(f"an error that is not one line: {text[:500]!r}")
    _harmless(text)


def _harmless(text: str) -> None:
    bad = next((char for char in text if (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160), None)
    if bad is not None:
        place = text.index(bad)
        raise Wrong(f"the control character {bad!r} is shown: {text[max(0, place - 60) : place + 60]!r}")


WAYS: dict[str, Callable[[int, list[bytes], Path], str]] = {"read": read, "replay": replay}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one here, in this process, and leave its file in the current folder")
    parser.add_argument("--seconds", type=float, default=60, help="a case may take")
    parser.add_argument("--memory", type=int, default=MEMORY >> 20, help="MiB that a case may take")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds after which no further case begins")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cases = given.cases or {"read": 100_000, "replay": 10_000}[given.way]
    folder = Path(tempfile.mkdtemp(prefix="nanscope-fuzz-"))
    try:
        wholes = [path.read_bytes() for path in seeds(folder)]
        if given.case is not None:
            make(given.case, wholes, Path(f"case-{given.case}.safetensors"))
            print(WAYS[given.way](given.case, wholes, folder))
            return 0
        tally, begun, found = Tally(), time.monotonic(), 0
        run = partial(WAYS[given.way], wholes=wholes, folder=folder)
        limits = Limits(given.seconds, given.memory << 20)
        try:
            for finding in hunt(run, range(given.first, given.first + cases), limits, tally, given.jobs, begun + given.within):
                found += 1
                print(f"{finding}\n    python tests/fuzz/snapshots.py {given.way} --case {finding.case}", flush=True)
        finally:  # a search that is cut off tells how far it came
            print(f"{given.way}: {tally}; {found} findings in {time.monotonic() - begun:.0f} s", flush=True)
        return 1 if found else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
