"""The fix as a change of the source: what an edit of the program is in the code that the program was recorded from.

    - ratio = torch.exp(log_probs - old_log_probs)
    + ratio = torch.exp((log_probs - old_log_probs).masked_fill(mask == 0, 0.0))

Notable: the text is read off the edited program, the very one that was run forward and backward, and not written beside it: what is shown
is what was seen to work. Where a part of that has no name in the function, or stands where the source is not known, there is no diff, and
none where the bytes of the file are others than a patch would quote: with CRLF, in another encoding, with what no report shows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch

from nanscope.errors import visible
from nanscope.locate.names import Names
from nanscope.program.calls import Arg, Call, Ref, Site, refs, words_of
from nanscope.program.ops import COPIES, SPREADS
from nanscope.program.program import Program
from nanscope.program.spelling import ANY, ATOM, Phrase
from nanscope.replay.handwriting import literal, written
from nanscope.replay.initialised import zeroed
from nanscope.replay.namespace import Namespace, alike, roots
from nanscope.replay.statement import Span, Statement
from nanscope.roles import Role, last_word, role_of
from nanscope.snapshot.observation import Diff

MOST = 4  # statements that a fix may change and still be read
CONTEXT = 3  # lines around a change, as in any diff
LONGEST = 1200  # characters of a line of it

_NAME = re.compile(r"""[A-Za-z_][\w.]*(?:\[["'][^"'\\]+["']\])*""")


def diffs(before: Program, names: Names, after: Program) -> tuple[Diff, ...]:
    """Return what an edited program changes in the source, a diff for each statement; () where that cannot be written.

    before, names: the program as recorded, and what its values are called.
    """
    try:
        changes = list(_Comparison(before, names, after).changes())
    except _Unwritable:
        return ()
    statements: dict[tuple[str, int, int], list[_Change]] = {}
    for change in changes:
        statement = change.statement
        statements.setdefault((change.file, statement.first, len(statement.lines)), []).append(change)
    found = [_diff(file, group) for (file, _, _), group in sorted(statements.items(), key=lambda item: item[0])]
    told = tuple(diff for diff in found if diff is not None)
    return told if 0 < len(told) == len(found) <= MOST else ()


class _Unwritable(Exception):
    """What an edit does cannot be said in the words of the source."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One expression that is to be written otherwise, or, without one, a line that is put before the statement."""

    file: str
    statement: Statement
    node: ast.expr | ast.AugAssign | None
    text: Phrase


def _diff(file: str, changes: list[_Change]) -> Diff | None:
    statement = changes[0].statement
    spans: dict[Span, _Change] = {}
    for change in changes:
        if change.node is not None and spans.setdefault(statement.span(change.node), change).text != change.text:
            return None  # one expression, and two ways to write it
    by_node = {_same(statement, change.node): change.text for change in spans.values() if change.node is not None}
    lines = statement.replaced(by_node) if by_node else statement.lines
    if lines is None:
        return None
    indent = statement.lines[0][: len(statement.lines[0]) - len(statement.lines[0].lstrip())]
    added = tuple(dict.fromkeys(indent + change.text.text for change in changes if change.node is None))
    first, last = 0, 0
    while first < min(len(lines), len(statement.lines)) and not added and lines[first] == statement.lines[first]:
        first += 1
    while last < min(len(lines), len(statement.lines)) - first and lines[-1 - last] == statement.lines[-1 - last]:
        last += 1
    old, new = statement.lines[first : len(statement.lines) - last], (*added, *lines[first : len(lines) - last])
    line = statement.first + first
    around = _around(statement, line, line + len(old))
    if around is None or not all(_is_shown(text) for text in new) or not all(_is_quoted(statement, line + n) for n in range(len(old))):
        return None
    return Diff(file, line, old, new, *around)


def _same(statement: Statement, node: ast.expr | ast.AugAssign) -> ast.expr | ast.AugAssign:
    """The node of this statement's own tree: each change has parsed the lines for itself."""
    span = statement.span(node)
    found = (
        other
        for other in ast.walk(statement.tree)
        if isinstance(other, (ast.expr, ast.AugAssign)) and type(other) is type(node) and statement.span(other) == span
    )
    return next(found, node)


