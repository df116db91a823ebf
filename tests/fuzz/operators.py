"""Calls every operator that a file may name with arguments of any kind, many of them out of all bounds, forward and backward.

    python tests/fuzz/operators.py [--cases N] [--only NAME] [--case K] [--raw]

What must not happen: a signal, a hang, memory beyond the bounds, any exception but ProgramError. The tensors that a case gives end at a
page that may not be read, so that the first element read behind them is a signal, too.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import random
import sys
import time

import torch
from children import Limits, Tally, hunt
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.calls import Arg, Call, Ref, overload
from nanscope.program.cost import Allowance
from nanscope.program.ops import FLOW
from nanscope.program.perform import perform

torch.set_num_threads(1)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16, torch.bool)
ODD = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)
NOT_FOR_FILES = (torch.quint8, torch.qint32, torch.bits8, torch.uint16, torch.uint64, torch.complex32, torch.uint4, torch.quint4x2)
SIZES = ((), (1,), (0,), (16,), (3, 4), (4, 4), (2, 3, 4), (2, 0, 3), (1, 16), (16, 1), (2, 3, 4, 4), (64, 16))
INTS = (
    0,
    0,
    0,
    1,
    1,
    -1,
    2,
    3,
    4,
    -2,
    5,
    16,
    64,
    1000,
    10**6,
    10**9,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**33 + 1,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64,
)
REALS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-8, 1e8, 1e38, 1e300, -1e300, math.inf, -math.inf, math.nan)
WORDS = (
    "none", "tanh", "sum", "prod", "mean", "amax", "amin", "floor", "trunc", "fro", "nuc", "left", "right", "add", "multiply", "add",
    "", "x" * 1000, "\x00", "cuda",
)  # fmt: skip
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged, torch._mkldnn)  # type: ignore[attr-defined]


def names() -> list[str]:
    """Every operator of the whitelist that a file can reach."""
    found = []
    for name in sorted(FLOW):
        for variant in getattr(torch.ops.aten, name).overloads():
            try:
                overload(f"aten.{name}.{variant}")
            except ProgramError:
                continue
            found.append(f"aten.{name}.{variant}")
    return found


_libc = ctypes.CDLL(None, use_errno=True)


def fenced(tensor: Tensor) -> Tensor:
    """The same content in memory that ends where reading is forbidden."""
    size = tensor.numel() * tensor.element_size()
    if not size or size % tensor.element_size():
        return tensor
    page = mmap.PAGESIZE
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _libc.mprotect(ctypes.c_void_p(address + whole), ctypes.c_size_t(page), 0)
    view = memoryview(memory)[whole - size : whole]
    return torch.frombuffer(view, dtype=tensor.dtype).copy_(tensor.reshape(-1)).reshape(tensor.shape)


class Maker:
    """Arguments for one call, all of them from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values: dict[int, Tensor] = {}
        self.size = self.random.choice(SIZES)
        self.dtype = self.random.choice(FLOATS if self.random.random() < 0.7 else WHOLE)
        self.wild = self.random.random() < 0.5  # otherwise at most one argument is out of the ordinary
        torch.manual_seed(seed)

    def tensor(self, index: bool = False) -> Ref:
        pick = self.random
        size = self.size if pick.random() < 0.7 else pick.choice(SIZES)
        dtype = self.dtype if pick.random() < 0.7 else pick.choice((*FLOATS, *WHOLE, *ODD))
        if index or pick.random() < 0.25:
            dtype = pick.choice((torch.int64, torch.int64, torch.int32, torch.bool, torch.uint8))
        elements = math.prod(size)
        if dtype.is_floating_point or dtype.is_complex:
            data = torch.randn(elements).to(dtype)
            if pick.random() < 0.3 and elements:
                data[pick.randrange(elements)] = torch.tensor(pick.choice(REALS), dtype=torch.float64).to(dtype)
        else:
            high = pick.choice((2, 3, 4, 16, 100))
            data = torch.randint(0, high, (elements,)).to(dtype)
            if pick.random() < 0.4 and elements and dtype is not torch.bool:
                limits = torch.iinfo(dtype)
                some = pick.choice((limits.min, limits.max, -1, limits.max - 1, 10**9))
                data[pick.randrange(elements)] = max(limits.min, min(limits.max, some))
                if pick.random() < 0.2:
                    data.fill_(max(limits.min, min(limits.max, some)))
        made = fenced(data.reshape(size))
        layout = pick.random()
        if layout < 0.1 and made.dim() >= 2:
            made = made.transpose(0, -1)
        elif layout < 0.15:
            made = made.expand(pick.choice((2, 5)), *made.shape)
        elif layout < 0.2 and made.dim() and made.shape[0] > 1:
            made = made[1:]
        elif layout < 0.22:
            made = made.new_zeros(()).expand(pick.choice(((1 << 20,), (1 << 40,), (1 << 31, 1 << 31), (3, 1 << 33))))
        self.values[len(self.values)] = made
        return Ref(len(self.values) - 1)

    def int(self) -> int:
        pick = self.random
        if not self.wild and pick.random() < 0.8:
            return pick.choice((0, 1, -1, 2, 3, 4))
        return pick.choice(INTS)

    def ints(self, name: str) -> tuple[int, ...]:
        pick = self.random
        if name in ("size", "shape") and pick.random() < 0.4:
            return tuple(self.size)
        return tuple(self.int() for _ in range(pick.choice((0, 1, 1, 2, 2, 3, 4, 5)) if pick.random() < 0.6 else len(self.size)))

    def real(self) -> float:
        return self.random.choice(REALS) if self.random.random() < 0.6 else self.random.gauss(0, 3)

    def argument(self, argument: object) -> Arg:
        pick, kind, name = self.random, str(argument.real_type), str(argument.name)  # type: ignore[attr-defined]
        if kind.startswith("Optional["):
            if pick.random() < 0.4:
                return None
            kind = kind[len("Optional[") : -1]
        if pick.random() < 0.01:  # of another kind altogether
            kind = pick.choice(("str", "Tensor", "List[int]", "int", "bool", "List[Tensor]", "ScalarType"))
        match kind:
            case "Tensor":
                return self.tensor("ind" in name or name in ("target", "sorter", "repeats", "mask"))
            case "List[Tensor]":
                return tuple(self.tensor("ind" in name) for _ in range(pick.choice((0, 1, 2, 2, 3))))
            case "List[Optional[Tensor]]":
                return tuple(None if pick.random() < 0.3 else self.tensor(True) for _ in range(pick.choice((0, 1, 2, 3))))
            case "int":
                return self.int()
            case "List[int]":
                return self.int() if pick.random() < 0.1 else self.ints(name)
            case "number":
                return pick.choice((self.real, self.int))()
            case "float":
                return self.real()
            case "bool":
                return pick.random() < 0.5
            case "str":
                return pick.choice(WORDS)
            case "ScalarType":
                return pick.choice((*FLOATS, *WHOLE, *ODD, *NOT_FOR_FILES)) if pick.random() < 0.9 else pick.randrange(50)
            case "MemoryFormat":
                return pick.choice(MEMORY_FORMATS)
            case "Layout":
                return pick.choice(LAYOUTS)
            case "Device":
                return torch.device("cpu") if pick.random() < 0.8 else pick.choice(("meta", "cuda", "cpu", "mkldnn", "xla"))
        return None

    def call(self, op: str) -> Call:
        args, kwargs = [], {}
        for argument in overload(op)._schema.arguments:
            if argument.kwarg_only:
                if self.random.random() < 0.5:
                    kwargs[argument.name] = self.argument(argument)
            else:
                args.append(self.argument(argument))
        if self.random.random() < 0.1 and args:
            args.pop()
        return Call(op, tuple(args), tuple(kwargs.items()), (len(self.values),))


