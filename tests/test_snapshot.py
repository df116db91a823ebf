"""Snapshots: bit for bit through a file, the same bytes every time, and one clear error for every damage."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import math
import os
import stat
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor
from verdicts import ppo_step

from nanscope.errors import SnapshotError
from nanscope.program.calls import Call, Leaf, Ref, Site
from nanscope.program.numbers import dtype_name, tensor_bytes
from nanscope.program.program import Program
from nanscope.snapshot.checksum import intact, seal
from nanscope.snapshot.file import load, save
from nanscope.snapshot.header import KEY, SCHEMA_VERSION, read_header
from nanscope.snapshot.history import TAIL, Entry
from nanscope.snapshot.observation import Kind, Observation, Origin, Phase
from nanscope.snapshot.step import Reached, Snapshot

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
SHAPES = ((), (1,), (0,), (5,), (2, 3), (2, 0, 4), (2, 1, 3))


def bits(tensor: Tensor) -> bytes:
    """What a tensor holds, byte by byte, in row-major order."""
    plain = tensor.detach().resolve_conj().contiguous().clone()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and bits(a) == bits(b)


def small(names: tuple[str | None, ...] = ("per_token_logps", "mask"), **changes: Any) -> Snapshot:
    """A step with a few leaves whose sum is the loss."""
    leaves = tuple(Leaf(i, name, "data", i == 0) for i, name in enumerate(names))
    n = len(names)
    calls = (
        *tuple(Call("aten.add.Tensor", (Ref(0 if i == 0 else n + i - 1), Ref(i)), (("alpha", 1),), (n + i,), site=0) for i in range(n)),
        Call("aten.sum.default", (Ref(2 * n - 1),), (), (2 * n,), site=1, grad=False),
    )
    sites = (
        Site("/a/trainer.py", 12, "Trainer.loss", 4, 12, 20, "ratio", "ratio", "logps + mask", ("logps", "mask"), ((12, "ratio = …"),)),
        Site("<stdin>", 1, "f"),
    )
    values: dict[str, Any] = {
        "step": 412,
        "rank": 3,
        "program": Program(leaves, calls, 2 * n, sites),
        "tensors": {i: torch.arange(6.0).reshape(2, 3) * (i + 1) for i in range(n)},
        "loss": torch.tensor(math.nan),
        "grads": {0: torch.full((2, 3), math.inf)},
        "reached": Reached(
            loss=math.nan,
            gradients=21,
            bad_gradients=21,
            weights=3,
            bad_weights=0,
            stepped="taken",
            scaled=True,
            optimizer="AdamW of Critic",
            micro_batches=4,
        ),
        "observation": Observation(Kind.CLIP, Phase.BACKWARD, Origin("exp", (0, 1), (2, 3), math.nan), optimizer="AdamW"),
        "settings": {"beta": 0.04, "loss_type": "dapo"},
        "history": (Entry(410, 3, 1.5, loss=0.25), Entry(411, 3, 2.5, loss=math.inf, nonfinite=True)),
        "environment": {"versions": {"torch": torch.__version__}},
        "opaque": ("native_dropout",),
        "notes": (("logged_loss", "text"),),
        "update": 2,
        "backward": 1650,
        "texts": {0: "", 279: " the", 151_643: "<|endoftext|>\x1b\u202e"},
        **changes,
    }
    return Snapshot(**values)


def equal(a: Snapshot, b: Snapshot) -> None:
    """Two snapshots hold the same, bit for bit."""
    assert (a.step, a.rank, a.update, a.part, a.backward, a.program, a.opaque, a.notes, a.settings, a.environment) == (
        b.step, b.rank, b.update, b.part, b.backward, b.program, b.opaque, b.notes, b.settings, b.environment,
    )  # fmt: skip
    assert repr(a.observation) == repr(b.observation)
    assert repr(a.reached) == repr(b.reached) and repr(a.history) == repr(b.history)
    assert a.texts == b.texts and (a.loss is None) == (b.loss is None)
    if a.loss is not None and b.loss is not None:
        assert same(a.loss, b.loss)
    for mine, theirs in ((a.tensors, b.tensors), (a.grads, b.grads)):
        assert mine.keys() == theirs.keys()
        assert all(same(mine[key], theirs[key]) for key in mine)


def rewritten(path: Path, change: Any) -> Path:
    """The same file with another description: `change` edits it in place."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[KEY])
    about = change(about) or about
    tensors = decode(path.read_bytes())
    path.write_bytes(encode(tensors, metadata={KEY: json.dumps(about)}))
    with contextlib.suppress(ValueError):  # what says nothing of a checksum has none
        seal(path)
    return path


