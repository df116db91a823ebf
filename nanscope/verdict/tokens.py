"""Everything that is known of the tokens around the origin: each role's values, as recorded and under the proven fix, where people look.

    TokenMap   which part of the batch is kept (windows), what is masked there, and how all of it looks from far (tiles, worst rows)
    Track      one role: values in each window, under each way of running the step; range, histogram

Notable: a batch of 512 × 8192 tokens stays one page. The values are kept of a few windows, those with the most that is bad; the rest is
told by tiles and by counts, so that one bad token of a million is never lost, nor taken for ten thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.locate.drops import Drop
from nanscope.locate.observe import operand_name
from nanscope.locate.trace import Trace
from nanscope.program.calls import Ref
from nanscope.program.ops import EXPONENTIALS
from nanscope.replay.rebind import renamed
from nanscope.replay.tries import Replay
from nanscope.roles import Role, last_word

HEIGHT, WIDTH = 24, 64  # of a window
WINDOWS = 6  # that are kept
TILES = (48, 96)  # rows and columns of the whole seen from far
WORST = 12  # rows that are named
BINS = 32
SAMPLE = 1 << 20  # elements that a median is taken of
TRACKS = 12
AGAIN = 1 << 22  # elements up to which the step is run once more for the gradients inside it
RECORDED = "as_recorded"

_ORDER = (
    Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS, Role.LOG_RATIO, Role.RATIO, Role.IS_WEIGHT,
    Role.ADVANTAGES, Role.REWARDS, Role.KL, Role.ENTROPY, Role.LOSS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the map that is kept. row, column: where it begins; masked: [height][width], None where no mask is known."""

    row: int
    column: int
    height: int
    width: int
    masked: tuple[tuple[bool, ...], ...] | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often which number occurs. low, high: ends of the bins, which are alike; counted, masked: finite elements in each."""

    low: float
    high: float
    counted: tuple[int, ...]
    masked: tuple[int, ...]


Cells = tuple[tuple[tuple[float, ...], ...], ...]  # window → row → column; of what each row has one, a single column


@dataclass(frozen=True, slots=True)
class Track:
    """One role of the batch.

    name: what the code calls it. role: what it means. per_row: one number for a row of tokens. limit: where exp of it overflows, in nats.
    bad, bad_masked: elements that are not finite or beyond the limit, and how many of these the loss does not count.
    median, low, high: of the finite ones that the loss counts, low and high at 5 % and at 95 %; NaN where there are none, and of
    ids. least, most: the range of all finite ones.
    cells: by the way of running the step; one that changes nothing here is left out. left: of each that is not, what is bad then.
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
    histogram: Histogram | None
    cells: Mapping[str, Cells]
    left: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The offending tensor's rows and tokens, with all that is known of each.

    rows, columns: of the whole. row, column: the origin. dims: more than two dimensions, flattened into rows. tiles: [down][across] of the
    whole, bad elements in each; tile_height, tile_width: elements of one. tiles_masked: share of masked elements in each, None where no
    mask is known. worst: (row, bad counted, bad masked), most first. main: which track the map shows first. ways: how the step was run, by
    id, in words.
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


