"""Trains with random loops whose tensors are written to, exchanged, kept over steps and known by several names, and saves every step.

    python tests/fuzz/aliases.py [--cases N] [--case K]

What must not happen: a program that makes another loss than the step had, to the last bit; weights that differ from those of the bare loop;
anything of ours that fails. Each case is a loop of seven steps: in half of them all steps are alike, and known from the fourth on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from children import Limits, Tally, Wrong, hunt
from torch import Tensor, nn

import nanscope
from nanscope.program.numbers import same_bits

torch.set_num_threads(1)
warnings.simplefilter("ignore")

STEPS = 7
ALLOWED = ("second-look-failed",)  # what a model was given has been written to since: a loop that does so is told


class World:
    """What a loop has at hand: a model and a weight of no model that are trained, a target network, and what was kept of earlier steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(4))
        self.optimizer = torch.optim.SGD([*self.model.parameters(), self.weight], lr=0.01)
        self.kept = [torch.randn(4), torch.randn(4)]
        self.tensors: list[Tensor] = []

    def begin(self) -> None:
        """A step begins."""
        batch = torch.randn(4)
        self.tensors = [self.model(batch), self.weight, *self.kept, batch]
        with torch.no_grad():
            self.tensors.append(self.target(batch))

    def loss(self) -> Tensor:
        """A number that everything at hand goes into."""
        return torch.stack([(one * number).tanh().sum() for number, one in enumerate(self.tensors, 1)]).sum()


def free(tensor: Tensor) -> bool:
    """May the loop write to it?"""
    return tensor.is_leaf or not tensor.requires_grad


def function(world: World, x: Tensor, y: Tensor, part: float) -> None:
    world.tensors.append((torch.exp, torch.tanh, torch.neg, torch.sigmoid)[int(part * 4)](x * 0.3))


def combined(world: World, x: Tensor, y: Tensor, part: float) -> None:
    world.tensors.append((torch.add, torch.mul, torch.sub)[int(part * 3)](x, y))


def without_gradient(world: World, x: Tensor, y: Tensor, part: float) -> None:
    with torch.no_grad():
        world.tensors.append(x * 2 + y)


def view(world: World, x: Tensor, y: Tensor, part: float) -> None:
    world.tensors.append(x[:].view(-1))


def detached(world: World, x: Tensor, y: Tensor, part: float) -> None:
    world.tensors.append(x.detach() if part < 0.5 else x.data)


