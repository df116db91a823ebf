"""What was settled when a step was recorded, so that a check of it cannot try anything else: shapes, settings, and branches of Python.

A program holds the calls of one step. A group of one, a batch of one, a setting of 0, the other side of an `if`: these would have been
other calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Ref, Site
from nanscope.program.numbers import is_binary
from nanscope.program.ops import BOTH_MOMENTS, RESCALINGS, SPREADS
from nanscope.snapshot.step import Snapshot
from nanscope.text import line_in, listed, number

BRANCHES = 4  # lines that are told
_BRANCH = re.compile(r"(if|elif|while)\b.*:\s*(#.*)?$")
_DECIDES = re.compile(r"\b(if|while)\b")
LONGEST = 400  # characters of a line that is parsed: a file may hold anything
_SCOPE = re.compile(r"(async\s+def|def|class)\b")
_LITERAL = re.compile(r"[-+]?[\d.][\w.+-]*")


def fixed(snapshot: Snapshot, trace: Trace) -> tuple[str, ...]:
    """Return what a check of a step could not vary, each in a few words."""
    data = (*_made(trace), *_alike(trace), *_sizes(trace), *_rows(trace))
    return tuple(dict.fromkeys([*data, *_numbers(trace), *_settings(snapshot), *_branches(trace)]))


def _sizes(trace: Trace) -> Iterator[str]:
    """Groups whose spread is taken: of one element it is NaN."""
    for call in trace.program.calls:
        if call.name in SPREADS | BOTH_MOMENTS:
            source, made = next(call.inputs(), None), next((out for out in call.outs if out is not None), None)
            if source is not None and made is not None and trace.values[made].numel():
                size = trace.values[source].numel() // trace.values[made].numel()
                yield f"{_called(trace, call)} is over {size} elements; a group of one was not tried"


def _rows(trace: Trace) -> Iterator[str]:
    """A batch of one row."""
    shapes = [tuple(trace.values[leaf.id].shape) for leaf in trace.program.leaves if not leaf.is_of_model]
    largest = max((shape for shape in shapes if len(shape) > 1), key=lambda shape: len(shape) and _product(shape), default=())
    if largest and largest[0] == 1 and _product(largest) > 1:
        yield "the batch is one row; what several rows do to each other was not tried"


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def _numbers(trace: Trace) -> Iterator[str]:
    """What Python has worked out, and the loss divides by or multiplies with: no tensor leads there."""
    for call in trace.program.calls:
        site = trace.program.site_of(call)
        if call.name in RESCALINGS and site is not None and len(call.args) > 1 and isinstance(call.args[1], (int, float)):
            text = site.args[1].strip() if len(site.args) > 1 else ""
            value = float(call.args[1])
            if call.name == "div" and text and not _LITERAL.fullmatch(text):
                yield f"{text} is {number(value)}, a number of Python's, and 0 was not tried ({_where(site)})"
            elif value == 0:
                yield f"{text or 'a factor'} is 0, so what it multiplies adds nothing to the loss ({_where(site)})"


def _settings(snapshot: Snapshot) -> Iterator[str]:
    """Settings of the framework's loss that leave a term of it out."""
    known = snapshot.objective.get("settings")
    zero = [name for name, value in sorted(known.items()) if type(value) in (int, float) and value == 0] if isinstance(known, dict) else []
    if zero:
        yield f"{listed(zero)} {'is' if len(zero) == 1 else 'are'} 0 in the settings; what other values bring in was not tried"


def _made(trace: Trace) -> Iterator[str]:
    """Masks that the step has made of nothing that came in."""
    program, constant = trace.program, {leaf.id for leaf in trace.program.leaves if leaf.name is None and not trace.values[leaf.id].dim()}
    for call in program.calls:
        if constant.issuperset(call.inputs()):
            constant.update(out for out in call.outs if out is not None)
    for value in sorted(constant & program.producers.keys()):
        content, readers = trace.values[value], program.readers(value)
        binary = content.numel() > 1 and not content.is_complex() and is_binary(content)
        if binary and any(out not in constant for reader in readers for out in reader.outs) and trace.names.says_mask(value):
            yield f"{trace.names.name(value) or 'a mask'} was made in the step, of nothing that came in; another one was not tried"


def _alike(trace: Trace) -> Iterator[str]:
    """Differences of a tensor and itself: a policy that was not updated yet."""
    for call in trace.program.calls:
        values = [arg.id for arg in call.args if isinstance(arg, Ref)]
        if call.name != "sub" or len(values) != 2 or call.outs[0] is None or trace.values[call.outs[0]].numel() < 2:
            continue
        one, other = (trace.program.source_of(value) for value in values)
        if one == other and not bool(trace.values[call.outs[0]].any()):
            where = _called(trace, call)
            yield f"{where} takes a tensor from itself, so it is 0 whatever comes in; a policy that has moved on was not tried"


def _branches(trace: Trace) -> Iterator[str]:
    """Lines of the functions that were recorded in which Python has decided."""
    found: dict[tuple[str, int], str] = {}
    sites = dict.fromkeys(call.site for call in trace.program.calls if 0 <= call.site < len(trace.program.sites))
    for site in (trace.program.sites[index] for index in sites):
        for line, text in _before(site):
            decided = _decided(text)
            if decided:
                found.setdefault((site.file, line), decided)
    told = [f"`{text}` ({line_in(file, line)})" for (file, line), text in found.items()]
    if told:
        more = f" and {len(told) - BRANCHES} more" if len(told) > BRANCHES else ""
        yield f"the branches of {', '.join(told[:BRANCHES])}{more} went one way; the other was not tried"


def _decided(text: str) -> str:
    """What Python decides in a line, "" if it decides nothing there."""
    if _BRANCH.match(text):
        return text.split("#")[0].rstrip().rstrip(":")
    if not _DECIDES.search(text) or len(text) > LONGEST:
        return ""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""  # a part of a longer one
    tests = [node for node in nodes if isinstance(node, (ast.If, ast.While, ast.IfExp))]
    return f"{'while' if isinstance(tests[0], ast.While) else 'if'} {ast.unparse(tests[0].test)}" if tests else ""


def _before(site: Site) -> Iterator[tuple[int, str]]:
    """The lines around a call that belong to its function and stand before it."""
    lines: list[tuple[int, str]] = []
    for line, text in site.source:
        if line > site.line:
            break
        if _SCOPE.match(text.strip()):
            lines = []
        else:
            lines.append((line, text.strip()))
    yield from lines


def _called(trace: Trace, call: Call) -> str:
    site = trace.program.site_of(call)
    return f"{site.expression or call.name} ({_where(site)})" if site is not None else call.name


def _where(site: Site) -> str:
    return line_in(site.file, site.line)
