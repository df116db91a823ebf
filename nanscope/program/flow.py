"""Which element comes from which: the data flow of a recorded program, element by element.

`sources` answers "what did this element of the result come from", `spread` answers "what does this element reach". Copies (views,
gathers, indexing) are not described by hand: the recorded operator itself is run on numbers that say where an element was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.program.calls import Arg, Call, Ref, overload, refs
from nanscope.program.ops import (
    ACCUMULATING,
    ATTENTIONS,
    BATCHED_MATMULS,
    CONSTANT_PAYLOADS,
    CUMULATIVE,
    MATRIX_VECTORS,
    NLL_LOSSES,
    OVERLOADED_EXTREMA,
    PAYLOAD,
    ROW_NORMS,
    SELECTORS,
    UNSPLIT_PRODUCTS,
    WHOLE_PRODUCTS,
    Flow,
    flow_of,
)
from nanscope.program.safety import permitted
from nanscope.text import ravel, unravel
from nanscope.torch_inside import schema_of

_LINES = (Flow.REDUCE, Flow.ALONG)  # an element comes from whole lines of an argument


@dataclass(frozen=True, slots=True)
class Source:
    """Elements of one value that an element came from. flat: indices into the flattened value; argument: position in the call."""

    value: int
    flat: Tensor
    argument: int


def element_flow(call: Call) -> Flow | None:
    """How elements flow through this call; some overloads and flags make another function of an operator."""
    name, overloaded = call.name, call.op.rsplit(".", 1)[-1]
    if name in OVERLOADED_EXTREMA and overloaded == "other":
        return Flow.POINTWISE
    if "reduce" in overloaded or (name in ACCUMULATING and len(call.args) > 3 and call.args[3] is True):
        return Flow.MIX
    return flow_of(call.op)


def sources(call: Call, values: Mapping[int, Tensor], out: int, flat: int) -> list[Source]:
    """Return the elements of the call's arguments that element `flat` of its result `out` came from, argument by argument."""
    flow, name = element_flow(call), call.name
    result = values[out]
    if flow is Flow.CREATE or name in SELECTORS:
        return []
    if flow is Flow.MOVE:
        return _moved_from(call, values, out, flat)
    index = unravel(flat, result.shape)
    found: list[Source] = []
    for position, arg in enumerate(call.args):
        for value in refs(arg):
            tensor = values[value]
            if flow is Flow.POINTWISE and tensor.dim() <= result.dim():
                found.append(Source(value, _broadcast_from(index, tensor), position))
            elif flow is Flow.REDUCE:
                found.append(Source(value, _reduced_from(call, tensor, result, index), position))
            elif flow is Flow.ALONG:
                found.append(Source(value, _fibre(tensor, index, dims_of(call, tensor), upto=name in CUMULATIVE), position))
            elif flow is Flow.MATMUL:
                found.append(Source(value, _row_or_column(name, position, tensor, result, index), position))
            elif flow is Flow.MATRIX:
                found.append(Source(value, _matrix_of(tensor, index[: _batch_dims(call, values)]), position))
            elif name in ROW_NORMS:
                row = _row_of(index, tensor, len(call.args[1])) if position == 0 else _broadcast_from(index, tensor)  # type: ignore[arg-type]
                found.append(Source(value, row, position))
            elif name in ATTENTIONS:
                found.append(Source(value, _attended_from(position, tensor, index), position))
            elif name in NLL_LOSSES:
                if position == 0:
                    found.append(Source(value, _targets(call, values, tensor, index), position))
            else:
                found.append(Source(value, torch.arange(tensor.numel()), position))
    for _, arg in call.kwargs:
        for value in refs(arg):
            if flow is Flow.POINTWISE:
                found.append(Source(value, _broadcast_from(index, values[value]), -1))
            elif name in ATTENTIONS:  # of the mask, as of the query, the row
                found.append(Source(value, _attended_from(0, values[value], index), -1))
    return found


