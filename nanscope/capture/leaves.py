"""Where a tensor comes from that no recorded call has made: a model, its weights, a call that cannot be made again, or the batch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanscope.capture.before import Before
from nanscope.capture.differentiated import Differentiated
from nanscope.capture.entries import PLAIN, Opaque, Value, node_of
from nanscope.capture.opaques import Opaques
from nanscope.capture.values import Values, key_of
from nanscope.program.calls import Leaf
from nanscope.program.ops import UNWRITTEN_FACTORIES
from nanscope.torch_inside import base_of


class Leaves:
    """Numbers them. module_outputs: names the module that has made a tensor. is_parameter: names a weight. opaque: of leaves that came out
    of calls which cannot be made again, what is known of these. before: what memory held before writes that are still to be understood."""

    def __init__(self, known: Values, opaques: Opaques, differentiated: Differentiated) -> None:
        self._known, self._opaques, self._differentiated = known, opaques, differentiated
        self.module_outputs: Callable[[Tensor], str | None] = lambda tensor: None
        self.is_parameter: Callable[[Tensor], str | None] = lambda tensor: None
        self.opaque: dict[int, Opaque] = {}
        self.forward: dict[int, int] = {}
        self.before = Before()

    def number(self, tensor: Tensor, was: tuple[int, int] | None = None) -> Value:
        """Number a tensor that comes from outside. was: see `Values.leaf`."""
        node, base = node_of(tensor), base_of(tensor)
        # A view that was made under no_grad says that it wants a gradient, and gets none.
        wanted = tensor.requires_grad if was is None else was[0] != PLAIN
        diff = wanted and not (node is None and base is not None and base.requires_grad)
        call = self._opaques.take(tensor)
        opaque = "" if call is None else call.op
        module = "" if opaque else (self.module_outputs(tensor) or "")
        parameter = "" if opaque or module else (self.is_parameter(tensor) or "")
        derived = None if opaque or module or parameter else self._differentiated.of(tensor)
        if opaque.startswith(tuple(UNWRITTEN_FACTORIES)):
            kind, made_by = "data", "empty"
        elif derived is not None:
            kind, made_by = "opaque", "backward"
        elif not (module or parameter) and (lost := self._opaques.lost(tensor)):
            kind, made_by = "cut", lost
        elif opaque:
            kind, made_by = "opaque", opaque
        elif module:
            kind, made_by = "module", module
        elif parameter:
            kind, made_by = "parameter", parameter
        elif diff and node is not None:
            kind, made_by = "opaque", type(node).__name__.removesuffix("Backward")
        else:
            kind, made_by = "data", ""
        inner = self._known.by_key.get(key_of(tensor, PLAIN)) if kind == "opaque" and diff else None
        value = self._known.leaf(tensor, was)
        value.leaf = Leaf(value.id, parameter or None, kind, diff, made_by)
        if self.before.writes_to(tensor):
            self._known.release(value, guarded=True)
            content = self.before.content(tensor, value.version)
            if content is not None:
                self._known.keep_copy(value, lambda: content)
        if made_by == "empty" and call is not None:
            value.place = call.place
        if derived is not None:
            self._differentiated.read[value.id] = derived
        if call is not None and (call.read or call.exchange):
            self.opaque[value.id] = call
        if inner is not None and inner in self._known.made_by:
            self.forward[value.id] = inner
        return value

    def sweep(self) -> None:
        """Forget what belongs to leaves that are not known any more."""
        self.opaque = {i: call for i, call in self.opaque.items() if i in self._known.by_id}
        self.forward = {i: made for i, made in self.forward.items() if i in self._known.by_id}
