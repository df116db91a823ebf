"""What an adapter is: one framework's own loss functions, called on our batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.rows import Setting
from nanscope.objective.settings import LossInputs

Call = Callable[[str, LossInputs, Mapping[str, Setting]], Tensor]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One framework.

    distribution: what pip calls it.
    load:         imports the framework's loss functions, and raises what that raises.
    call:         (loss type, batch, settings) → scalar. The loss type is the key after its dot; settings hold only what the caller said,
                  so that every default is the framework's own.
    """

    distribution: str
    load: Callable[[], object]
    call: Call


def present(tensor: Tensor | None, name: str) -> Tensor:
    """Return a tensor that the framework reads, detached. Raises NanscopeError if the batch lacks it."""
    if tensor is None:
        raise NanscopeError(f"this loss reads {name}, and the batch has none: pass LossInputs({name}=…)", slug="missing-input")
    return tensor.detach()


def old_log_probs(inputs: LossInputs) -> Tensor:
    """Return ℓ_old, or sg ℓ where the batch has none: every framework's first update after sampling."""
    return (inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs).detach()


def per_token(advantages: Tensor, like: Tensor) -> Tensor:
    """Return A as [B, T], the shape in which most frameworks store it."""
    column = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    return column.detach().expand_as(like).clone()


def per_row(advantages: Tensor) -> Tensor:
    """Return A as [B]. Raises NanscopeError for one advantage per token."""
    if advantages.dim() == 2 and advantages.shape[1] != 1:
        raise NanscopeError("this loss takes one advantage per row: pass advantages as [B]", slug="shape-mismatch")
    return advantages.detach().reshape(-1)


def only(settings: Mapping[str, Setting], names: Collection[str]) -> dict[str, Setting]:
    """Return the settings, all of which the framework knows; an unknown one that is None or False is off, and left out.

    Raises NanscopeError for any other unknown one: what `framework_loss` adds to a loss, the framework's own function does not have.
    """
    for name, value in settings.items():
        if name not in names and value not in (None, False):
            raise out_of_reach(name, "the framework has no such option")
    return {name: value for name, value in settings.items() if name in names}


def out_of_reach(setting: str, why: str) -> NanscopeError:
    """Return the error for a setting of `framework_loss` that the framework's function cannot be given here."""
    return NanscopeError(f"the framework's own loss cannot be called with {setting}: {why}", slug="no-native-loss")
