"""Everything that is known of the tokens around the origin: each role's values, as recorded and under the proven fix, where people look.

    TokenMap   which part of the batch is kept (windows), what is masked there, and how all of it looks from far (tiles, worst rows)
    Track      one role: values in each window, under each way of running the step; range, histogram

Notable: a batch of 512 × 8192 tokens stays one page. The values are kept of a few windows, those with the most that is bad; the rest is
told by tiles and by counts, so that one bad token of a million is never lost, nor taken for ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.ids import ids_behind
from nanscope.locate.layout import Layout
from nanscope.locate.trace import Trace
from nanscope.program.by_rows import execute_ends
from nanscope.replay.rebind import renamed
from nanscope.replay.tries import Replay
from nanscope.roles import Role, last_word
from nanscope.verdict.distribution import Distribution, Histogram, bad_in, badness, histogram
from nanscope.verdict.offending import HEIGHT, WIDTH, Offending, offending

WINDOWS = 6  # that are kept, HEIGHT × WIDTH each
TILES = (48, 96)  # rows and columns of the whole seen from far
WORST = 12  # rows that are named
TRACKS = 14
AGAIN = 1 << 22  # elements up to which the step is run once more for the gradients inside it, and with other edits
WAYS = 6  # as recorded, and with edits that work
RECORDED = "as_recorded"
COUNTED = "counted tokens"  # of a row

_ORDER = (
    Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS, Role.LOG_RATIO, Role.RATIO, Role.IS_WEIGHT,
    Role.ADVANTAGES, Role.REWARDS, Role.KL, Role.ENTROPY, Role.LOSS,
)  # fmt: skip

# What the batch brings along: of several versions the loss reads the one that was made last.
_GIVEN = (
    Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS, Role.ADVANTAGES, Role.REWARDS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the map that is kept. row, column: where it begins; masked: [height][width], None where no mask is known."""

    row: int
    column: int
    height: int
    width: int
    masked: tuple[tuple[bool, ...], ...] | None


Cells = tuple[tuple[tuple[float, ...], ...], ...]  # window → row → column; of what each row has one, a single column