def origins(call: Call, values: Mapping[int, Tensor], out: int, flats: Tensor, most: int) -> dict[int, Tensor]:
    """Return the elements of the call's arguments that any of the elements `flats` of its result `out` came from, or, of a comparison, was
    decided by: value → positions.

    most: elements of which the sources are asked one by one, where no rule answers for all at once; of more, all of an argument is given.
    """
    found: dict[int, list[Tensor]] = {}
    shape, flow = values[out].shape, element_flow(call)
    if flow is Flow.CREATE:  # a fill may put in a number that is a value
        return {value: torch.zeros(1, dtype=torch.int64) for value in list(call.inputs())[1:] if values[value].numel() == 1}
    for value in dict.fromkeys(call.inputs()) if flow is Flow.POINTWISE or (flow not in (Flow.MOVE, *_LINES) and len(flats) > most) else ():
        every = torch.arange(values[value].numel()).reshape(values[value].shape)
        whole = flow is not Flow.POINTWISE or every.dim() > len(shape)
        found[value] = [every.flatten() if whole else every.expand(shape).flatten()[flats]]
    if flow is Flow.MOVE:
        return _moved_from_any(call, values, out, flats)
    if not found and flow in _LINES:
        asked = torch.zeros(values[out].numel(), dtype=torch.bool).index_fill(0, flats, True).reshape(shape)
        for value in dict.fromkeys(call.inputs()):
            found[value] = [_lines(call, values[value], asked).flatten().nonzero().flatten()]
    if not found:
        for flat in flats.tolist():
            for source in sources(call, values, out, flat):
                found.setdefault(source.value, []).append(source.flat)
    return {value: torch.unique(torch.cat(own)) for value, own in found.items()}


def behind(call: Call, values: Mapping[int, Tensor], out: int, marked: Tensor) -> dict[int, Tensor]:
    """Return, for every argument of a call that keeps elements apart, which of its elements the marked ones of a result came from; nothing
    of other calls."""
    if element_flow(call) not in (Flow.POINTWISE, Flow.MOVE):
        return {}
    flats = marked.flatten().nonzero().flatten()
    found = origins(call, values, out, flats, 0) if len(flats) else {}
    marks = {value: torch.zeros(values[value].numel(), dtype=torch.bool) for value in call.inputs()}
    none = torch.zeros(0, dtype=torch.int64)
    return {value: mark.index_fill(0, found.get(value, none), True).reshape(values[value].shape) for value, mark in marks.items()}


def narrowed(marked: Tensor, shape: torch.Size) -> Tensor:
    """Return which elements of a tensor that is broadcast have their part in the marked ones."""
    more = marked.dim() - len(shape)
    own = marked.flatten(0, more - 1).any(0) if more > 0 else marked
    for dim, size in enumerate(shape):
        own = own.any(dim, keepdim=True) if size == 1 else own
    return own


def _row_of(index: tuple[int, ...], tensor: Tensor, trailing: int) -> Tensor:
    """The elements that share all but the trailing dimensions of an index."""
    every = torch.arange(tensor.numel()).reshape(tensor.shape)
    return every[index[: tensor.dim() - trailing]].flatten()


def _attended_from(position: int, tensor: Tensor, index: tuple[int, ...]) -> Tensor:
    """What attention reads for one element: the row of the query, or of the mask, and all keys and values of the head. index: of the
    result; several heads of it may share one."""
    every = torch.arange(tensor.numel()).reshape(tensor.shape)
    if tensor.dim() < 4 or len(index) < 3:
        return every.flatten()
    head = index[1] * tensor.shape[1] // max(tensor.shape[1], index[1] + 1) if tensor.shape[1] > 1 else 0
    row, head = min(index[0], tensor.shape[0] - 1), min(index[1], head, tensor.shape[1] - 1)
    own = every[row, head]
    return own[min(index[2], tensor.shape[2] - 1)].flatten() if position not in (1, 2) else own.flatten()