def tokens_of(replayed: Replay, fix: str | None) -> TokenMap | None:
    """Return what is known of the tokens around the origin; None where there is no such tensor. fix: the edit that is shown beside."""
    location, trace = replayed.location, replayed.trace
    if location is None or trace is None:
        return None
    origin = location.origin
    value, exponent = origin.value_id, None
    if origin.op in EXPONENTIALS and origin.operands:
        value = origin.operands[0].id
        exponent = (
            math.log(torch.finfo(trace.values[origin.value_id].dtype).max) if trace.values[origin.value_id].is_floating_point() else None
        )
    shown = trace.values.get(value)
    if shown is None or shown.dim() == 0 or not shown.is_floating_point() or shown.numel() == 0:
        return None
    shape = shown.shape
    columns = shape[-1]
    rows = shown.numel() // columns
    if origin.flat >= rows * columns:
        return None
    row, column = divmod(origin.flat, columns)
    masked = _mask(trace, origin.drops, shape, row, column)
    chosen = list(_chosen(trace, value, shape, origin.flat))
    names = {value: last_word(operand_name(origin, 0) if exponent is not None else origin.variable or origin.op)}
    limits = {value: exponent}
    bad = _bad(shown.reshape(rows, columns), exponent)
    bad[row, column] = True
    windows = _windows(bad, masked, row, column)
    runs = dict(_runs(replayed, fix, trace, shown.numel()))
    tracks = [
        _track(names.get(v) or trace.names.name(v) or str(r), str(r), v, shape, limits.get(v), masked, windows, runs) for v, r in chosen
    ]
    tracks += _gradients(chosen, trace, shape, masked, windows, runs)
    tracks.append(_ids(trace, value, shape, windows))
    kept = [track for track in tracks if track is not None][:TRACKS]
    tiles, height, width, shares = _tiles(bad, masked)
    return TokenMap(
        rows, columns, row, column, max(0, len(shape) - 2), tuple(windows), tuple(kept), 0, tiles, height, width, shares,
        tuple(_worst(bad, masked)), {way: words for way, (words, _, _) in runs.items()},
    )  # fmt: skip


# -- which tensors -------------------------------------------------------------------------------------------------------------------------


def _chosen(trace: Trace, value: int, shape: torch.Size, flat: int) -> Iterator[tuple[int, Role | str]]:
    """Yield the offending tensor, and of every role the value of its shape, or of its rows, that the code has a name for."""
    own, rows = trace.names.role(value), math.prod(shape[:-1])
    yield value, own or "value"
    found: dict[Role, int] = {}
    path = trace.program.slice(value)  # what the origin was made of: of two versions of a tensor, the one that it read
    behind = {leaf.id for leaf in path.leaves} | {out for call in path.calls for out in call.outs if out is not None}
    for other, content in trace.values.items():
        fits = content.shape == shape or (len(shape) > 1 and content.shape in (shape[:-1], torch.Size((*shape[:-1], 1))))
        if other == value or not fits or not content.is_floating_point():
            continue
        role = trace.names.role(other)
        if role in (None, Role.MASK, Role.RESPONSE_IDS) or role == own:
            continue
        spoilt = content.numel() == rows * shape[-1] and not math.isfinite(float(content.reshape(-1)[flat]))
        before, name = found.get(role), trace.names.name(other)
        called = None if before is None else trace.names.name(before)
        ours, theirs = (name is not None, other in behind), (called is not None, before in behind)
        nearer = ours == theirs and (other in behind or (name == called and spoilt))  # of one name, what the origin went into
        if before is None or ours > theirs or nearer:
            found[role] = other
    yield from ((found[role], role) for role in _ORDER if role in found)
    yield from ((other, role) for role, other in found.items() if role not in _ORDER)


def _runs(
    replayed: Replay, fix: str | None, trace: Trace, size: int
) -> Iterator[tuple[str, tuple[str, Mapping[int, Tensor], Mapping[int, Tensor]]]]:
    """Yield the ways of running the step: as recorded and with the fix, each with its values and gradients."""
    grads = trace.run.grads
    small = size * max(1, len(trace.program.calls)) <= AGAIN
    if small and trace.program.output in trace.values:
        with suppress(ProgramError):
            grads = trace.program.execute(trace.tensors, trace=True).grads
    yield RECORDED, ("as recorded", trace.values, grads)
    variant = replayed.variants.get(fix) if fix else None
    if variant is not None:
        try:
            run = variant.program.execute(variant.tensors, trace=small)
        except ProgramError:
            return
        names = renamed(trace.program, variant.program)
        values, grads = ({**one, **{old: one[new] for old, new in names.items() if new in one}} for one in (run.values, run.grads))
        yield variant.id, (variant.label, values, grads)