@dataclass(frozen=True, slots=True)
class Track:
    """One role of the batch.

    name: what the code calls it. role: what it means. per_row: one number for a row of tokens. limit: where exp of it overflows, in nats.
    bad, bad_masked: elements that are not finite or beyond the limit, and how many of these the loss does not count.
    median, low, high: of the finite ones that the loss counts, low and high at 5 % and at 95 %; NaN where there are none, and of
    ids. least, most: the range of all finite ones. ends: the range of those that the loss counts, without outliers: of colours and bins.
    cells: by the way of running the step; one that changes nothing here is left out. left, histograms: of each that is not, what is bad
    then, and how often each number occurs.
    """

    name: str
    role: str
    per_row: bool
    limit: float | None
    bad: int
    bad_masked: int
    median: float
    low: float
    high: float
    least: float
    most: float
    ends: tuple[float, float]
    histogram: Histogram | None
    cells: Mapping[str, Cells]
    left: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The offending tensor's rows and tokens, with all that is known of each.

    rows, columns: of the whole. row, column: the origin. dims: more than two dimensions, flattened into rows. tiles: [down][across] of the
    whole, bad elements in each; tile_height, tile_width: elements of one. tiles_masked: share of masked elements in each, None where no
    mask is known. worst: (row, bad counted, bad masked), most first. main: which track the map shows first. ways: how the step was run, by
    id, in words. texts: of token ids in the windows, as far as they were saved. layout: what rows and columns are; where the origin is one
    number a row, they are those of the batch, and its column is the first.
    """

    rows: int
    columns: int
    row: int
    column: int
    dims: int
    windows: tuple[Window, ...]
    tracks: tuple[Track, ...]
    main: int
    tiles: tuple[tuple[int, ...], ...]
    tile_height: int
    tile_width: int
    tiles_masked: tuple[tuple[float, ...], ...] | None
    worst: tuple[tuple[int, int, int], ...]
    ways: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[int, str] = field(default_factory=dict)
    layout: Layout = Layout.TOKENS


def tokens_of(replayed: Replay, fix: str | None) -> TokenMap | None:
    """Return what is known of the tokens around the origin; None where there is no such tensor. fix: the edit that is shown beside."""
    trace, shown = replayed.trace, offending(replayed)
    if trace is None or shown is None:
        return None
    shape, masked = shown.shape, shown.masked
    rows, columns = shown.flat.shape
    chosen = list(_chosen(trace, shown))
    bad = bad_in(shown.own, shown.limit)
    bad[shown.row, shown.column] = True
    windows = _windows(bad, shown)
    runs = dict(_runs(replayed, fix, trace, shown.flat.numel(), {value for value, _ in chosen}))
    tracks = [_track(trace.names.name(v) or str(r), str(r), v, shape, None, masked, windows, runs) for v, r in chosen[1:]]
    tracks.insert(0, _track(shown.name, str(chosen[0][1]), shown.value, shape, shown.limit, shown.out, windows, runs))
    tracks += [*_gradients(chosen, trace, shape, masked, windows, runs), _ids(trace, shown.value, shape, windows)]
    tracks += _of_the_mask(trace, shown, windows)
    kept = [track for track in tracks if track is not None][:TRACKS]
    tiles, height, width, shares = _tiles(bad, masked, columns)
    worst = () if shown.layout is Layout.ELEMENTS else tuple(_worst(bad, shown.out))
    return TokenMap(
        rows, columns, shown.row, shown.column, max(0, len(shape) - 2), tuple(windows), tuple(kept), 0, tiles, height, width, shares,
        worst, {way: words for way, (words, _, _) in runs.items()}, layout=shown.layout,
    )  # fmt: skip


# -- which tensors -------------------------------------------------------------------------------------------------------------------------


def _chosen(trace: Trace, shown: Offending) -> Iterator[tuple[int, Role | str]]:
    """Yield the offending tensor, and of every role the value of its shape, or of its rows, that the code has a name for."""
    value, shape = shown.value, shown.shape
    own, rows, flat = trace.names.role(value), math.prod(shape[:-1]), shown.row * shape[-1] + shown.column
    yield value, own or "value"
    found: dict[Role, int] = {}
    path = trace.program.slice(value)  # what the origin was made of: of two versions of a tensor, the one that it read
    behind = {leaf.id for leaf in path.leaves} | {out for call in path.calls for out in call.outs if out is not None}
    made = (out for call in trace.program.calls for out in call.outs if out is not None)
    for other in dict.fromkeys((*(leaf.id for leaf in trace.program.leaves), *made)):
        content = trace.values.get(other)
        if content is None:
            continue
        fits = content.shape == shape or (len(shape) > 1 and content.shape in (shape[:-1], torch.Size((*shape[:-1], 1))))
        if other == value or not fits or not content.is_floating_point():
            continue
        role = trace.names.role(other)
        if role in (None, Role.MASK, Role.RESPONSE_IDS) or (role == own and content.shape == trace.values[value].shape):
            continue
        spoilt = content.numel() == rows * shape[-1] and not math.isfinite(float(content.reshape(-1)[flat]))
        before, name = found.get(role), trace.names.name(other)
        called = None if before is None else trace.names.name(before)
        ours, theirs = (_is_name(name), other in behind), (_is_name(called), before in behind)
        later = other in behind or role in _GIVEN or (name == called and spoilt)  # of one name, what the origin went into
        nearer = ours == theirs and later
        if before is None or ours > theirs or nearer:
            found[role] = other
    yield from ((found[role], role) for role in _ORDER if role in found)
    yield from ((other, role) for role, other in found.items() if role not in _ORDER)


def _is_name(name: str | None) -> bool:
    """Is it what the code calls a tensor, and not how it makes it?"""
    return name is not None and "(" not in name


def _runs(
    replayed: Replay, fix: str | None, trace: Trace, size: int, wanted: Collection[int]
) -> Iterator[tuple[str, tuple[str, Mapping[int, Tensor], Mapping[int, Tensor]]]]:
    """Yield the ways of running the step: as recorded, with the fix and with other edits that work, each with its values and gradients.

    wanted: of which values.
    """
    grads = trace.run.grads
    small = size * max(1, len(trace.program.calls)) <= AGAIN
    if small and trace.program.output in trace.values:
        with suppress(ProgramError):
            grads = trace.program.execute(trace.tensors, trace=True).grads
    yield RECORDED, ("as recorded", trace.values, grads)
    others = [name for name in replayed.variants if name != fix][: WAYS - 2] if small else []
    tried = [] if fix is None else [replayed.variants[name] for name in (fix, *others) if name in replayed.variants]
    for variant in tried:
        names = renamed(trace.program, variant.program)
        kept = {*wanted, *(names[one] for one in wanted if one in names)}
        try:
            if trace.run.lean and not small:  # of the recorded step there are no other gradients to be shown beside
                values = variant.program.execute(variant.tensors, backward=False, kept=kept).values
                grads = execute_ends(variant.program, variant.tensors).grads
            else:
                run = variant.program.execute(variant.tensors, trace=small, kept=kept)
                values, grads = run.values, run.grads
        except ProgramError:
            continue
        yield variant.id, (variant.label, _Renamed(values, names), _Renamed(grads, names))


class _Renamed(Mapping[int, Tensor]):
    """What an edited program has, under the ids of the recorded one. A tensor leaves its shelf when it is asked for."""

    def __init__(self, held: Mapping[int, Tensor], names: Mapping[int, int]) -> None:
        self._held = held
        self._ids = {**{value: value for value in held}, **{old: new for old, new in names.items() if new in held}}

    def __getitem__(self, value: int) -> Tensor:
        return self._held[self._ids[value]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, value: object) -> bool:
        return value in self._ids


# -- where to look -------------------------------------------------------------------------------------------------------------------------


def _windows(bad: Tensor, shown: Offending) -> list[Window]:
    """The windows that are kept: the one around the origin, then those with the most that is bad, then what lies next to it."""
    rows, columns = shown.flat.shape
    height, width = min(HEIGHT, rows), min(WIDTH, columns)
    top, left = shown.corner
    places = [(top, left)]
    down, across = -(-rows // height), -(-columns // width)
    unseen = torch.zeros(rows, columns, dtype=torch.bool)
    unseen[:, : bad.shape[1]] = bad
    unseen[top : top + height, left : left + width] = False
    counts = _blocks(unseen, height, width, down, across)
    order = counts.flatten().argsort(descending=True, stable=True).tolist()
    blocks = range(down * across if down * across <= 4096 else 0)
    beside = ((abs(n // across * height - top), abs(n % across * width - left), n) for n in blocks)
    near = [(below + right, n) for below, right, n in beside if below >= height or right >= width]  # and not mostly the same once more
    order = [n for n in order[: 4 * WINDOWS] if counts.flatten()[n] > 0] + [n for _, n in sorted(near)]
    for n in dict.fromkeys(order):
        place = (min(n // across * height, rows - height), min(n % across * width, columns - width))
        if len(places) < WINDOWS and place not in places:
            places.append(place)
    return [_window(shown.masked, r, c, height, width) for r, c in places]


def _window(masked: Tensor | None, row: int, column: int, height: int, width: int) -> Window:
    cut = None if masked is None else masked[row : row + height, column : column + width].tolist()
    return Window(row, column, height, width, None if cut is None else tuple(tuple(map(bool, line)) for line in cut))


def _blocks(content: Tensor, height: int, width: int, down: int, across: int) -> Tensor:
    """The sums of blocks, [down, across]."""
    rows, columns = content.shape
    padded = torch.nn.functional.pad(content.float(), (0, across * width - columns, 0, down * height - rows))
    return padded.reshape(down, height, across, width).sum((1, 3))


def _tiles(
    bad: Tensor, masked: Tensor | None, columns: int
) -> tuple[tuple[tuple[int, ...], ...], int, int, tuple[tuple[float, ...], ...] | None]:
    """columns: of the whole; of one number a row a tile is as wide as that."""
    rows = len(bad)
    height, width = -(-rows // TILES[0]), -(-columns // TILES[1]) if bad.shape[1] == columns else columns
    down, across = -(-rows // height), -(-columns // width)
    counts = _blocks(bad, height, width, down, across).int().tolist()
    shares = None
    if masked is not None:
        sizes = _blocks(torch.ones_like(masked), height, width, down, across)
        shares = tuple(tuple(round(x, 2) for x in line) for line in (_blocks(masked, height, width, down, across) / sizes).tolist())
    return tuple(map(tuple, counts)), height, width, shares


def _worst(bad: Tensor, masked: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Rows with the most that is bad, counted tokens first."""
    hidden = (bad & masked).sum(1) if masked is not None else torch.zeros(len(bad), dtype=torch.long)
    counted = bad.sum(1) - hidden
    score = counted.double() * (bad.shape[1] + 1) + hidden
    for row in score.argsort(descending=True, stable=True)[:WORST].tolist():
        if score[row] > 0:
            yield row, int(counted[row]), int(hidden[row])