def dropped(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if len(world.tensors) > 6:
        world.tensors = [one for one in world.tensors if one is not x]


def asked(world: World, x: Tensor, y: Tensor, part: float) -> None:
    float(x.sum())


def scaled(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if free(x):
        with torch.no_grad():
            x.mul_(0.5 + part)


def added(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if free(x):
        (x.data if x.requires_grad else x).add_(y.detach())


def element(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if free(x):
        with torch.no_grad():
            x[1] = part


def filled(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if x.is_leaf:
        x.data = torch.full_like(x, part)


def synced(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if x.is_leaf:
        x.data = y.data.clone()


def shared(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if x.is_leaf and not y.requires_grad:
        x.data = y.data


def flattened(world: World, x: Tensor, y: Tensor, part: float) -> None:
    if x.is_leaf and y.is_leaf:
        flat = torch.cat([x.data, y.data])
        x.data, y.data = flat[:4], flat[4:]


def reloaded(world: World, x: Tensor, y: Tensor, part: float) -> None:
    world.model.weight.data = world.model.weight.data.clone() * (0.5 + part)


def decayed(world: World, x: Tensor, y: Tensor, part: float) -> None:
    with torch.no_grad():
        world.model.bias.mul_(0.5 + part)


def keep(world: World, x: Tensor, y: Tensor, part: float) -> None:
    world.kept[int(part * 2)] = x.detach().clone() if part * 2 % 1 < 0.5 else x.detach()


def followed(world: World, x: Tensor, y: Tensor, part: float) -> None:
    for theirs, ours in zip(world.target.parameters(), world.model.parameters(), strict=True):
        theirs.data.mul_(0.9).add_(ours.data * 0.1)


ACTS: tuple[Callable[[World, Tensor, Tensor, float], None], ...] = (
    function,
    combined,
    combined,
    without_gradient,
    view,
    detached,
    dropped,
    asked,
    scaled,
    added,
    element,
    filled,
    synced,
    shared,
    flattened,
    reloaded,
    decayed,
    keep,
    followed,
)


@dataclass(frozen=True)
class Act:
    """What is done, with which two of the tensors at hand, as parts of one, and with what number."""

    act: Callable[[World, Tensor, Tensor, float], None]
    first: float
    second: float
    part: float

    def run(self, world: World) -> None:
        """Do it; what torch refuses is left."""
        count = len(world.tensors)
        with contextlib.suppress(RuntimeError):
            self.act(world, world.tensors[int(self.first * count)], world.tensors[int(self.second * count)], self.part)

    def __str__(self) -> str:
        return f"{self.act.__name__} {self.first:.2f} {self.second:.2f} {self.part:.2f}"


def loop_of(case: int) -> list[list[Act]]:
    """Return what each step does."""
    dice = random.Random(case)

    def step() -> list[Act]:
        return [Act(dice.choice(ACTS), dice.random(), dice.random(), dice.random()) for _ in range(dice.choice((4, 8, 16)))]

    return [step()] * STEPS if case % 2 else [step() for _ in range(STEPS)]


def train(loop: list[list[Act]], out: Path | None) -> tuple[list[Tensor], str]:
    """Return the weights in the end, and what was said."""
    world, said = World(), io.StringIO()
    watched = nanscope.watch(world.model, world.optimizer, out=out, save_steps=range(1, STEPS + 1)) if out else contextlib.nullcontext()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), watched:
        for acts in loop:
            world.begin()
            for act in acts:
                act.run(world)
            with contextlib.suppress(RuntimeError):  # what a backward pass needs was written to
                world.loss().backward()  # type: ignore[no-untyped-call]
            for act in acts[-2:]:  # before the update
                act.run(world)
            world.optimizer.step()
            world.optimizer.zero_grad()
    return [one.detach().clone() for one in (*world.model.parameters(), world.weight, *world.kept)], said.getvalue()


def run(case: int) -> str:
    """Train watched and bare, and make every loss again. Returns one word about it."""
    loop, out = loop_of(case), Path(tempfile.mkdtemp())
    try:
        watched, said = train(loop, out)
        bare, _ = train(loop, None)
        if not all(map(same_bits, watched, bare)):
            raise Wrong("the weights are not those of the bare loop")
        failed = [line for line in said.splitlines() if "failed" in line and not any(one in line for one in ALLOWED)]
        if failed:
            raise Wrong(failed[0])
        files = [path for path in out.glob("*/*.safetensors") if path.parent.name != "latest"]
        for path in sorted(files):
            snapshot = nanscope.load(path)
            if snapshot.program is not None and snapshot.loss is not None:
                made = snapshot.program.execute(snapshot.tensors, backward=False).values[snapshot.program.output]
                if not same_bits(made.detach(), snapshot.loss):
                    raise Wrong(f"{path.name}: {float(made)} is not {float(snapshot.loss)}")
        return "saved" if files else "nothing"
    finally:
        shutil.rmtree(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one here, in this process")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    if given.case is not None:
        for number, acts in enumerate(loop_of(given.case), 1):
            print(f"step {number}", *acts, sep="\n    ")
        print(run(given.case))
        return 0
    tally, begun, found = Tally(), time.monotonic(), 0
    for finding in hunt(run, range(given.first, given.first + given.cases), Limits(60, 1 << 30), tally, given.jobs):
        found += 1
        print(finding, flush=True)
    print(f"{tally}; {found} findings in {time.monotonic() - begun:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