def error_of(path: Path) -> SnapshotError:
    """The error that loading gives: one line, naming the file, with a slug."""
    with pytest.raises(SnapshotError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < len(str(path)) + 300, message
    assert caught.value.slug
    return caught.value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property."""
    return tmp_path_factory.mktemp("snapshots")


# -- there and back --------------------------------------------------------------------------------------------------------


@st.composite
def raw(draw: st.DrawFn) -> Tensor:
    """Any bytes as a tensor of any dtype: NaN payloads and everything else that bits can be."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if size else torch.zeros(shape, dtype=dtype)


@given(st.lists(raw(), min_size=1, max_size=4), st.booleans())
def test_what_is_saved_is_what_is_loaded(folder: Path, tensors: list[Tensor], with_loss: bool) -> None:
    """Every dtype, every shape, every bit pattern; NaN payloads survive."""
    snapshot = small(
        tuple(f"t{i}" for i in range(len(tensors))),
        tensors=dict(enumerate(tensors)),
        grads={0: tensors[0]},
        loss=tensors[-1] if with_loss else None,
    )
    path = save(snapshot, folder)
    equal(load(path), snapshot)


def test_nan_payloads_survive(tmp_path: Path) -> None:
    """A signalling NaN with a payload is the same NaN afterwards; it may tell which hardware wrote it."""
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FDEAD42, -0x400000, -1], dtype=torch.int32)
    path = save(small(tensors={0: patterns.view(torch.float32), 1: torch.ones(5)}, grads={}), tmp_path)
    assert load(path).tensors[0].view(torch.int32).tolist() == patterns.tolist()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:],
        lambda x: x[0, 0],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.as_strided((2, 2), (1, 1)),
        lambda x: x.requires_grad_(),
        lambda x: torch.nn.Parameter(x),
        lambda x: x.flip(0)[0],
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
    ],
    ids=[
        "transposed",
        "strided",
        "offset",
        "scalar",
        "expanded",
        "overlapping",
        "requires_grad",
        "parameter",
        "row",
        "conjugated",
        "negated",
    ],
)
def test_views_are_saved_by_content(tmp_path: Path, view: Any) -> None:
    """Strides, offsets, overlaps and lazy signs are how a tensor lies in memory; the file holds what it says."""
    tensor = view(torch.arange(12.0).reshape(3, 4))
    found = load(save(small(tensors={0: tensor, 1: torch.ones(1)}, grads={}), tmp_path)).tensors[0]
    assert torch.equal(found, tensor.detach()) and found.dtype is tensor.dtype


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, :-1],
        lambda x: x[:, ::2],
        lambda x: x.t()[:-1],
        lambda x: x.reshape(21, 16, -1).transpose(0, 2),
        lambda x: x[:, :1].expand(-1, 300),
    ],
    ids=["transposed", "sliced", "strided", "both", "permuted", "expanded"],
)
def test_a_step_is_replayed_in_the_order_in_which_it_was_added_up(tmp_path: Path, view: Any) -> None:
    """How a tensor lies in memory decides the order of additions, and so the last bits of a sum: loading restores it."""
    x = view(torch.randn(336, 301, generator=torch.Generator().manual_seed(1)))
    program = Program(
        (Leaf(0, "x", "data", True),),
        (
            Call("aten.sum.default", (Ref(0),), (), (1,)),
            Call("aten.mean.dim", (Ref(0), (0,)), (), (2,)),
            Call("aten.mul.Tensor", (Ref(0), Ref(2)), (), (3,)),
            Call("aten.mean.default", (Ref(3),), (), (4,)),
            Call("aten.add.Tensor", (Ref(1), Ref(4)), (), (5,)),
        ),
        5,
    )
    live = program.execute({0: x})
    found = load(save(small(program=program, tensors={0: x}, grads={}, loss=live.values[5]), tmp_path))
    again = found.program.execute(found.tensors)
    assert all(same(again.values[value], live.values[value]) for value in live.values)
    assert same(again.grads[0], live.grads[0])


