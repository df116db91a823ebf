"""The snapshot: one bad step in one file, `step-000412.rank0.safetensors`.

The file is plain safetensors. It opens without nanscope:

    from safetensors import safe_open
    import json
    with safe_open("step-000412.rank0.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}      # 'per_token_logps', 'advantages', 'mask', …
        about = json.loads(file.metadata()["nanscope"])                      # everything else

Tensors are called what the training code calls them; `loss` is the recorded loss and `grad/NAME` the recorded gradient of NAME. They
keep their dtype, and NaN payloads survive. The one metadata key holds sorted JSON:

    schema        version of this format (integer)       step, rank       which step, of which process
    program       the recorded calls from the tensors to the loss: leaves, calls, output, sites (see `program`)
    tensors       leaf id → tensor name                  reached          what went bad: loss, gradients, weights
    strides       leaf id → strides in elements, of tensors that did not lie in memory row by row: the order of additions depends on it
    observed      what was seen in the process and cannot be recomputed from the file      settings   the trainer's, where visible
    objective     the framework's loss: key, settings as they were read while it ran, site (since schema 2)
    history       the last steps                         environment      versions, device, dtype of the run
    opaque        operators that could not be recorded; their results are leaves
    part          which backward pass of the step, from 1    asked      saved on request, nothing was wrong
    checksum      of the whole file, against damage on its way (see `checksum`; since schema 3)
    run           id of the run, as in its run.json      consequence_of   the earlier step that had spoilt the weights
    update        which one of the steps that the loop gives this number, from 1    backward    which backward pass of the run
    came, site    how the step came to this rank: made, all-reduce, weights, model; and where it was made, in short
    texts         token id → its text, only where token ids were asked for and the trainer has a tokenizer

There is no pickle and no code in it. Values between the leaves and the loss are not stored: they are recomputed by running the program.
Token ids and text are not in it unless asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanscope.errors import ProgramError, SnapshotError
from nanscope.plain import checked, read, show
from nanscope.program.local import memory_of
from nanscope.program.program import Program
from nanscope.snapshot.checksum import UNSEALED, intact, seal
from nanscope.snapshot.files import whole
from nanscope.snapshot.header import KEY, SCHEMA_VERSION, Header, read_header, verify
from nanscope.snapshot.history import TAIL, Entry
from nanscope.snapshot.observation import Observation
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.snapshot.texts import read_texts

if TYPE_CHECKING:
    from safetensors import TensorSpec

LONGEST_NAME = 100  # characters

MANY = 1 << 20  # bytes that are worth a thread

AT_ONCE = 1 << 24  # bytes that are read before the file is opened anew


def _plain_name(name: str | None, value: int, taken: set[str]) -> str:
    """A tensor name that is readable and unique: the last word of what the code calls it."""
    found = re.findall(r"[A-Za-z_]\w*", name or "")
    keyed = re.search(r"""\[["'](\w+)["']\]""", name or "")
    if keyed:
        plain = keyed.group(1)
    elif found:
        plain = found[-1] if re.fullmatch(r"[\w.]+", name or "") else found[0]
    else:
        plain = f"value_{value}"
    plain = plain[:LONGEST_NAME]
    unique, count = plain, 2
    while unique in taken or unique in ("loss", "__metadata__"):
        unique, count = f"{plain}_{count}", count + 1
    taken.add(unique)
    return unique


def save(snapshot: Snapshot, folder: Path | str) -> Path:
    """Write a snapshot into a folder and return the file's path; a reader never sees half a file.

    Raises OSError if the folder cannot be written.
    """
    from safetensors import SafetensorError, serialize_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = _names(snapshot)
    tensors = {name: snapshot.tensors[value] for value, name in names.items()}
    for value, grad in sorted(snapshot.grads.items()):
        if value in names:
            tensors[f"grad/{names[value]}"] = grad
    if snapshot.loss is not None:
        tensors["loss"] = snapshot.loss
    metadata = {KEY: json.dumps(_about(snapshot, names), sort_keys=True, allow_nan=False)}
    path = folder / snapshot.file_name
    with whole(path) as temporary:
        try:
            whole_tensors = _unshared(tensors)  # held until they are written
            sums = _Beside(whole_tensors)
            serialize_file({name: _spec(tensor) for name, tensor in whole_tensors.items()}, temporary, metadata=metadata)
            seal(temporary, sums.made())
        except SafetensorError as error:  # a full disk, for instance
            raise OSError(str(error)) from None
    return path


def holds(path: Path, snapshot: Snapshot) -> bool:
    """Is a file, undamaged, what was written of a snapshot as it is now, and would it be read as just that?

    What stood on a GPU is read into main memory, and a setting that is a tuple as a list: those are not the same. Raises SnapshotError if
    the file cannot be read.
    """
    about = read_header(path).about
    told: dict[str, Any] = json.loads(json.dumps(_about(snapshot, _names(snapshot))))
    beside = all(getattr(snapshot, name) == about[name] for name in ("settings", "objective", "environment"))
    tensors = (*snapshot.tensors.values(), *snapshot.grads.values(), *(() if snapshot.loss is None else (snapshot.loss,)))
    here = all(tensor.device.type == "cpu" for tensor in tensors)
    return here and beside and {**about, "checksum": UNSEALED} == told and intact(path) is True


def _names(snapshot: Snapshot) -> dict[int, str]:
    """What the tensors of a snapshot are called in its file, by leaf."""
    taken: set[str] = set()
    names = {leaf.id: leaf.name for leaf in snapshot.program.leaves}
    return {value: _plain_name(names.get(value), value, taken) for value in sorted(snapshot.tensors)}


class _Beside:
    """The CRC-32 of each tensor's bytes; of many, while they are written: both take as long."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._made = tensors, dict[str, int]()
        self._thread = threading.Thread(target=self._make)
        if sum(tensor.nbytes for tensor in tensors.values()) > MANY:
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and starts no threads any more
                self._thread.start()

    def _make(self) -> None:
        for name, tensor in self._tensors.items():
            self._made[name] = zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b"")

    def made(self) -> Mapping[str, int]:
        if self._thread.ident is None:
            self._make()
        else:
            self._thread.join()
        return self._made


def _spec(tensor: Tensor) -> TensorSpec:
    """What safetensors writes of a tensor; its own `save_file` needs numpy, which a training image may lack."""
    from safetensors import TensorSpec

    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors contiguous, in main memory, each with memory of its own: views and shared storage do not survive a file."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = own.untyped_storage()
        if memory_of(own) in seen or storage.nbytes() != own.numel() * own.element_size():
            own = own.clone()
        seen.add(memory_of(own))
        found[name] = own
    return found


def _about(snapshot: Snapshot, names: Mapping[int, str]) -> dict[str, Any]:
    described = {
        "schema": SCHEMA_VERSION,
        "checksum": UNSEALED,
        "step": snapshot.step,
        "rank": snapshot.rank,
        "program": snapshot.program.to_json(),
        "tensors": {str(value): name for value, name in names.items()},
        "strides": {str(value): list(snapshot.tensors[value].stride()) for value in names if not snapshot.tensors[value].is_contiguous()},
        "reached": asdict(snapshot.reached),
        "observed": snapshot.observation.to_json(),
        "settings": snapshot.settings,
        "objective": snapshot.objective,
        "history": [entry.to_json() for entry in snapshot.history],
        "environment": snapshot.environment,
        "opaque": list(snapshot.opaque),
        "notes": [list(note) for note in snapshot.notes],
        "part": snapshot.part,
        "asked": snapshot.asked,
        "run": snapshot.run,
        "consequence_of": snapshot.consequence_of,
        "update": snapshot.update,
        "backward": snapshot.backward,
        "came": str(snapshot.came),
        "site": snapshot.site,
        **({"worker": snapshot.worker} if snapshot.worker else {}),
        **({"texts": {str(token): text for token, text in snapshot.texts.items()}} if snapshot.texts else {}),
    }
    found: dict[str, Any] = show(described)
    return found


def _laid_out(tensor: Tensor, strides: object) -> Tensor:
    """The same elements at the strides they once had; as it is where the strides make no sense or elements would share memory.

    A dimension of stride 0 is an expanded one and takes no memory. Nothing here is larger than four times the tensor.
    """
    if not isinstance(strides, list) or len(strides) != tensor.ndim or not all(type(n) is int and 0 <= n < 1 << 40 for n in strides):
        return tensor
    solid = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    reach = 1 + sum(stride * (size - 1) for stride, size in zip(strides, solid.shape, strict=True))
    if not tensor.numel() or reach > 4 * tensor.numel() + 1024:
        return tensor
    end = 0
    for stride, size in sorted(zip(strides, solid.shape, strict=True)):
        if size > 1 and stride <= end:
            return tensor
        end += stride * (size - 1)
    memory = torch.zeros(reach, dtype=tensor.dtype)
    memory.as_strided(solid.shape, strides).copy_(solid)
    return memory.as_strided(tensor.shape, strides)


def _read(path: Path, header: Header) -> dict[str, Tensor]:
    """The tensors, where torch would have put them: at another address a kernel may take them by other steps, and round otherwise.

    What is read of a mapped file is memory of this process for as long as the mapping lasts: it is let go of now and then.
    """
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    left = [tensor.name for tensor in header.tensors]
    while left:
        with safe_open(path, "pt") as file:
            read = 0
            while left and read < AT_ONCE:
                name = left.pop()
                found[name] = file.get_tensor(name).clone()
                read += found[name].nbytes
    return found


def load(path: Path | str) -> Snapshot:
    """Read a snapshot.

    Raises SnapshotError if the file is missing, damaged, not a snapshot, or written by a newer release.
    """
    from safetensors import SafetensorError

    path = Path(path)
    header = read_header(path)
    verify(path, header)
    about = header.about
    try:
        tensors = _read(path, header)
    except (SafetensorError, struct.error, ValueError, KeyError, RuntimeError, OSError) as error:
        raise SnapshotError(f"{path}: the tensors are damaged ({error})", slug="snapshot-damaged") from None
    try:
        program = Program.from_json(about["program"])
        by_id = {int(value): str(name) for value, name in about["tensors"].items()}
        strides = about.get("strides") or {}
        missing = [name for name in by_id.values() if name not in tensors]
        if missing:
            raise SnapshotError(f"{path}: the tensor {missing[0]!r} is missing", slug="snapshot-damaged")
        return Snapshot(
            step=read(int, about["step"]),
            rank=read(int, about["rank"]),
            program=program,
            tensors={value: _laid_out(tensors[name], strides.get(str(value))) for value, name in by_id.items()},
            loss=tensors.get("loss"),
            grads={value: tensors[f"grad/{name}"] for value, name in by_id.items() if f"grad/{name}" in tensors},
            reached=Reached(**checked(Reached, about["reached"])),
            observation=Observation.from_json(about.get("observed") or {}),
            settings=dict(about.get("settings") or {}),
            objective=dict(about.get("objective") or {}),
            history=tuple(Entry.from_json(entry) for entry in about.get("history", [])[-TAIL:]),
            environment=dict(about.get("environment") or {}),
            opaque=tuple(str(name) for name in about.get("opaque", [])),
            notes=tuple((str(slug), str(text)) for slug, text in about.get("notes", [])),
            part=read(int, about.get("part", 1)),
            asked=bool(about.get("asked", False)),
            run=str(about.get("run") or ""),
            consequence_of=read(int | None, about.get("consequence_of")),
            update=read(int, about.get("update", 1)),
            backward=read(int, about.get("backward", 0)),
            worker=str(about.get("worker") or ""),
            texts=read_texts(about.get("texts")),
        )
    except SnapshotError:
        raise
    except ProgramError as error:
        raise SnapshotError(f"{path}: {error}", slug=error.slug) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SnapshotError(f"{path}: the description is damaged ({type(error).__name__}: {error})", slug="snapshot-damaged") from None