ALL = names()


def describe(case: int, op: str) -> str:
    made = Maker(case)
    call = made.call(op)
    shapes = {
        value: (tuple(t.shape), t.stride(), t.dtype, t.flatten()[:6].tolist() if t.numel() < 1000 else "…")
        for value, t in made.values.items()
    }
    return f"{call.op} {call.args} {dict(call.kwargs)}\n    {shapes}"


def run(case: int, only: list[str], raw: bool) -> str:
    op = only[case % len(only)]
    made = Maker(case)
    call = made.call(op)
    for value, tensor in made.values.items():
        if tensor.is_floating_point() and made.random.random() < 0.7:
            made.values[value] = tensor.detach().requires_grad_()
    try:
        results = perform(call, made.values, None, torch.device("cpu"), True, None if raw else Allowance.of(made.values.values(), 1))
    except ProgramError as error:
        if "allocate memory" in str(error) or "bad_alloc" in str(error):
            raise
        return error.slug
    for result in results:
        if isinstance(result, Tensor):
            result.detach().clone()  # what is a view is read
            if result.requires_grad and (result.is_floating_point() or result.is_complex()):
                try:
                    torch.autograd.backward([result], [torch.ones_like(result)], retain_graph=True)
                except (RuntimeError, IndexError) as error:
                    if "allocate memory" in str(error) or "bad_alloc" in str(error):
                        raise
                    return "backward failed"
                for tensor in made.values.values():
                    if tensor.grad is not None:
                        tensor.grad.clone()
    return "done"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one here, in this process")
    parser.add_argument("--only", help="operators whose name contains this")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--memory", type=int, default=1024, help="MiB")
    parser.add_argument("--raw", action="store_true", help="without the checks of a file")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    only = [name for name in ALL if not given.only or any(word in name for word in given.only.split(","))]
    if given.case is not None:
        print(describe(given.case, only[given.case % len(only)]), flush=True)
        print(run(given.case, only, given.raw))
        return 0
    tally, begun, found = Tally(), time.monotonic(), 0
    cases = range(given.first, given.first + given.cases)
    for finding in hunt(lambda case: run(case, only, given.raw), cases, Limits(given.seconds, given.memory << 20), tally, given.jobs):
        found += 1
        print(finding, describe(finding.case, only[finding.case % len(only)]), sep="\n    ", flush=True)
    print(f"{len(only)} operators, {tally}; {found} findings in {time.monotonic() - begun:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