# -- one role ------------------------------------------------------------------------------------------------------------------------------

_Runs = Mapping[str, tuple[str, Mapping[int, Tensor], Mapping[int, Tensor]]]


def _track(
    name: str, role: str, value: int, shape: torch.Size, limit: float | None, masked: Tensor | None, windows: Sequence[Window], runs: _Runs
) -> Track | None:
    found = {way: values[value] for way, (_, values, _) in runs.items() if value in values}
    return _of(last_word(name), role, found, shape, limit, masked, windows) if RECORDED in found else None


def _gradients(
    chosen: Sequence[tuple[int, Role | str]], trace: Trace, shape: torch.Size, masked: Tensor | None, windows: Sequence[Window], runs: _Runs
) -> Iterator[Track | None]:
    """What backward hands to the policy's log-probs, or to what came in with a gradient and has this shape."""
    policy = [value for value, role in chosen if role is Role.LOG_PROBS]
    leaves = [leaf.id for leaf in trace.program.leaves if leaf.diff and trace.values[leaf.id].shape == shape]
    for value in dict.fromkeys([*policy, *leaves]):
        found = {way: grads[value] for way, (_, _, grads) in runs.items() if value in grads}
        if RECORDED in found:
            yield _of(
                f"gradient of {last_word(trace.names.name(value) or 'log-probs')}", str(Role.GRAD), found, shape, None, masked, windows
            )
            return


