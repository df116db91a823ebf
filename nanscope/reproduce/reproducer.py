"""The smallest script that fails as a saved step did: what `nanscope repro` prints.

made = nanscope.reproducer("step-000412.rank0.safetensors")
made.script                     fails alike, on nothing but torch
made.mended                     the same with the fix that was seen to work, None if none was
made.pytest                     a test that is red while the fault is there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanscope.causes import ADVICE
from nanscope.errors import NanscopeError
from nanscope.locate.names import Names
from nanscope.program.calls import Call, Computes
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.patch import Variant
from nanscope.reproduce.alike import Case, Oracle
from nanscope.reproduce.literals import listed_numbers
from nanscope.reproduce.names import Remembered
from nanscope.reproduce.reduce import Shrunk, shrunk
from nanscope.reproduce.script import Marks, Script, docstring, source_of
from nanscope.reproduce.shorten import FRESH
from nanscope.reproduce.told import asserts, bad_gradients, beside, first_line, healthy, second_line
from nanscope.snapshot.file import load
from nanscope.snapshot.observation import Kind, Phase
from nanscope.snapshot.step import Snapshot


@dataclass(frozen=True, slots=True)
class Reproducer:
    """A step as the smallest script that fails alike.

    script: fails alike. mended: the same with the fix that was seen to work, None if none was. pytest: a test that is expected to fail
    until it is mended; pytest_mended: the same test with the fix, which passes, None as above. cause, fix: their slugs, "" for no fix.
    numbers, calls: what was kept; of_numbers, of_calls: of how many elements that come in, and of how many calls of the loss.
    """

    script: str
    mended: str | None
    pytest: str
    pytest_mended: str | None
    cause: str
    fix: str
    numbers: int
    of_numbers: int
    calls: int
    of_calls: int

    @property
    def kept(self) -> str:
        """What was kept, in words."""
        return f"{self.numbers:,} of {self.of_numbers:,} numbers, {self.calls:,} of {self.of_calls:,} calls, fails alike"

    def text(self, *, fix: bool = False, pytest: bool = False) -> str:
        """Return one of the scripts. fix: mended; pytest: as a test. Raises NanscopeError if there is no fix."""
        found = (self.pytest_mended if fix else self.pytest) if pytest else (self.mended if fix else self.script)
        if found is None:
            raise NanscopeError("no fix was seen to mend this step: leave --fix out, and see what `nanscope replay` tried", slug="no-fix")
        return found


def reproducer(snapshot: Snapshot | str | Path) -> Reproducer:
    """Return the smallest script that fails as a saved step did. snapshot: a step, or the path of one.

    Raises NanscopeError if the harm was not made in what was recorded of the loss, or does not come again; SnapshotError and ProgramError
    as `load` and `replay` do.
    """
    step = snapshot if isinstance(snapshot, Snapshot) else load(snapshot)
    _refuse(step)
    program = step.program.slice()
    whole = Case(program, {leaf.id: step.tensors[leaf.id].detach().cpu() for leaf in program.leaves})
    names = Names(program)
    found = shrunk(Oracle(step), whole, names)
    if found is None:
        raise NanscopeError(
            "what was recorded of this step is fine when it is run again, and cannot be shrunk. `nanscope report` tells what was seen",
            slug="fails-no-more",
        )
    listed = sum(listed_numbers(tensor) for leaf, tensor in found.case.tensors.items() if leaf not in found.case.drawn)
    if listed > MOST:
        raise NanscopeError(
            f"{listed:,} numbers have a part in it, and nothing smaller was found that fails alike: attach the snapshot itself, "
            "`nanscope inspect` says what is in it",
            slug="too-many-numbers",
        )
    return _Pages(found, whole, names).reproducer()


MOST = 20_000  # numbers in a script


_ELSEWHERE = {
    Phase.OPTIMIZER: "the update of the optimizer made the harm, and not the loss",
    Phase.WEIGHTS: "a weight was bad before the loss began",
}


def _refuse(step: Snapshot) -> None:
    """Raise NanscopeError for a step whose harm was made where no program of it is recorded."""
    seen = step.observation
    why = None
    if seen.kind is Kind.ARRIVED:
        why = "the bad value came from another rank: its own file has the loss that made it"
    elif seen.kind is Kind.CLIP:
        why = "clipping made the harm, and not the loss"
    elif seen.kind in (Kind.SWALLOWED, Kind.ABSORBED):
        why = "everything is finite, and only another computation tells that it is wrong"
    elif seen.outside:
        why = _ELSEWHERE.get(seen.phase or Phase.FORWARD, "the harm was made outside of the program that this file holds")
    elif not step.program.calls:
        why = "this file holds no program of a loss"
    if why is not None:
        raise NanscopeError(f"no script can be made: {why}. `nanscope report` tells what was seen", slug="not-in-the-loss")


@dataclass(frozen=True, slots=True)
class _Pages:
    """What was found, as scripts."""

    found: Shrunk
    whole: Case
    names: Names

    def reproducer(self) -> Reproducer:
        found, whole = self.found, self.whole
        case, why = found.case, found.why
        failing = self._page(case, found.failed.trace.run, Marks(found.failed.origin.value_id, beside(found.failed)))
        mended = self._mended(why.mended) if why.mended is not None else None
        story = self._story(failing)
        return Reproducer(
            script=failing.script(story, list(asserts(found.failed, failing.source.output, failing.leaves))),
            mended=None if mended is None else mended.script(self._mended_story(story), mended.asserts()),
            pytest=failing.test(story, failing.asserts(), self._slug(), xfail=self._reason()),
            pytest_mended=None if mended is None else mended.test(self._mended_story(story), mended.asserts(), self._slug(), xfail=""),
            cause=str(why.cause),
            fix=why.fix if mended is not None else "",
            numbers=case.tokens,
            of_numbers=whole.tokens,
            calls=len(case.program.calls),
            of_calls=len(whole.program.calls),
        )

    def _story(self, page: _Page) -> str:
        failed, case, whole = self.found.failed, self.found.case, self.whole
        bad = [page.leaves[leaf] for leaf in bad_gradients(case.program, failed.trace.run)]
        if failed.failure.largest is not None:
            bad = list(page.source.gradients)
        name = page.source.called.get(failed.origin.value_id, "")
        calls = f"{len(case.program.calls):,} of {len(whole.program.calls):,} calls"
        kept = f"Kept: {case.tokens:,} of {whole.tokens:,} numbers and {calls} of a recorded step, which fails alike."
        return f"{first_line(self.found.why)}\n\n{second_line(failed, name, page.source.output, bad)}\n{kept}"

    def _mended_story(self, story: str) -> str:
        return f"Mended: {ADVICE.get(self.found.why.fix, self.found.why.fix)}.\n\nWithout it: {story.split(chr(10))[0]}"

    def _mended(self, variant: Variant) -> _Page | None:
        run = variant.program.execute(variant.tensors, backward=variant.program.computes is Computes.LOSS)
        program = variant.program.slice()
        before = set(self.found.case.program.calls)
        new = _last_of_first([call for call in program.calls if call not in before], self.found.case.program)
        marks = None if new is None else Marks(new, f"the fix: {ADVICE.get(variant.id, variant.id).partition(';')[0]}")
        return self._page(Case(program, variant.tensors, self.found.case.drawn), run, marks)

    def _page(self, case: Case, run: Run, marks: Marks | None) -> _Page:
        smallest = self.found.case.program
        known = {leaf.id for leaf in smallest.leaves} | {
            out for call in smallest.calls for out in call.outs if out is not None and out < FRESH
        }
        graded = [leaf.id for leaf in case.program.leaves if leaf.id in run.grads]
        names = Remembered(self.names, known, Names(case.program))
        return _Page(case.program, run, source_of(case, names, marks, graded))

    def _slug(self) -> str:
        origin = self.found.failed.origin
        return f"test_{self.found.why.cause}_of_{origin.op.strip('_') if origin.born else 'input'}"  # else a file names it

    def _reason(self) -> str:
        return first_line(self.found.why).rstrip(".")


def _last_of_first(new: Sequence[Call], before: Program) -> int | None:
    """The value that an edit puts into the place of another one: of its calls that make a new value the last one, else what it changed."""
    known = {out for call in before.calls for out in call.outs}
    added = [call for call in new if call.outs[0] not in known]
    chosen = added[-1] if added else (new[0] if new else None)
    return None if chosen is None else chosen.outs[0]


@dataclass(frozen=True, slots=True)
class _Page:
    """One program as source, and its run."""

    program: Program
    run: Run
    source: Script

    @property
    def leaves(self) -> Mapping[int, str]:
        """What the leaves are called."""
        return {leaf.id: self.source.called[leaf.id] for leaf in self.program.leaves}

    def asserts(self) -> list[str]:
        """Return what holds where nothing goes wrong."""
        return list(healthy(self.program, self.run, self.source.output, self.leaves))

    def _backward(self) -> list[str]:
        return [f"{self.source.output}.backward()"] if self.source.gradients else []

    def script(self, story: str, ends: Sequence[str]) -> str:
        """Return the script. ends: its asserts."""
        tensors = [line for lines in self.source.leaves.values() for line in lines]
        pieces = [docstring(story), ["import torch"], tensors, self.source.body, [*self._backward(), *ends]]
        return "\n\n".join("\n".join(piece) for piece in pieces if piece) + "\n"

    def test(self, story: str, ends: Sequence[str], name: str, *, xfail: str) -> str:
        """Return the test. xfail: why it fails, "" if it passes."""
        advice = "Put your own function in the place of `loss_of`, and the test holds it."
        if xfail:
            advice += "\nMarked as failing, strictly: once it is mended, the test says so, and the mark can go."
        args = ", ".join(self.source.leaves)
        indent = "    "
        function = [
            f"def loss_of({args}):",
            *docstring("The loss as it was recorded, as far as it matters.", indent),
            *(indent + line for line in self.source.body),
            *([f"{indent}return {self.source.output}"]),
        ]
        test = [
            *([f'@pytest.mark.xfail(strict=True, reason="{xfail}")'] if xfail else []),
            f"def {name}():",
            *docstring("The loss and its gradients are finite.", indent),
            *(indent + line for lines in self.source.leaves.values() for line in lines),
            "",
            f"{indent}{self.source.output} = loss_of({args})",
            *(indent + line for line in (*self._backward(), *ends)),
        ]
        imports = ["import pytest", "import torch"] if xfail else ["import torch"]
        head = [*docstring(f"{story}\n\n{advice}"), "", *imports]
        return "\n".join(head) + "\n\n\n" + "\n".join(function) + "\n\n\n" + "\n".join(test) + "\n"