def test_a_step_is_replayed_at_addresses_at_which_it_was_calculated(tmp_path: Path) -> None:
    """Where a tensor begins in memory decides by which steps a kernel goes through it, and so its last bits: loading restores that, too."""
    odd, made = torch.randn(7), torch.Generator().manual_seed(0)
    tensors = {0: odd, 1: torch.randn(2, 3, 6, generator=made), 2: odd[:5].half(), 3: torch.randn(2, 6, 5, generator=made)}
    found = load(save(small(("a", "b", "c", "d"), tensors=tensors, grads={}), tmp_path)).tensors
    assert [tensor.data_ptr() % 64 for tensor in found.values()] == [0] * len(tensors)
    assert same(torch.bmm(found[1], found[3]), torch.bmm(tensors[1], tensors[3]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is mapped is told by /proc")
def test_a_file_that_was_read_is_not_mapped_any_more(tmp_path: Path) -> None:
    """Its pages would count as memory of the process, beside the tensors."""
    path = save(ppo_step({}), tmp_path)
    snapshot = load(path)
    assert snapshot.tensors and snapshot.loss is not None
    assert path.name not in Path("/proc/self/maps").read_text()


def test_tensors_that_share_memory_are_saved_apart(tmp_path: Path) -> None:
    """A base and its views, and one tensor under two names, are tensors of their own in the file, and saving changes none of them."""
    base = torch.arange(6.0)
    snapshot = small(("a", "b", "c", "d"), tensors={0: base, 1: base, 2: base[2:], 3: base.view(2, 3)}, grads={0: base}, loss=base[0])
    equal(load(save(snapshot, tmp_path)), snapshot)
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_of_a_history_as_many_steps_are_read_as_are_written(tmp_path: Path) -> None:
    """The last ones; a file that holds a hundred thousand is no step of ours."""
    history = tuple(Entry(step, 0, 1.5) for step in range(3 * TAIL))
    assert load(save(small(history=history), tmp_path)).history == history[-TAIL:]


def test_two_saves_give_the_same_bytes(tmp_path: Path) -> None:
    """Also when the dictionaries were filled in another order: a file can be compared, hashed, and attached twice."""
    one = small()
    other = replace(
        one,
        tensors=dict(reversed(one.tensors.items())),
        settings=dict(reversed(one.settings.items())),
        environment=copy.deepcopy(one.environment),
    )
    first, second = save(one, tmp_path / "a"), save(other, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert save(load(first), tmp_path / "c").read_bytes() == first.read_bytes()


def test_two_processes_give_the_same_bytes(tmp_path: Path) -> None:
    """No hash seed reaches the file."""
    path = save(small(), tmp_path / "a")
    code = f"from nanscope.snapshot.file import load, save; save(load({str(path)!r}), {str(tmp_path)!r} + '/b')"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "412"}, timeout=120)
    assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()


def test_the_file_opens_without_nanscope(tmp_path: Path) -> None:
    """Plain safetensors with plain names, and one metadata key of strict JSON."""
    path = save(small(), tmp_path)
    assert path.name == "step-000412.rank3.update2.safetensors"
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"per_token_logps", "mask", "grad/per_token_logps", "loss"}
        assert set(file.metadata()) == {KEY}
        about = json.loads(file.metadata()[KEY], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert about["schema"] == SCHEMA_VERSION and about["tensors"] == {"0": "per_token_logps", "1": "mask"}
    assert [tensor.name for tensor in read_header(path).tensors] == ["grad/per_token_logps", "loss", "mask", "per_token_logps"]


def test_a_step_without_a_program_can_be_saved(tmp_path: Path) -> None:
    """A weight that went bad in the optimizer has neither program nor tensors."""
    snapshot = small(program=Program((), (), -1), tensors={}, grads={}, loss=None, history=(), reached=Reached())
    equal(load(save(snapshot, tmp_path)), snapshot)


@pytest.mark.parametrize("place", ["settings", "objective", "environment"])
def test_numbers_that_json_does_not_have_do_not_cost_the_file(tmp_path: Path, place: str) -> None:
    """`max_grad_norm=inf` is a usual setting, and a logged loss may be NaN: the step is saved all the same."""
    path = save(small(**{place: {"max_grad_norm": math.inf, "logged_loss": math.nan, "deep": [{"x": -math.inf}]}}), tmp_path)
    with safe_open(path, "pt") as file:
        json.loads(file.metadata()[KEY], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    load(path)


# -- names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("x", "x", "x"),
        ("loss", "grad/loss", "grad"),
        ("__metadata__", "a"),
        (None, None),
        ("", " "),
        ("../../etc/passwd", "/etc/passwd", "C:\\windows"),
        ("a\x00b", "a\nb", "\x1b[31mred"),
        ("<script>alert(1)</script>", "{{7*7}}", "%s%n"),
        ("x" * 100_000, "y"),
        ("ℓ_old", "日本語", "π"),
        ('inputs["old_per_token_logps"]', "self.mask", "f(x, y)[0]"),
        ("1", "2.5", "-"),
        ("value_1", None, "value_1_2"),
        ("grad/x", "x"),
        ("loss_2", "loss", "loss"),
    ],
    ids=lambda names: repr(names)[:40],
)
def test_any_name_becomes_a_plain_and_unique_one(tmp_path: Path, names: tuple[str | None, ...]) -> None:
    """Tensor names in a file are words, whatever the code calls them; every tensor comes back under its own id."""
    ids = range(len(names))
    snapshot = small(names, tensors={i: torch.full((2,), float(i)) for i in ids}, grads={i: torch.full((2,), 10.0 + i) for i in ids})
    path = save(snapshot, tmp_path)
    equal(load(path), snapshot)
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            assert len(name) < 300 and all(part.isidentifier() for part in name.removeprefix("grad/").split("/")), name