def spread(call: Call, values: Mapping[int, Tensor], marked: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return, for every result of the call, a bool tensor of the elements that depend on the marked elements of its arguments.

    The finest rule that is known decides, from one element to one element down to any to any; too many marks are safe, too few are not.
    """
    flow, name = element_flow(call), call.name
    touched = [value for value in call.inputs() if value in marked and bool(marked[value].any())]
    outs = [out for out in call.outs if out is not None and out in values]
    if not touched or flow is Flow.CREATE or name in SELECTORS:
        return {}
    if flow is Flow.MOVE:
        return _moved_to(call, values, marked)
    found: dict[int, Tensor] = {}
    for out in outs:
        result = values[out]
        mark = torch.zeros(result.shape, dtype=torch.bool)
        for position, arg in enumerate(call.args):
            for value in refs(arg):
                if value not in touched:
                    continue
                own = marked[value]
                if flow is Flow.POINTWISE and own.dim() <= result.dim():
                    mark |= own.expand(result.shape)
                elif flow is Flow.REDUCE:
                    mark |= _reduce(call, own, result)
                elif flow is Flow.ALONG and name in CUMULATIVE and own.dim():  # what comes after it along the dimension
                    mark |= own.int().cummax(dim=dims_of(call, own)[0]).values.bool()
                elif name in ROW_NORMS and position == 0:
                    flat = own.flatten(own.dim() - len(call.args[1])).any(-1)  # type: ignore[arg-type]
                    mark |= flat.reshape(*flat.shape, *[1] * (result.dim() - flat.dim())).expand(result.shape)
                elif name in ROW_NORMS:  # weight and bias: the same column of every row
                    mark |= own.expand(result.shape) if own.shape == result.shape[result.dim() - own.dim() :] else bool(own.any())
                elif name in NLL_LOSSES and position == 0:
                    mark |= _reads_marked(call, values, own, result)
                elif flow is Flow.ALONG:
                    dims = dims_of(call, own) or tuple(range(own.dim()))
                    mark |= own.any(dim=dims[0], keepdim=True).expand(result.shape) if own.dim() else own
                elif flow is Flow.MATMUL:
                    mark |= _matmul_mark(name, position, own, result)
                elif flow is Flow.MATRIX:
                    mark |= _matrix_mark(own, result, _batch_dims(call, values))
                else:  # no finer rule: everything depends on it
                    mark |= bool(own.any())
        if bool(mark.any()):
            found[out] = mark
    return found


def _run_on(call: Call, values: Mapping[int, Tensor], payload: Mapping[int, Tensor]) -> list[Tensor]:
    """Run a copying call with other contents: what carries elements comes from `payload`, constants become 0."""
    name = call.name
    carries = PAYLOAD.get(name, (0,))

    def resolve(arg: Arg, carrying: bool) -> object:
        if isinstance(arg, Ref):
            return payload[arg.id] if carrying else values[arg.id]
        if isinstance(arg, tuple):
            return [resolve(item, carrying) for item in arg]
        return 0 if carrying and isinstance(arg, (int, float)) and name in CONSTANT_PAYLOADS else arg

    args = [resolve(arg, position in carries) for position, arg in enumerate(call.args)]
    if name == "constant_pad_nd" and len(args) > 2:
        args[2] = 0
    kwargs = {key: resolve(arg, False) for key, arg in call.kwargs if key != "dtype"}
    result = permitted(call.op, args, kwargs)(*args, **kwargs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _payload_values(call: Call) -> list[tuple[int, int]]:
    carries = PAYLOAD.get(call.name, (0,))
    return [(position, value) for position, arg in enumerate(call.args) if position in carries for value in refs(arg)]


def _like_strides(content: Tensor, like: Tensor) -> Tensor:
    """Lay content out as `like` is, so that operators which speak of strides and offsets mean the same elements; 0 in between."""
    if content.is_contiguous() and like.is_contiguous() and not like.storage_offset():
        return content
    if 0 in like.stride() and like.numel():
        return content.clone()
    memory = torch.zeros(like.untyped_storage().nbytes() // like.element_size(), dtype=content.dtype)
    laid = memory.as_strided(like.shape, like.stride(), like.storage_offset())
    laid.copy_(content)
    return laid


def _moved_from_any(call: Call, values: Mapping[int, Tensor], out: int, flats: Tensor) -> dict[int, Tensor]:
    which, starts = _numbered(call, values, out)
    wanted, found = which[flats], {}
    for start, value, _ in starts:
        own = wanted[(wanted >= start) & (wanted < start + values[value].numel())] - start
        if own.numel():
            found[value] = torch.unique(own)
    return found


def _moved_from(call: Call, values: Mapping[int, Tensor], out: int, flat: int) -> list[Source]:
    results, starts = _numbered(call, values, out)
    which = int(results[flat])
    for start, value, position in reversed(starts):
        if which >= start:
            return [Source(value, torch.tensor([which - start]), position)]
    return []  # a constant


def _numbered(call: Call, values: Mapping[int, Tensor], out: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Where each element of a copy was, counted from 1 over all that is copied from, 0 for a constant; and where each of these starts to
    count: (number, value, argument)."""
    numbered: dict[int, Tensor] = {}
    starts: list[tuple[int, int, int]] = []
    offset = 1
    for position, value in _payload_values(call):
        tensor = values[value]
        if value not in numbered:
            own = torch.arange(offset, offset + tensor.numel()).reshape(tensor.shape)
            numbered[value] = _like_strides(own, tensor)
            starts.append((offset, value, position))
            offset += tensor.numel()
    results = _run_on(call, values, numbered)
    return results[call.outs.index(out)].flatten(), starts


def _moved_to(call: Call, values: Mapping[int, Tensor], marked: Mapping[int, Tensor]) -> dict[int, Tensor]:
    payload = {}
    for _, value in _payload_values(call):
        tensor = values[value]
        own = marked[value] if value in marked else torch.zeros(tensor.shape, dtype=torch.bool)
        payload[value] = _like_strides(own.to(torch.int64), tensor)
    results = _run_on(call, values, payload)
    marks = {out: result.bool() for out, result in zip(call.outs, results, strict=False) if out is not None}
    return {out: mark for out, mark in marks.items() if bool(mark.any())}


def _broadcast_from(index: tuple[int, ...], tensor: Tensor) -> Tensor:
    own = index[len(index) - tensor.dim() :]
    return torch.tensor([ravel(tuple(0 if n == 1 else i for i, n in zip(own, tensor.shape, strict=True)), tensor.shape)])


def dims_of(call: Call, tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions that a reduction or an along-operator names, () for all of them."""
    schema = schema_of(overload(call.op))
    named: Arg = None
    for position, argument in enumerate(schema.arguments):
        if argument.name in ("dim", "dims", "axis"):
            named = call.args[position] if position < len(call.args) else dict(call.kwargs).get(argument.name, _default(argument))
    if isinstance(named, int) and not isinstance(named, bool):
        named = (named,)
    if not isinstance(named, tuple):
        return ()
    rank = max(tensor.dim(), 1)
    return tuple(int(dim) % rank for dim in named if isinstance(dim, int))


def _default(argument: object) -> Arg:
    value = getattr(argument, "default_value", None)
    return value if isinstance(value, int) else None


def _fibre(tensor: Tensor, index: tuple[int, ...], dims: tuple[int, ...], *, upto: bool = False) -> Tensor:
    """Return the flat positions of all elements that differ from `index` only along `dims` (all dimensions if none is named).

    upto: only those at or before `index`.
    """
    if tensor.dim() == 0:
        return torch.zeros(1, dtype=torch.int64)
    positions = torch.arange(tensor.numel()).reshape(tensor.shape)
    for dim in range(tensor.dim()):
        if dims and dim not in dims:
            positions = positions.narrow(dim, index[dim], 1)
        elif upto:
            positions = positions.narrow(dim, 0, index[dim] + 1)
    return positions.flatten()


def _lines(call: Call, tensor: Tensor, asked: Tensor) -> Tensor:
    """Return which elements of an argument lie on the lines, along the dimensions of a reduction or an along-operator, of those of a result
    that are asked for. One by one, of a tensor over the vocabulary, that would be as much again for every element."""
    dims = dims_of(call, tensor) or tuple(range(tensor.dim()))
    if asked.dim() != tensor.dim():
        asked = asked.reshape([1 if dim in dims else size for dim, size in enumerate(tensor.shape)])
    if call.name in CUMULATIVE and tensor.dim():  # what comes before it along the dimension
        return asked.int().flip(dims[0]).cummax(dim=dims[0]).values.flip(dims[0]).bool()
    for dim in dims:
        asked = asked.any(dim, keepdim=True)
    return asked.expand(tensor.shape)


def _reduced_from(call: Call, tensor: Tensor, result: Tensor, index: tuple[int, ...]) -> Tensor:
    dims = dims_of(call, tensor) or tuple(range(tensor.dim()))
    kept = iter(index)
    if result.dim() == tensor.dim():
        full = index
    else:
        full = tuple(0 if dim in dims else next(kept) for dim in range(tensor.dim()))
    return _fibre(tensor, full, dims)


def _reduce(call: Call, mark: Tensor, result: Tensor) -> Tensor:
    dims = dims_of(call, mark) or tuple(range(mark.dim()))
    kept = mark
    for dim in dims:
        kept = kept.any(dim=dim, keepdim=True)
    return kept.reshape(result.shape)


def _row_or_column(name: str, position: int, tensor: Tensor, result: Tensor, index: tuple[int, ...]) -> Tensor:
    """Return the row of the left factor, the column of the right one, or the element of an added matrix."""
    factors = {"addmm": (1, 2), "addmv": (1, 2), "baddbmm": (1, 2)}.get(name, (0, 1))
    positions = torch.arange(tensor.numel()).reshape(tensor.shape)
    if position not in factors or name == "linear":
        return _broadcast_from(index, tensor) if position not in factors else positions.flatten()
    if name in WHOLE_PRODUCTS:
        return positions.flatten()
    if name in BATCHED_MATMULS:
        positions = positions[index[0]]
        row, column = index[1], index[2]
    elif name in MATRIX_VECTORS:
        return positions[index[0]].flatten() if position == factors[0] else positions.flatten()
    else:
        row, column = index[0], index[1]
    return positions[row].flatten() if position == factors[0] else positions[:, column].flatten()


def _matmul_mark(name: str, position: int, mark: Tensor, result: Tensor) -> Tensor:
    factors = {"addmm": (1, 2), "addmv": (1, 2), "baddbmm": (1, 2)}.get(name, (0, 1))
    if position not in factors:
        return mark.expand(result.shape)
    if name in MATRIX_VECTORS and position == factors[0]:
        return mark.any(dim=-1)
    if name in UNSPLIT_PRODUCTS:
        return torch.full(result.shape, bool(mark.any()))
    along = mark.any(dim=-1, keepdim=True) if position == factors[0] else mark.any(dim=-2, keepdim=True)
    return along.expand(result.shape)


def _batch_dims(call: Call, values: Mapping[int, Tensor]) -> int:
    """Return how many dimensions number the matrices that a call is given."""
    return max(0, values[next(call.inputs())].dim() - 2)


def _matrix_of(tensor: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return the flat positions of the matrix that a batch index names; all of them where there is one for the whole batch."""
    positions = torch.arange(tensor.numel()).reshape(tensor.shape)
    if tensor.dim() < len(batch) or any(n != 1 and i >= n for i, n in zip(batch, tensor.shape, strict=False)):
        return positions.flatten()
    return positions[tuple(0 if n == 1 else i for i, n in zip(batch, tensor.shape, strict=False))].flatten()


def _matrix_mark(mark: Tensor, result: Tensor, batch: int) -> Tensor:
    """What comes of a marked matrix of a batch: everything with the same batch index."""
    if mark.dim() < batch or result.dim() < batch or any(n not in (1, m) for n, m in zip(mark.shape[:batch], result.shape, strict=False)):
        return torch.full(result.shape, bool(mark.any()))
    own = mark.flatten(batch).any(-1) if mark.dim() > batch else mark
    return own.reshape((*own.shape, *[1] * (result.dim() - batch))).expand(result.shape)


def _targets(call: Call, values: Mapping[int, Tensor], log_probs: Tensor, index: tuple[int, ...]) -> Tensor:
    """nll_loss reads one element a row: the target's. index: of the result, which names the row unless it is reduced."""
    target = call.args[1]
    if not isinstance(target, Ref):
        return torch.arange(log_probs.numel())
    labels = values[target.id].reshape(-1)
    if log_probs.dim() > 2:  # classes are the second dimension: [N, C, …]
        numbers = torch.arange(log_probs.numel()).reshape(log_probs.shape).movedim(1, -1).reshape(-1, log_probs.shape[1])
        ignored = call.args[4] if len(call.args) > 4 and isinstance(call.args[4], int) else -100
        keep = torch.ne(labels, ignored)
        if index:
            own = torch.zeros(values[target.id].shape, dtype=torch.bool)
            own[index] = True
            keep = keep & own.reshape(-1)
        return numbers[keep].gather(1, labels[keep][:, None]).squeeze(1)
    width = log_probs.shape[-1]
    ignored = call.args[4] if len(call.args) > 4 and isinstance(call.args[4], int) else -100
    rows = torch.arange(labels.numel())
    keep = torch.ne(labels, ignored)
    if index:
        keep = keep & (rows == index[0])
    return rows[keep] * width + labels[keep]


def _reads_marked(call: Call, values: Mapping[int, Tensor], mark: Tensor, result: Tensor) -> Tensor:
    """The results of nll_loss whose targets are marked."""
    if result.dim() == 0:
        return torch.tensor(bool(mark.flatten()[_targets(call, values, mark, ())].any()))
    places = [unravel(row, result.shape) for row in range(result.numel())]
    return torch.tensor([bool(mark.flatten()[_targets(call, values, mark, place)].any()) for place in places]).reshape(result.shape)