def _ids(trace: Trace, value: int, shape: torch.Size, windows: Sequence[Window]) -> Track | None:
    """The ids of the tokens, where they were saved."""
    found = ids_behind(trace, value, shape)
    if found is None or not trace.values[found].numel():
        return None
    ids, kind, none = trace.values[found], str(Role.RESPONSE_IDS), math.nan
    name = last_word(trace.names.name(found) or trace.names.name(trace.program.source_of(found)) or kind)
    cells, ends = _cells(ids.reshape(-1, shape[-1]), windows, False), (float(ids.min()), float(ids.max()))
    return Track(name, kind, False, None, 0, 0, none, none, none, *ends, ends, None, {RECORDED: cells})


def _of_the_mask(trace: Trace, shown: Offending, windows: Sequence[Window]) -> Iterator[Track | None]:
    """The mask, and how many tokens of each row it lets count."""
    if shown.mask is None or shown.masked is None or shown.layout not in (Layout.TOKENS, Layout.ROWS):
        return
    mask, role, whole = trace.values[shown.mask].float(), str(Role.MASK), shown.masked.numel()
    name = last_word(trace.names.name(shown.mask) or role)
    if mask.numel() in (whole, len(shown.masked)):
        mask = mask.reshape(shown.shape if mask.numel() == whole else (-1, 1))
        yield _of(name, role, {RECORDED: mask}, shown.shape, None, None, windows)
    counted = (~shown.masked).sum(1, keepdim=True).float()
    yield _of(COUNTED, COUNTED, {RECORDED: counted}, shown.shape, None, None, windows)


def _of(
    name: str,
    role: str,
    found: Mapping[str, Tensor],
    shape: torch.Size,
    limit: float | None,
    masked: Tensor | None,
    windows: Sequence[Window],
) -> Track | None:
    content = found[RECORDED]
    per_row = content.shape != shape
    rows = math.prod(shape[:-1])
    flats = {way: tensor.detach().reshape(rows, -1) for way, tensor in found.items() if tensor.shape == content.shape}
    hidden = None if masked is None or masked.shape != flats[RECORDED].shape else masked
    own = Distribution.of(flats[RECORDED], hidden, limit)
    cells = {way: _cells(one, windows, per_row) for way, one in flats.items()}
    bad = {way: own.counts if way == RECORDED else badness(one, hidden, limit) for way, one in flats.items()}
    kept = {
        way: one
        for way, one in cells.items()
        if way == RECORDED or bad[way][0] != bad[RECORDED][0] or not _is_same(flats[way], flats[RECORDED], windows, per_row)
    }
    others = [way for way in kept if way != RECORDED]
    left = {way: bad[way] for way in others}
    drawn = {way: bars for way in others if (bars := _beside(own, flats[way], hidden)) is not None}
    numbers = (own.median, own.low, own.high, own.least, own.most)
    return Track(name, role, per_row, limit, *own.counts, *numbers, own.ends, own.histogram, kept, left, drawn)


def _beside(own: Distribution, flat: Tensor, hidden: Tensor | None) -> Histogram | None:
    """How often which number occurs in another way of running the step: in the bins of the recorded one, if it has any."""
    return histogram(flat, hidden, own.ends) if own.histogram is not None else Distribution.of(flat, hidden, None).histogram


def _cells(flat: Tensor, windows: Sequence[Window], per_row: bool) -> Cells:
    return tuple(tuple(tuple(line) for line in cut.double().tolist()) for cut in _cuts(flat, windows, per_row))


def _cuts(flat: Tensor, windows: Sequence[Window], per_row: bool) -> Iterator[Tensor]:
    yield from (
        flat[w.row : w.row + w.height] if per_row else flat[w.row : w.row + w.height, w.column : w.column + w.width] for w in windows
    )


def _is_same(one: Tensor, other: Tensor, windows: Sequence[Window], per_row: bool) -> bool:
    """Do two hold the same numbers in all windows? NaN is NaN."""
    pairs = zip(_cuts(one, windows, per_row), _cuts(other, windows, per_row), strict=True)
    return all(bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all()) for mine, theirs in pairs)