def test_a_name_is_the_last_word_of_what_the_code_calls_it(tmp_path: Path) -> None:
    """Keys and attributes are kept, what stands before them is not."""
    names = ('inputs["old_per_token_logps"]', "self.advantages", "mask", "x + y")
    path = save(small(names, tensors={i: torch.zeros(1) for i in range(4)}, grads={}), tmp_path)
    with safe_open(path, "pt") as file:
        assert {"old_per_token_logps", "advantages", "mask", "x", "loss"} == set(file.keys())


# -- damage ----------------------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    """At every byte of the head, and through the data behind it."""
    path = save(small(), tmp_path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    offsets = {
        *range(20),
        *range(20, 8 + length, 97),
        7 + length,
        8 + length,
        9 + length,
        *range(8 + length, len(whole), 13),
        len(whole) - 1,
    }
    cut = tmp_path / "cut.safetensors"
    for offset in sorted(offsets):
        cut.write_bytes(whole[:offset])
        assert error_of(cut).slug in ("snapshot-empty", "snapshot-truncated", "snapshot-header"), offset
    cut.write_bytes(whole + b"rest")
    error_of(cut)


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Bits rot: whatever byte of a file is hit, in its head, its description or its tensors, one clear error says so."""
    path = save(small(), tmp_path)
    whole = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    place = bytes(whole).index(b"checksum")
    for offset in {*range(8), *range(8, 8 + length, 23), *range(place - 4, place + 32), *range(8 + length, len(whole))}:
        for flip in (0x01, 0x20, 0xFF):
            damaged = bytearray(whole)
            damaged[offset] ^= flip
            path.write_bytes(bytes(damaged))
            error_of(path)


def test_a_checksum_is_that_of_the_file_as_it_says(tmp_path: Path) -> None:
    """Anybody can compute it with what Python has; a large file's, while it is written, is the same."""
    large = torch.randn(1 << 19)
    path = save(small(tensors={0: large, 1: torch.ones(0)}, grads={0: large * 2}), tmp_path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    head, tensors = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    written = json.loads(head.pop("__metadata__")[KEY])["checksum"]
    total = zlib.crc32(whole[: 8 + length].replace(written.encode(), b"crc32:00000000"))
    for start, end in sorted(entry["data_offsets"] for entry in head.values()):
        total = zlib.crc32(struct.pack("<I", zlib.crc32(tensors[start:end])), total)
    assert written == f"crc32:{total:08x}" and intact(path) is True
    seal(path)
    assert path.read_bytes() == whole


def test_a_key_of_the_same_name_is_not_the_checksum(tmp_path: Path) -> None:
    """What a trainer calls `checksum` in its settings is its own."""
    snapshot = small(settings={"checksum": "crc32:00000000", "text": '"checksum": "crc32:00000000"'})
    equal(load(save(snapshot, tmp_path)), snapshot)


def test_a_file_from_before_there_were_checksums_is_read(tmp_path: Path) -> None:
    """Schema 1 and 2 had none; a file of 3 without one has lost it."""

    def change(about: dict[str, Any]) -> None:
        del about["checksum"]
        about["schema"] = 2

    path = save(small(), tmp_path)
    load(rewritten(path, change))
    assert intact(path) is None
    assert error_of(rewritten(path, lambda about: about.update(schema=3))).slug == "snapshot-damaged"


@pytest.mark.parametrize(
    ("slug", "change"),
    [
        ("snapshot-newer", lambda about: about.update(schema=SCHEMA_VERSION + 1)),
        ("snapshot-damaged", lambda about: about.update(schema="two")),
        ("snapshot-damaged", lambda about: about.pop("schema") and None),
        ("snapshot-damaged", lambda about: about.pop("tensors") and None),
        ("snapshot-damaged", lambda about: about.pop("reached") and None),
        ("snapshot-damaged", lambda about: about.pop("step") and None),
        ("snapshot-damaged", lambda about: about["tensors"].update({"0": "a_tensor_that_is_not_there"})),
        ("snapshot-damaged", lambda about: about["tensors"].update({"zero": "mask"})),
        ("snapshot-damaged", lambda about: about.update(step="many")),
        ("snapshot-damaged", lambda about: about.update(step=math.inf)),
        ("snapshot-damaged", lambda about: about.update(step=10**400)),
        ("snapshot-damaged", lambda about: about.update(history=[3])),
        ("snapshot-damaged", lambda about: about.update(history=[{"step": 1}])),
        ("snapshot-damaged", lambda about: about.update(history=[{"step": 1, "rank": 0, "time": 0.0, "loss": "lots"}])),
        ("snapshot-damaged", lambda about: about.update(notes=[["only one"]])),
        ("snapshot-damaged", lambda about: about.update(reached=[])),
        ("snapshot-damaged", lambda about: about["reached"].update(loss="lots")),
        ("snapshot-damaged", lambda about: about["reached"].update(gradients=[1])),
        ("snapshot-damaged", lambda about: about["reached"].update(stepped={"a": 1})),
        ("snapshot-damaged", lambda about: about.update(settings=3)),
        ("snapshot-damaged", lambda about: about.update(objective=3)),
        ("snapshot-damaged", lambda about: about.update(texts=["the"])),
        ("snapshot-damaged", lambda about: about.update(texts={"-1": "the"})),
        ("snapshot-damaged", lambda about: about.update(texts={"1": 1})),
        ("snapshot-damaged", lambda about: about.update(texts={"1": "x" * 65})),
        ("program-unreadable", lambda about: about.update(program=None)),
        ("program-unreadable", lambda about: about["program"].pop("calls") and None),
        ("program-unreadable", lambda about: about["program"].update(output=math.inf)),
        ("program-unreadable", lambda about: about["program"]["calls"][0].pop()),
        ("program-unreadable", lambda about: about["program"]["calls"][0].__setitem__(1, [{"pickle": "gASV"}])),
        ("program-unreadable", lambda about: about["program"]["calls"][0].__setitem__(1, [{"v": 0, "dtype": "float32"}])),
        ("program-unreadable", lambda about: about["program"]["calls"][0].__setitem__(1, [{}])),
    ],
)  # fmt: skip
def test_a_damaged_description_is_one_clear_error(tmp_path: Path, slug: str, change: Any) -> None:
    """Keys that are missing and values that are not what they should be."""
    error = error_of(rewritten(save(small(), tmp_path), lambda about: change(about) and None))
    assert error.slug == slug, error


@pytest.mark.parametrize("word", ["x" * 10_000, "a\nb", "\x1b[31mred", "\x9b31m", "\u202eabc", "\ud800"], ids=ascii)
@pytest.mark.parametrize(
    "change",
    [
        lambda about, word: about["program"].update(computes=word),
        lambda about, word: about["program"]["calls"][0].__setitem__(1, [{word: word}]),
        lambda about, word: about["tensors"].update({"0": word}),
        lambda about, word: about.update(step=word),
    ],
)
def test_an_error_quotes_no_long_and_no_strange_words(tmp_path: Path, word: str, change: Any) -> None:
    """A file is quoted in one short line of characters that a terminal only shows."""
    with pytest.raises(SnapshotError) as caught:
        load(rewritten(save(small(), tmp_path), lambda about: change(about, word) and None))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_a_dtype_that_is_a_terminal_code_is_not_shown_as_one(tmp_path: Path) -> None:
    """What safetensors says of a file quotes it, too."""
    path = save(small(), tmp_path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    head = json.loads(whole[8 : 8 + length])
    head["mask"]["dtype"] = "\x1b[31m\nred"
    raw = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + whole[8 + length :])
    seal(path)
    with pytest.raises(SnapshotError) as caught:
        load(path)
    assert str(caught.value).isprintable() and "red" in str(caught.value)


def test_an_older_or_richer_file_is_read(tmp_path: Path) -> None:
    """Keys that we do not know are ignored; keys that may be missing are empty."""

    def change(about: dict[str, Any]) -> None:
        about["of_a_later_release"] = {"x": 1}
        about["reached"]["of_a_later_release"] = 1
        about["schema"] = 1  # which had no objective
        for key in ("checksum", "observed", "settings", "objective", "history", "environment", "opaque", "notes"):
            del about[key]

    found = load(rewritten(save(small(), tmp_path), change))
    assert (found.settings, found.objective, found.history, found.notes, found.opaque) == ({}, {}, (), (), ())


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    found = [path]
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


JUNK = [None, True, -1, 3, 2.5, 10**30, math.inf, math.nan, "", "x", "inf", [], [[]], {}, {"v": 0}, {"v": -7}, {"v": "x"}, {"dtype": "load"},
        {"float": "inf"}, {"a": 1, "b": 2}, [1, 2, 3], [[1, 2], [3, 4]], {"memory_format": "hub"}, {"dtype": "float32"}]  # fmt: skip


@given(st.data())
@example(None)
def test_no_description_raises_anything_else(folder: Path, data: st.DataObject | None) -> None:
    """Anything at any place of the description gives a snapshot whose fields hold what they say, or a SnapshotError."""
    path = save(small(), folder)

    def change(about: dict[str, Any]) -> Any:
        if data is None:
            return None
        for _ in range(data.draw(st.integers(1, 2))):
            place = data.draw(st.sampled_from(places(about)))
            if not place:
                return copy.deepcopy(data.draw(st.sampled_from(JUNK)))
            inner: Any = about
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
        return None

    try:
        found = load(rewritten(path, change))
    except SnapshotError as error:
        assert "\n" not in str(error)
        return
    assert type(found.step) is int and type(found.rank) is int
    assert found.reached.loss is None or isinstance(found.reached.loss, (int, float))
    assert isinstance(found.reached.stepped, str)
    assert all(entry.loss is None or isinstance(entry.loss, (int, float)) for entry in found.history)
    assert all(isinstance(tensor, Tensor) for tensor in found.tensors.values())


# -- writing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "proc"])
def test_a_folder_that_cannot_be_written_is_an_oserror(tmp_path: Path, where: str) -> None:
    """A file in the place of the folder, a file system that takes none."""
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" if where == "file" else Path("/proc/nanscope")
    if where == "proc" and not Path("/proc").exists():
        pytest.skip("no /proc here")
    with pytest.raises(OSError):
        save(small(), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A write that fails half-way removes its temporary file, and the file that was there before is whole."""
    path = save(small(), tmp_path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save(small(step=412, settings={"other": 1}), tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the file is written, too."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(small(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_made_with_the_permissions_that_people_expect(tmp_path: Path) -> None:
    """As any other new file, not with those of a temporary one."""
    before = os.umask(0o027)
    try:
        path = save(small(), tmp_path / "new" / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    """What a later look adds is written over what was there."""
    save(small(), tmp_path)
    path = save(small(reached=Reached(stepped="skipped")), tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert load(path).reached.stepped == "skipped"


def test_small_facts() -> None:
    """Sizes count elements, not strides; dtypes are called as people write them."""
    assert tensor_bytes({0: torch.zeros(2, 3), 1: torch.zeros(1, dtype=torch.float16).expand(4)}) == 24 + 8
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_half_a_surrogate_pair_in_a_file_is_read_as_what_it_is(tmp_path: Path) -> None:
    """No encoding can write it, and whatever reads the lines of source later would fail at it."""
    path = save(ppo_step({"host": "a\ud800b", "\udcff": "\U0001f600"}), tmp_path)
    assert load(path).environment == {"host": "a\ufffdb", "\ufffd": "\U0001f600"}
