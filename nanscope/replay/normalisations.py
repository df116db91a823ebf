"""How a normalisation is kept from dividing by 0: it adds a small number, its eps, to what it divides by."""

from __future__ import annotations

from nanscope.program.calls import overload
from nanscope.replay.patch import Patch, Variant
from nanscope.torch_inside import schema_of

EPS = ("eps", "epsilon")
USUAL = 1e-5  # of torch's own layers


def with_eps(patch: Patch) -> Variant | None:
    """Use the eps that is usual where a normalisation was given 0; None if it was not, or takes none."""
    if patch.origin.call is None:
        return None
    schema, call = schema_of(overload(patch.call.op)), patch.call
    positions = (place for place, argument in enumerate(schema.arguments) if argument.name in EPS and place < len(call.args))
    position = next(positions, None)
    if position is None or call.args[position] != 0:
        return None
    return Variant("avoid_singular_op", f"eps={USUAL:g} instead of 0", patch.with_number(position, USUAL), patch.tensors)
