"""Healthy steps of the frameworks' own loss functions, recorded: what docs/hazards.md tells of, and tests/test_hazards.py asks.

A framework's function is called as `nanscope.native` calls it, or here, where that knows no way; the program begins at its door: what is
done to the batch before it is called is not a part of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import words_of
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.paths import LossPath, paths
from nanscope.locate.trace import Trace
from nanscope.native import import_failure, installed, native_loss
from nanscope.objective.settings import LossInputs
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.program import Program
from nanscope.snapshot.step import Snapshot
from nanscope.watching.checking import recorded

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))
NAMES = {
    "trl": "TRL", "liger": "Liger-Kernel", "verl": "verl", "skyrl": "SkyRL", "openrlhf": "OpenRLHF", "nemo_rl": "NeMo-RL",
    "torchtitan": "torchtitan", "prime_rl": "prime-rl",
}  # fmt: skip
PACKAGES = {"nemo_rl": "nemo_rl", "prime_rl": "prime_rl", "torchtitan": "torchtitan"}  # from a checkout, whose version is told beside it
WORDS = 8  # of the vocabulary, where a loss is given logits


def batch(advantage: float = 1.0) -> LossInputs:
    """Return a batch of four rows of three tokens that count and one that does not; [4, 4], float32, no number twice.

    advantage: sign and size of A in the first and the third row; in the others −A / 2.
    """
    generator = torch.Generator().manual_seed(5)
    policy = -0.3 - 1.5 * torch.rand(4, 4, generator=generator)
    old, ref, rollout = (policy + 0.1 * torch.randn(4, 4, generator=generator).tanh() for _ in range(3))
    mask = torch.ones(4, 4)
    mask[:, 3] = 0
    advantages = torch.tensor([1.0, -0.5, 1.1, -0.6]) * advantage
    entropy = 0.5 + torch.rand(4, 4, generator=generator)
    return LossInputs(policy.requires_grad_(), old, ref, old + (rollout - policy.detach()) / 4, advantages, mask, entropy)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A framework that `nanscope.native` does not know: what imports it, and its losses by the part of their key after the dot."""

    load: Callable[[], object]
    losses: Mapping[str, Callable[[LossInputs, Mapping[str, Any]], Tensor]]


def _prime() -> ModuleType:
    """Import prime-rl's losses; its configuration, which is for CUDA's packages, is stood in for."""
    if "prime_rl.trainer.rl.loss" not in sys.modules and importlib.util.find_spec("prime_rl") is not None:
        from harness import absent

        absent(prime_rl__configs="", prime_rl__configs__trainer="CustomLossConfig DefaultLossConfig IPOLossConfig LossConfig",
               prime_rl__utils__utils="import_object")  # fmt: skip
    return importlib.import_module("prime_rl.trainer.rl.loss")


def _packed(kind: str) -> Callable[[LossInputs, Mapping[str, Any]], Tensor]:
    """Rows one after another, as prime-rl packs them."""

    def call(inputs: LossInputs, settings: Mapping[str, Any]) -> Tensor:
        from prime_rl_worker import DEFAULTS

        prime, config, mask = _prime(), SimpleNamespace(**{**DEFAULTS, **settings}), inputs.mask.bool()
        own = {"default": lambda given: prime.default_loss_fn(given, config), "ipo": lambda given: prime.ipo_loss_fn(given, config)}
        advantages = inputs.advantages[:, None].expand_as(inputs.log_probs).clone()
        parts = [list(part) for part in (inputs.log_probs, inputs.old_log_probs, advantages, mask)]
        loss: Tensor = prime.compute_loss(parts[0], parts[1], None, parts[2], parts[3], None, None, None, own[kind], int(mask.sum()), 1, 1)[
            0
        ]
        return loss

    return call


def _titan() -> ModuleType:
    """Import torchtitan's losses without the package around them, which asks for vLLM."""
    name = "torchtitan.experiments.rl"
    if name not in sys.modules:
        spec = importlib.util.find_spec("torchtitan.experiments")
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError("No module named 'torchtitan'")
        shell = ModuleType(name)
        shell.__path__ = [str(Path(place) / "rl") for place in spec.submodule_search_locations]
        sys.modules[name] = shell
    return importlib.import_module(f"{name}.losses")


def _logits(kind: str) -> Callable[[LossInputs, Mapping[str, Any]], Tensor]:
    """From logits whose log-probs are those of the batch, as torchtitan's model gives them."""

    def call(inputs: LossInputs, settings: Mapping[str, Any]) -> Tensor:
        loss_class = getattr(_titan(), kind)
        labels = torch.arange(inputs.log_probs.numel()).reshape(inputs.log_probs.shape) % WORDS
        others = torch.log((1 - inputs.log_probs.exp()) / (WORDS - 1))[..., None].expand(*labels.shape, WORDS)
        logits = others.scatter(-1, labels[..., None], inputs.log_probs[..., None])
        mask = inputs.mask.bool()
        loss: Tensor = loss_class(loss_class.Config(**settings))(
            logits, labels, float(mask.sum()), generator_logprobs=inputs.old_log_probs,
            advantages=inputs.advantages[:, None].expand_as(inputs.log_probs).clone(), loss_mask=mask,
        )[0]  # fmt: skip
        return loss

    return call