def _around(statement: Statement, first: int, end: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The lines of the file above and below a change of its lines from `first` to before `end`.

    Where fewer stand on one side, `patch` takes that for an end of the file: unless it is one, there are as few on the other side. None
    where there is none, and no end of the file.
    """
    above, below = [_near(statement, numbers) for numbers in (range(first - 1, first - 1 - CONTEXT, -1), range(end, end + CONTEXT))]
    is_first, is_last = len(above) == first - 1, end not in statement.around
    if (not above and not is_first) or (not below and not is_last):
        return None
    if not is_first:
        below = below[: len(above)]
    if below:
        above = above[: len(below)]
    return tuple(reversed(above)), tuple(below)


def _near(statement: Statement, numbers: Iterable[int]) -> list[str]:
    """The lines next to a change, up to the first that is not there as it is."""
    return [statement.around[number] for number in takewhile(lambda number: _is_quoted(statement, number), numbers)]


def _is_quoted(statement: Statement, number: int) -> bool:
    """Does the source have a line, and would a report quote the very bytes?"""
    return number in statement.around and number not in statement.other and _is_shown(statement.around[number])


def _is_shown(text: str) -> bool:
    """Does a report show a line as it is? A tab is one; of what is hidden or long it shows something else."""
    return len(text) <= LONGEST and all(visible(part) == part for part in text.split("\t"))


HELD = "held"  # what is written in more than one place of an expression
_VARIES = re.compile(r"(?<![\w.])(?!(?:math|torch|np|float|inf|nan|e)\b)[A-Za-z_]\w*")  # a name in it, and no constant of a library


@dataclass
class _Comparison:
    """Two programs, the second one an edit of the first."""

    before: Program
    names: Names
    after: Program
    _made: dict[int, Call] = field(default_factory=dict)  # the inserted call that makes a value
    _guarded: set[tuple[int, str]] = field(default_factory=set)  # what is changed under a condition that the source states

    def _is_changed(self, call: Call) -> bool:
        """Is it another call in the edited program?"""
        return self._edited.get(call.outs) != call

    @cached_property
    def _namespace(self) -> Namespace:
        return Namespace(self.before, self.names)

    @cached_property
    def _edited(self) -> dict[tuple[int | None, ...], Call]:
        return {call.outs: call for call in self.after.calls}

    def changes(self) -> Iterator[_Change]:
        """Yield what is to be written otherwise. Raises _Unwritable where that cannot be said."""
        known = {call.outs: call for call in self.before.calls}
        leaves = {leaf.id for leaf in self.before.leaves}
        if any(leaf.id not in leaves for leaf in self.after.leaves):
            raise _Unwritable  # numbers that no code has
        self._made = {out: call for call in self.after.calls if call.outs not in known for out in call.outs if out is not None}
        pairs = [(known[call.outs], call) for call in self.after.calls if call.outs in known and known[call.outs] != call]
        replaced = self._replaced(pairs)
        done = set[tuple[int, str]]()
        for old, new in pairs:
            changed = [position for position, arg in enumerate(new.args) if position >= len(old.args) or arg != old.args[position]]
            alike_else = (old.op, old.kwargs, len(old.args)) == (new.op, new.kwargs, len(new.args))
            if changed and alike_else and all(self._reads_replaced(old.args[p], new.args[p], replaced) for p in changed):
                continue
            site = self._site(new)
            done.add((new.site, old.op))
            yield self._operand(site, old, new, changed)
        for value, last in replaced.items():
            yield from self._result(value, last)
        self._only_these(done)

    def _only_these(self, done: set[tuple[int, str]]) -> None:
        """Whatever else the same expression computes has to be changed, too, as it will be in the source."""
        if any((call.site, call.op) in done - self._guarded and not self._is_changed(call) for call in self.before.calls):
            raise _Unwritable

    def _replaced(self, pairs: list[tuple[Call, Call]]) -> dict[int, int]:
        """Values in whose place others are read, wherever they are: what is put after a call, or onto what came in."""
        found: dict[int, int] = {}
        for old, new in pairs:
            for was, now in zip(old.args, new.args, strict=False):
                for one, other in zip(refs(was), refs(now), strict=False):
                    maker = self._made.get(other)
                    if one != other and maker is not None and maker.site != new.site:
                        found[one] = other
        return found

    def _reads_replaced(self, was: Arg, now: Arg, replaced: dict[int, int]) -> bool:
        return [replaced.get(value, value) for value in refs(was)] == list(refs(now)) and bool(list(refs(now)))

    def _site(self, call: Call) -> Site:
        site = self.before.site_of(call)
        if site is None or not site.source:
            raise _Unwritable
        return site

    def _statement(self, site: Site) -> Statement:
        statement = Statement.of(site)
        if statement is None:
            raise _Unwritable
        return statement

    def _operand(self, site: Site, old: Call, new: Call, changed: list[int]) -> _Change:
        """One argument of a call, or, where more than that is another one, the whole expression."""
        statement = self._statement(site)
        if new.op != old.op or new.kwargs != old.kwargs or len(changed) != 1:
            return self._whole(site, statement, old, new)
        position = changed[0]
        if position >= len(old.args):
            raise _Unwritable
        was, now = old.args[position], new.args[position]
        node = self._node(site, statement, old, position)
        if statement.writes and position == 0:
            raise _Unwritable  # what is read there is written to
        own = next(refs(was), None)
        given = {} if own is None else {own: statement.text(node)}
        return _Change(site.file, statement, node, _called_once(self._text(now, site, given), given.values()))

    def _whole(self, site: Site, statement: Statement, old: Call, new: Call) -> _Change:
        """The expression of a call, written anew. It must say this operator, and nothing else."""
        if not statement.calls_it(old.name) or statement.writes:
            raise _Unwritable
        given: dict[int, Phrase] = {}
        for position, arg in enumerate(old.args):
            if isinstance(arg, Ref):
                node = self._node(site, statement, old, position)
                given[arg.id] = statement.text(node)
        if new.name == "alias" and isinstance(new.args[0], Ref):
            text = self._text(new.args[0], site, given)
            if re.search(r"\d\.\d{9}", text.text):
                raise _Unwritable  # the logarithm of how many there are: another number for another batch
        else:
            text = self._call(new, site, given)
        if (several := _has_several(old, new, next(iter(given.values())).inside(ATOM) if given else "")) is not None:
            text = Phrase(f"{statement.text(statement.node).text} if {several} else {text.text}", ANY)
            self._guarded.add((new.site, new.op))
        return _Change(site.file, statement, statement.node, text)

    def _result(self, value: int, last: int) -> Iterator[_Change]:
        """What is put after a call, or as a statement of its own before what came in is first read."""
        maker = self.before.maker(value)
        if self._made[last].name == "zeros_like" and maker is None:
            yield self._allocation(value)
            return
        site = None if maker is None or self._is_bound_anew(last) else self.before.site_of(maker)
        statement = None if site is None else Statement.of(site)
        plain = maker is not None and statement is not None and len(maker.outs) == 1 and statement.calls_it(maker.name)
        if site is None or statement is None or not plain or statement.writes:
            yield from self._first_reads(value, last)
            return
        text = self._text(Ref(last), site, {value: statement.text(statement.node)})
        yield _Change(site.file, statement, statement.node, text)

    def _allocation(self, value: int) -> _Change:
        """Zeros, where memory was allocated that nobody has written to."""
        site = self.before.made_at(next((leaf for leaf in self.before.leaves if leaf.id == value), None))
        statement = None if site is None else Statement.of(site)
        text = None if statement is None else zeroed(statement.text(statement.node).text)
        if site is None or statement is None or text is None:
            raise _Unwritable
        return _Change(site.file, statement, statement.node, Phrase(text))

    def _first_reads(self, value: int, last: int) -> Iterator[_Change]:
        """A statement of its own in each function that reads what came in, before it does so for the first time."""
        found: dict[tuple[str, str], tuple[Site, str]] = {}
        anew = self._is_bound_anew(last)
        for call in self.before.readers(value):
            if anew and not self._is_changed(call):
                continue  # it has read the name before, or reads another one
            site = self._site(call)
            words = next((self._namespace.words(call, place, site) for place, arg in enumerate(call.args) if arg == Ref(value)), "")
            first = found.get((site.file, site.function))
            if not _NAME.fullmatch(words) or words.isupper() or call.name in COPIES or (first is not None and first[1] != words):
                raise _Unwritable
            if first is None or site.line < first[0].line:
                found[site.file, site.function] = site, words
        for site, words in found.values():
            text, statement = self._text(Ref(last), site, {value: Phrase(words)}), self._statement(site)
            if not statement.begins:
                raise _Unwritable
            yield _Change(site.file, statement, None, Phrase(f"{words} = {text.text}"))

    def _is_bound_anew(self, last: int) -> bool:
        """Does an edit give a name of the source another value, so that its calls stand at none of the places that are there?"""
        return self.before.site_of(self._made[last]) is None

    def _node(self, site: Site, statement: Statement, call: Call, position: int) -> ast.expr:
        """The expression in the source that is an argument of a call."""
        words, texts = self._namespace.words(call, position, site), words_of(call, site)
        same = [node for node in statement.operands() if words and ast.unparse(node) == words]
        turn = min(texts[:position].count(words), len(same) - 1)
        if not same or not (statement.calls_it(call.name) or self._namespace.is_called(call.args[position], words, site)):
            raise _Unwritable
        return same[turn]

    # -- expressions -----------------------------------------------------------------------------------------------------------------------

    def _text(self, arg: Arg, site: Site, given: dict[int, Phrase]) -> Phrase:
        """An argument of an edited call as it is written at a place in the source. given: values whose text is known there."""
        if isinstance(arg, Ref):
            if arg.id in given:
                return given[arg.id]
            if arg.id in self._made:
                return self._call(self._made[arg.id], site, given)
            return self._spelled(arg.id, site)
        text = literal(arg)
        if text is None:
            raise _Unwritable
        return text if type(arg) is not float or arg not in self._computed else self._as_computed(arg, site)

    @cached_property
    def _computed(self) -> dict[float, tuple[Site, str]]:
        """Numbers of calls that the source does not write out: `1.0 / temperature` is another one in another step."""
        found: dict[float, tuple[Site, str]] = {}
        for call in self.before.calls:
            site = self.before.site_of(call)
            for number, word in zip(call.args, () if site is None else words_of(call, site), strict=False):
                if type(number) is float and abs(number) not in (0.0, 1.0) and site is not None and _VARIES.search(word):
                    found[number] = site, word
        return found

    def _as_computed(self, number: float, site: Site) -> Phrase:
        """Such a number in the words of the source, where the function is the one that knows them."""
        there, word = self._computed[number]
        if (there.file, there.function) != (site.file, site.function):
            raise _Unwritable
        return Phrase(word if _NAME.fullmatch(word) else f"({word})")

    def _call(self, call: Call, site: Site, given: dict[int, Phrase]) -> Phrase:
        args = [None if arg is None else self._text(arg, site, given) for arg in call.args]
        text = written(call.name, args, {key: value for key, value in call.kwargs if not list(refs(value))})
        if text is None or any(list(refs(value)) for _, value in call.kwargs) or re.search(r"\.(half|bfloat16)\(\)\.float\(\)$", text.text):
            raise _Unwritable
        short = any(re.search(r"\bF\.", line) for one in self.before.sites if one.file == site.file for _, line in one.source)
        return Phrase(re.sub(r"^torch\.nn\.functional\.", "F.", text.text), text.binds) if short else text

    def _spelled(self, value: int, site: Site) -> Phrase:
        """What a function calls a value that is not an operand of the call: a mask that is applied further on, or a part of an operand."""
        current: int | None = value
        is_truth = False  # made of numbers on the way, which `~` and `masked_fill` do not take
        while current is not None:
            found = self._bound(current, site) or self._part(current, site)
            if found is not None:
                return Phrase(f"{found.inside(ATOM)}.bool()") if is_truth else found
            maker = self.before.maker(current)
            if maker is None or maker.name not in COPIES:
                break
            is_truth = is_truth or dict(maker.kwargs).get("dtype") is torch.bool
            current = next(maker.inputs(), None)
        raise _Unwritable

    def _bound(self, value: int, site: Site) -> Phrase | None:
        """The words for a value of which a function knows every name."""
        made = self._made_on(value, site)
        for words in self._words(value, site):
            read = roots(words)
            if read and all(self._namespace.is_bound(root, site, made) for root in read):
                return Phrase(words, ANY if re.search(r"[~<>=!]", words) else ATOM)
        return None

    def _made_on(self, value: int, site: Site) -> int | None:
        """The line of a function on which a value was made, None where it came in, or from another function."""
        maker = self.before.maker(value)
        made = None if maker is None else self.before.site_of(maker)
        return made.line if made is not None and alike(made, site) else None

    def _part(self, value: int, site: Site) -> Phrase | None:
        """The text of a value that is computed within the very statement."""
        index = self.before.producers.get(value)
        made = None if index is None else self.before.site_of(self.before.calls[index])
        if (
            index is None
            or made is None
            or not alike(made, site)
            or not self.names.is_last(index)
            or len(self.before.calls[index].outs) > 1
        ):
            return None
        here, there = self._statement(site), Statement.of(made)
        if there is None or not here.first <= made.line < here.first + len(here.lines) or isinstance(there.node, ast.AugAssign):
            return None
        return there.text(there.node)

    def _words(self, value: int, site: Site) -> Iterator[str]:
        """What may stand for a value in the function of a call: its name, as it is read there, or what is handed on to who reads it."""
        name, maker = self.names.name(value), self.before.maker(value)
        made = None if maker is None else self.before.site_of(maker)
        here = made is not None and alike(made, site)
        late = here and made is not None and made.line >= site.line
        if name is not None and _NAME.fullmatch(name) and not late and (here or maker is None):
            yield name
        readers = [(call, read) for call in self.before.readers(value) if (read := self.before.site_of(call)) is not None]
        for call, read in readers:
            for arg, words in zip(call.args, read.args, strict=False):
                if alike(read, site) and arg == Ref(value) and not (late and _NAME.fullmatch(words)):
                    yield words
        for _, read in readers:
            given = set(self._namespace.handed(site, read.function.rpartition(".")[2])) if not alike(read, site) else set()
            masks = {words for words in given if role_of(last_word(words)) is Role.MASK}
            if len(masks) == 1:
                yield masks.pop()


def _has_several(old: Call, new: Call, tensor: str) -> str | None:
    """Of a deviation that is changed where it is one of a single element, return the condition under which it stays; None if it is none. In
    another step a group may be larger. tensor: as the code has it."""
    if old.name not in SPREADS or new.name != old.name:
        return None
    over = old.args[1] if len(old.args) > 1 else None
    if over is None:
        return f"{tensor}.numel() > 1"
    dims = over if isinstance(over, tuple) else (over,)
    return f"{tensor}.shape[{dims[0]}] > 1" if len(dims) == 1 else None


def _called_once(text: Phrase, given: Iterable[Phrase]) -> Phrase:
    """Call what is called in a part of an expression once, however often that part is written: a model draws its dropout anew each time."""
    for part in given:
        if "(" in part.text and text.text.count(part.text) > 1:
            first, rest = text.text.split(part.text, 1)
            rest = rest.replace(f"({part.text})", HELD).replace(part.text, HELD)
            opened = first.removesuffix("(") if first.endswith("(") and rest.startswith(")") else None
            head = f"{first}({HELD} := {part.text})" if opened is None else f"{opened}({HELD} := {part.text}"
            text = Phrase(f"{head}{rest}", text.binds)
    return text