def _mask(trace: Trace, drops: Sequence[Drop], shape: torch.Size, row: int, column: int) -> Tensor | None:
    """Which elements the loss leaves out as it does the origin, [rows, columns]; else what its mask does; None if none is known."""
    for drop in drops:
        if drop.by is None or drop.how not in ("mask", "select"):
            continue
        whole = _spread(trace.values[drop.by], shape)
        if whole is not None:
            return whole == whole[row, column]
    for value, content in trace.values.items():
        if content.shape == shape and trace.names.says_mask(value):
            whole = _spread(content, shape)
            if whole is not None:
                return whole == 0
    return None


def _spread(content: Tensor, shape: torch.Size) -> Tensor | None:
    try:
        return content.expand(shape).reshape(-1, shape[-1])
    except RuntimeError:
        pass
    try:  # one for each token, of which there are several numbers
        return content.reshape(*content.shape, 1).expand(shape).reshape(-1, shape[-1])
    except RuntimeError:
        return None


def _bad(flat: Tensor, limit: float | None) -> Tensor:
    bad = ~torch.isfinite(flat)
    return bad | (flat > limit) if limit is not None else bad


# -- where to look -------------------------------------------------------------------------------------------------------------------------


def _windows(bad: Tensor, masked: Tensor | None, row: int, column: int) -> list[Window]:
    """The windows that are kept: the one around the origin, then those with the most that is bad, then what lies next to it."""
    rows, columns = bad.shape
    height, width = min(HEIGHT, rows), min(WIDTH, columns)
    top, left = max(0, min(row - height // 2, rows - height)), max(0, min(column - width // 2, columns - width))
    places = [(top, left)]
    down, across = -(-rows // height), -(-columns // width)
    counts = _blocks(bad, height, width, down, across)
    order = counts.flatten().argsort(descending=True, stable=True).tolist()
    near = (
        [(abs(i * height - top) + abs(j * width - left), i * across + j) for i in range(down) for j in range(across)]
        if down * across <= 4096
        else []
    )
    order = [n for n in order[: 4 * WINDOWS] if counts.flatten()[n] > 0] + [n for _, n in sorted(near)]
    for n in dict.fromkeys(order):
        place = (min(n // across * height, rows - height), min(n % across * width, columns - width))
        if len(places) < WINDOWS and place not in places:
            places.append(place)
    return [_window(masked, r, c, height, width) for r, c in places]


def _window(masked: Tensor | None, row: int, column: int, height: int, width: int) -> Window:
    cut = None if masked is None else masked[row : row + height, column : column + width].tolist()
    return Window(row, column, height, width, None if cut is None else tuple(tuple(map(bool, line)) for line in cut))


def _blocks(content: Tensor, height: int, width: int, down: int, across: int) -> Tensor:
    """The sums of blocks, [down, across]."""
    rows, columns = content.shape
    padded = torch.nn.functional.pad(content.float(), (0, across * width - columns, 0, down * height - rows))
    return padded.reshape(down, height, across, width).sum((1, 3))


def _tiles(bad: Tensor, masked: Tensor | None) -> tuple[tuple[tuple[int, ...], ...], int, int, tuple[tuple[float, ...], ...] | None]:
    rows, columns = bad.shape
    height, width = -(-rows // TILES[0]), -(-columns // TILES[1])
    down, across = -(-rows // height), -(-columns // width)
    counts = _blocks(bad, height, width, down, across).int().tolist()
    shares = None
    if masked is not None:
        sizes = _blocks(torch.ones_like(bad), height, width, down, across)
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
    """The ids of the tokens, where they were saved: the index that took the log-probs behind the origin out of the vocabulary."""
    for call in reversed(trace.program.slice(value).calls):
        index = call.args[2] if call.name == "gather" and len(call.args) > 2 else None
        ids = trace.values.get(index.id) if isinstance(index, Ref) else None
        if ids is None or not isinstance(index, Ref) or ids.shape not in (shape, torch.Size((*shape, 1))):
            continue
        source = trace.program.source_of(index.id)
        cells = _cells(ids.reshape(-1, shape[-1]), windows, False)
        least, most = float(ids.min()), float(ids.max())
        name = trace.names.name(index.id) or trace.names.name(source) or str(Role.RESPONSE_IDS)
        return Track(
            last_word(name), str(Role.RESPONSE_IDS), False, None, 0, 0, math.nan, math.nan, math.nan, least, most, None, {RECORDED: cells}
        )
    return None


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
    flat = flats[RECORDED]
    fine = torch.isfinite(flat)
    hidden = None if masked is None or per_row else masked
    least, most = _range(flat, fine)
    low, median, high = _usual(flat, fine, hidden)
    cells = {way: _cells(one, windows, per_row) for way, one in flats.items()}
    bad = {way: _badness(one, limit, hidden) for way, one in flats.items()}
    kept = {
        way: one for way, one in cells.items() if way == RECORDED or str(one) != str(cells[RECORDED]) or bad[way][0] != bad[RECORDED][0]
    }
    bins = _histogram(flat, fine, hidden, (least, most), limit)
    left = {way: counts for way, counts in bad.items() if way in kept and way != RECORDED}
    return Track(name, role, per_row, limit, *bad[RECORDED], median, low, high, least, most, bins, kept, left)


def _badness(flat: Tensor, limit: float | None, hidden: Tensor | None) -> tuple[int, int]:
    bad = _bad(flat, limit)
    return int(bad.sum()), int((bad & hidden).sum()) if hidden is not None else 0


def _cells(flat: Tensor, windows: Sequence[Window], per_row: bool) -> Cells:
    cuts = (flat[w.row : w.row + w.height] if per_row else flat[w.row : w.row + w.height, w.column : w.column + w.width] for w in windows)
    return tuple(tuple(tuple(line) for line in cut.double().tolist()) for cut in cuts)


def _range(flat: Tensor, fine: Tensor) -> tuple[float, float]:
    """The smallest and the largest finite number, NaN where there is none."""
    if not bool(fine.any()):
        return math.nan, math.nan
    ends = torch.finfo(flat.dtype)
    return float(torch.where(fine, flat, ends.max).min()), float(torch.where(fine, flat, ends.min).max())


def _usual(flat: Tensor, fine: Tensor, masked: Tensor | None) -> tuple[float, float, float]:
    """The quantiles at 5 %, 50 % and 95 % of what the loss counts, of a part of it where it is large."""
    step = max(1, flat.numel() // SAMPLE)
    part, kept = flat.reshape(-1)[::step], fine.reshape(-1)[::step]
    counted = kept & ~masked.reshape(-1)[::step] if masked is not None else kept
    sample = part[counted if bool(counted.any()) else kept].double()
    if not sample.numel():
        return math.nan, math.nan, math.nan
    low, median, high = torch.quantile(sample, torch.tensor([0.05, 0.5, 0.95], dtype=torch.double)).tolist()
    return low, median, high


def _histogram(flat: Tensor, fine: Tensor, masked: Tensor | None, ends: tuple[float, float], limit: float | None) -> Histogram | None:
    """Counted beside masked, over the range of both and of the limit."""
    low, high = ends[0], max(ends[1], limit) if limit is not None and ends[0] < limit else ends[1]
    if not (math.isfinite(low) and math.isfinite(high) and 0 < high - low < math.inf):
        return None
    bins = ((flat.double() - low).mul_(BINS / (high - low))).nan_to_num_(0.0).clamp_(0, BINS - 1).long()
    bins += BINS * masked if masked is not None else 0
    bins[~fine] = 2 * BINS
    counts = torch.bincount(bins.reshape(-1), minlength=2 * BINS + 1).tolist()
    return Histogram(low, high, tuple(counts[:BINS]), tuple(counts[BINS : 2 * BINS]))