FOREIGN = {
    "prime_rl": Foreign(_prime, {"default": _packed("default"), "ipo": _packed("ipo")}),
    "torchtitan": Foreign(_titan, {"dapo": _logits("DAPOLoss"), "grpo": _logits("GRPOLoss")}),
}


def load_nemo_rl() -> None:
    """Let NeMo-RL's losses be imported: what they ask for and never use is for CUDA."""
    if "nemo_rl" not in sys.modules and importlib.util.find_spec("nemo_rl") is not None:
        from harness import absent

        absent(
            pynvml="", zmq="", nemo_rl__utils__fastokens="maybe_patch_fastokens", nemo_rl__utils__logger="Logger",
            nemo_rl__models__policy="TokenizerConfig", nemo_rl__models__dtensor__parallelize="to_local_if_dtensor",
        )  # fmt: skip


def missing(framework: str) -> str | None:
    """Return why a framework cannot be asked here, None if it can. framework: prefix of its keys."""
    if framework == "nemo_rl":
        load_nemo_rl()
    if framework not in FOREIGN:
        return import_failure(framework)
    try:
        FOREIGN[framework].load()
    except Exception as error:
        return words_of(error)
    return None


def version(framework: str) -> str:
    """Return the installed version of a framework; of a checkout it is what the environment says."""
    told = os.environ.get(f"NANSCOPE_{framework.upper()}_VERSION")
    if told or framework in installed():
        return told or installed()[framework]
    try:
        return metadata.version(framework)
    except metadata.PackageNotFoundError:
        return next(row.version for key, row in LOSSES.items() if key.startswith(f"{framework}."))


def asked(framework: str) -> tuple[LossPath, ...]:
    """Return the losses and settings of a framework that are asked: those of the atlas that it has, and what the atlas does not know."""
    known = tuple(path for path in paths([f"{framework}."]) if not path.supposed)
    more = FOREIGN[framework].losses if framework in FOREIGN else ()
    return known + tuple(LossPath(f"{framework}.{kind}") for kind in more if f"{framework}.{kind}" not in LOSSES)


def step(path: LossPath, inputs: LossInputs) -> Snapshot:
    """Return the recorded step of a loss, with all that is done to the batch. Raises NanscopeError if nothing can be differentiated."""
    framework, _, kind = path.key.partition(".")
    settings = dict(path.settings)

    def loss(given: LossInputs) -> Tensor:
        if framework in FOREIGN:
            return FOREIGN[framework].losses[kind](given, settings)
        return native_loss(path.key, given, **settings)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _named(recorded(loss, {"given": inputs}), inputs)


def _named(snapshot: Snapshot, inputs: LossInputs) -> Snapshot:
    """Call what came in by the names of the batch: `nanscope.native`, which reads it first, has none that are told."""
    names = {id(getattr(inputs, part.name)): part.name for part in fields(inputs)}
    known = {leaf.id: names.get(id(snapshot.tensors[leaf.id])) for leaf in snapshot.program.leaves}
    leaves = tuple(replace(leaf, name=known[leaf.id] or leaf.name) for leaf in snapshot.program.leaves)
    return replace(snapshot, program=replace(snapshot.program, leaves=leaves))


def from_the_door(snapshot: Snapshot) -> Snapshot:
    """Return a step whose program begins where the framework's own function does: what was made for it before came in with the batch."""
    program = snapshot.program
    late = {out for call in program.calls if not _is_around(snapshot, call) for out in call.outs}
    before = []
    for call in program.calls:
        if _is_around(snapshot, call) and not late & set(call.inputs()):
            before.append(call)
        else:
            late.update(call.outs)
    values = Trace.of(program, snapshot.tensors).run.values
    carried = {leaf.id for leaf in program.leaves if leaf.diff}
    for call in before:
        if call.grad and carried & set(call.inputs()):
            carried.update(out for out in call.outs if out is not None and values[out].is_floating_point())
    made = sorted({out for call in before for out in call.outs if out is not None})
    leaves = tuple(Leaf(value, None, "data", value in carried) for value in made)
    cut = replace(program, leaves=(*program.leaves, *leaves), calls=tuple(call for call in program.calls if call not in before)).slice()
    cut = replace(cut, leaves=tuple(replace(leaf, name=_called(cut, leaf) or leaf.name) for leaf in cut.leaves))
    return replace(snapshot, program=cut, tensors={leaf.id: values[leaf.id].detach() for leaf in cut.leaves})


def _called(program: Program, leaf: Leaf) -> str | None:
    """Return what the framework calls a tensor where it first reads it, None if that is no name."""
    for call in program.readers(leaf.id):
        site = program.site_of(call)
        for position, arg in enumerate(call.args):
            if site is not None and isinstance(arg, Ref) and arg.id == leaf.id and position < len(site.args):
                word = re.fullmatch(r"[A-Za-z_][\w.]*|\w+\[['\"](\w+)['\"]\]", site.args[position].replace("self.", ""))
                if word is not None:
                    return word[1] or word[0]
    return None


def _is_around(snapshot: Snapshot, call: Call) -> bool:
    """Is a call one of the caller's, and not of the framework?"""
    site = snapshot.program.site_of(call)
    return site is None or Path(site.file or "").is_relative_to(Path(__file__).parents[1])
