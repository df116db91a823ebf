"""A trace: a program and a run of it, with what is asked of both again and again, each worked out once.

trace = Trace.of(program, tensors)
locate(trace)                       # the origin of the harm
trace.names.role(7)                 # what a value means
trace.drops.of(7, 12)               # does the loss count this element?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from torch import Tensor

from nanscope.locate.drops import Drops
from nanscope.locate.names import Names
from nanscope.program.program import Program
from nanscope.program.run import Run

Spot: TypeAlias = tuple[int, int]  # id of a value, and a flat position in it


@dataclass(frozen=True)  # without slots: what is derived is kept
class Trace:
    """A program and one run of it."""

    program: Program
    run: Run

    @classmethod
    def of(cls, program: Program, tensors: Mapping[int, Tensor], *, backward: bool = True, lean: bool = False) -> Trace:
        """Run a program on its leaves, forward and, if wanted, backward. lean: what backward does inside is kept only where the output is
        finite, and the harm is to be looked for there.

        Raises ProgramError as `Program.execute` does.
        """
        return cls(program, program.execute(tensors, backward=backward, trace=True, lean=lean))

    @cached_property
    def names(self) -> Names:
        """What the values are called and what they mean."""
        return Names(
            self.program, {value for value, tensor in self.values.items() if not (tensor.is_floating_point() or tensor.is_complex())}
        )

    @cached_property
    def drops(self) -> Drops:
        """What the loss does not count."""
        return Drops(self.program, self.run, self.names)

    @property
    def values(self) -> Mapping[int, Tensor]:
        """Every value by id."""
        return self.run.values

    @property
    def tensors(self) -> dict[int, Tensor]:
        """The leaves, by id: what the program was run on."""
        return {leaf.id: self.run.values[leaf.id] for leaf in self.program.leaves}

    def forward_only(self) -> Trace:
        """Return the trace with the gradients of the leaves and no others: of a large batch these are most of the memory."""
        grads = {leaf.id: self.run.grads[leaf.id] for leaf in self.program.leaves if leaf.id in self.run.grads}
        return Trace(self.program, replace(self.run, grads=grads, returned={}))
