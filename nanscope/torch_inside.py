"""What nanscope takes from inside torch: each of torch's private names stands in this file, and in no other.

    from nanscope.torch_inside import base_of, push_mode        as torch has it
    LACKS                                                       what this release has no more, and what comes of it

A release of torch may rename any of them. Without those that are *needed* nothing can be recorded, and nanscope says so in one line where
its part that uses torch is imported, as it does on a torch that is too old. For the others there is a *stand-in*: they are on the list of
what is lacking, and a run that is watched says what comes of it. What differs from one release to the next stands here, too.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from nanscope.errors import NanscopeError

Thing = TypeVar("Thing")
Register = dict[int, Any]  # hooks, or flags of hooks, by the id of their handle

OLDEST = (2, 9)


def release_of(version: str) -> tuple[int, int]:
    """2.9.1+cu128 → (2, 9)"""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def refuse_too_old(version: str) -> None:
    """Raise NanscopeError for a release of torch that nanscope does not know its way about in."""
    if release_of(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NanscopeError(f"nanscope needs torch {oldest} or newer, and this is torch {version}: upgrade torch", slug="torch-too-old")


refuse_too_old(torch.__version__)

# Before torch 2.10 a mode on the stack is a part of what compiled code depends on: with one it is compiled anew at every call.
COMPILED_CODE_SEES_MODES = release_of(torch.__version__) < (2, 10)
# Before torch 2.10 a mode is shown `detach` twice: that of the tensor, and that of the result, which counts its writes by itself.
DETACH_IS_SEEN_TWICE = release_of(torch.__version__) < (2, 10)

# Since torch 2.10 whatever holds a tensor inside of torch, a graph say, is one reference to Python.
HOLDING_COUNTS = release_of(torch.__version__) >= (2, 10)

# Before torch 2.10 every division of the least integer by -1 stops the process, since then that alone which is truncated.
EVERY_DIVISION_STOPS = release_of(torch.__version__) < (2, 10)


class Lack(NamedTuple):
    """A name that this release of torch lacks, and what comes of it."""

    name: str
    so: str


LACKS: list[Lack] = []


def look_up(name: str) -> Any:
    """Return what a dotted name stands for. Raises AttributeError or ImportError."""
    return pkgutil.resolve_name(name)


def needed(name: str) -> Any:
    """Return what nothing can be recorded without. Raises NanscopeError where torch has no such thing."""
    try:
        return look_up(name)
    except (AttributeError, ImportError):
        raise NanscopeError(
            f"torch {torch.__version__} has no {name}, which nanscope cannot do without: look for a newer nanscope", slug="torch-unknown"
        ) from None


def spared(name: str, stand_in: Thing, so: str) -> Thing:
    """Return what is of use, or a stand-in: then it is on the list of what is lacking. so: what comes of it, in words."""
    try:
        found: Thing = look_up(name)
    except (AttributeError, ImportError):
        LACKS.extend({Lack(name, so)}.difference(LACKS))
        return stand_in
    return found


def _attribute(of: str, name: str) -> Callable[[Any], Any]:
    needed(f"{of}.{name}")
    return attrgetter(name)


# -- the stack of dispatch modes ------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = needed("torch.utils._python_dispatch.TorchDispatchMode")

push_mode: Callable[[TorchDispatchMode], None] = needed("torch.utils._python_dispatch._push_mode")
pop_mode: Callable[[], TorchDispatchMode] = needed("torch.utils._python_dispatch._pop_mode")
top_mode: Callable[[], TorchDispatchMode | None] = needed("torch.utils._python_dispatch._get_current_dispatch_mode")
modes: Callable[[], list[TorchDispatchMode]] = needed("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
without_modes: Callable[[], AbstractContextManager[Any]] = needed("torch.utils._python_dispatch._disable_current_modes")
count_modes: Callable[[], int] = needed("torch._C._len_torch_dispatch_stack")
infra_mode: Callable[[Any], object] = needed("torch._C._get_dispatch_mode")
INFRA_KEYS: tuple[Any, ...] = tuple(needed("torch._C._TorchDispatchModeKey").__members__.values())
wraps_others: Callable[[object], bool] = needed("torch.utils._python_dispatch.is_traceable_wrapper_subclass")

# -- tensors, operators, and the memory behind them -----------------------------------------------------------------------------------

base_of: Callable[[Tensor], Tensor | None] = _attribute("torch.Tensor", "_base")
writes_counted: Callable[[Tensor], int] = _attribute("torch.Tensor", "_version")
uses: Callable[[Tensor], int] = spared(
    "torch.Tensor._use_count", lambda tensor: 2, "a loop without a backward pass may hold memory for longer"
)
_storage_uses: Callable[[int], int] = spared("torch._C._storage_Use_Count", lambda handle: 3, "a recorded call takes longer")
nonzeros: Callable[[Tensor], int] = needed("torch.Tensor._nnz")
_make_subclass: Callable[[type, Tensor, bool], Any] = needed("torch.Tensor._make_subclass")
norms_of: Callable[[list[Tensor], float], list[Tensor]] = needed("torch._foreach_norm")
schema_of: Callable[[Any], Any] = _attribute("torch.ops.aten.add.Tensor", "_schema")
overload_name: Callable[[Any], str] = _attribute("torch.ops.aten.add.Tensor", "_overloadname")
has_kernel: Callable[[str], bool] = needed("torch._C._dispatch_has_kernel")
has_kernel_for: Callable[[str, str], bool] = needed("torch._C._dispatch_has_kernel_for_dispatch_key")
COUNTER: Any = needed("torch._C.DispatchKey").ADInplaceOrView  # the kernels that count writes, and the key for switching them off
GRADIENTS: Any = needed("torch._C.DispatchKey").AutogradFunctionality  # the kernels that record a gradient's way
CAST_KERNELS = ("AutocastCPU", "AutocastCUDA")  # where autocast's choice of an operator's dtype is registered
CASTS: tuple[Any, ...] = tuple(getattr(needed("torch._C.DispatchKey"), name) for name in CAST_KERNELS)
GRADIENT_KERNELS = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradOther")  # where an operator's own derivative is registered
is_excluded: Callable[[Any], bool] = needed("torch._C._dispatch_tls_is_dispatch_key_excluded")
as_before_modes: Callable[[], AbstractContextManager[Any]] = needed("torch._C._RestorePythonTLSSnapshot")  # no call is to be made in it
set_excluded: Callable[[Any, bool], AbstractContextManager[Any]] = needed("torch._C._SetExcludeDispatchKeyGuard")
OPERATORS: tuple[type, ...] = tuple(map(needed, ("torch._ops.OpOverload", "torch._ops.OpOverloadPacket", "torch._ops._OpNamespace")))

weak_tensor: Callable[[Tensor], Any] = needed("torch._C._WeakTensorRef")
storage_handle: Callable[[torch.UntypedStorage], int] = needed("torch.UntypedStorage._weak_ref")
storage_gone: Callable[[int], bool] = needed("torch.UntypedStorage._expired")
drop_storage_handle: Callable[[int], None] = needed("torch.UntypedStorage._free_weak_ref")

FAKE_TENSORS = "torch._subclasses"  # where the classes of tensors without content live
# A class of its own dispatch → the attribute that is the tensor inside, had without a word to another rank. Others cannot be read.
INSIDE = {
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "elem",
    "torch.nested._internal.nested_tensor.NestedTensor": "_values",
}


def same_memory(kind: type[Thing], tensor: Tensor, requires_grad: bool) -> Thing:
    """Return a tensor of a class, in the memory of another one, without its history, its gradient and its hooks."""
    made: Thing = _make_subclass(kind, tensor, requires_grad)
    return made


def has_schema(func: object) -> bool:
    """Is it an operator, and not one that takes functions?"""
    return hasattr(func, "_schema")


# -- autograd -------------------------------------------------------------------------------------------------------------------------

_ASIDE = "profilers, modes and hooks of others may see calls that nanscope makes"

running_backward: Callable[[], int] = spared(
    "torch._C._current_graph_task_id", lambda: -1, "calls of a backward pass may be taken for those of a loss"
)
sequence_number: Callable[[], int] = spared(
    "torch._C._autograd._get_sequence_nr", lambda: 0, "the part of a module in which a gradient became non-finite is not named"
)
count_function_modes: Callable[[], int] = spared("torch._C._len_torch_function_stack", lambda: 0, _ASIDE)
without_functions: Callable[[], AbstractContextManager[Any]] = spared("torch._C.DisableTorchFunction", nullcontext, _ASIDE)
is_profiled: Callable[[], bool] = spared("torch._C._autograd._profiler_enabled", lambda: False, _ASIDE)
record_functions: Callable[[bool], None] = spared("torch._C._autograd._enable_record_function", lambda on: None, _ASIDE)
saved_hooks: Callable[[bool], object | None] = spared("torch._C._autograd._top_saved_tensors_default_hooks", lambda ignored: None, _ASIDE)
push_saved_hooks: Callable[[Any, Any], None] = spared(
    "torch._C._autograd._push_saved_tensors_default_hooks", lambda pack, unpack: None, _ASIDE
)
pop_saved_hooks: Callable[[], None] = spared("torch._C._autograd._pop_saved_tensors_default_hooks", lambda: None, _ASIDE)
saved_hooks_refused: Callable[[], str | None] = spared(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", lambda: None, _ASIDE
)
allow_saved_hooks: Callable[[], None] = spared("torch._C._autograd._saved_tensors_hooks_enable", lambda: None, _ASIDE)
refuse_saved_hooks: Callable[[str], None] = spared("torch._C._autograd._saved_tensors_hooks_disable", lambda why: None, _ASIDE)

_TRANSFORMS = "what runs in a transform (vmap, grad) or a trace may be taken for what is computed"

tracing_state: Callable[[], object | None] = spared("torch._C._get_tracing_state", lambda: None, _TRANSFORMS)
is_transformed: Callable[[], bool] = spared("torch._C._are_functorch_transforms_active", lambda: False, _TRANSFORMS)
transform: Callable[[], object | None] = spared("torch._C._functorch.peek_interpreter_stack", lambda: None, _TRANSFORMS)
_is_lifted: Callable[[Tensor], bool] = spared("torch._C._functorch.is_functorch_wrapped_tensor", lambda tensor: False, _TRANSFORMS)
_under: Callable[[Tensor], Tensor] = spared("torch._C._functorch.get_unwrapped", lambda tensor: tensor, _TRANSFORMS)


def storage_uses(tensor: Tensor) -> int:
    """Return how many hold the memory of a tensor; it and who asks are two."""
    storage = tensor.untyped_storage()  # which is one itself, and before torch 2.10 is no longer there than somebody holds it
    return _storage_uses(storage._cdata)


def references(tensor: Tensor) -> int:
    """Return what `sys.getrefcount` does where this is called; whatever holds a tensor inside of torch is one of them in every release."""
    return sys.getrefcount(tensor) - 1 + (not HOLDING_COUNTS and uses(tensor) > 1)


def lowered(tensor: Tensor) -> Tensor:
    """Return what is computed with where a transform (vmap, grad) hands over a tensor that stands for it."""
    while _is_lifted(tensor):
        tensor = _under(tensor)
    return tensor


NEVER = 1 << 63  # the gate of a parameter has a number beyond all calls


def function_of(node: object) -> Any:
    """Return the class of the custom function that an autograd node belongs to, None if it is one of torch's own nodes."""
    return getattr(node, "_forward_cls", None)


def number_of(node: Any) -> int:
    """Return when autograd noted a call, counted in calls of the thread."""
    try:
        return int(node._sequence_nr())
    except RuntimeError:  # before torch 2.13 a custom function does not tell: it came after what it was given
        given = (number_of(before) for before, _ in node.next_functions if before is not None)
        return 1 + max((number for number in given if number < NEVER), default=-1)


def is_at_hand(saved: Any) -> bool:
    """Does an autograd node hold a tensor itself, and no hook would have to fetch it or to compute it? Before torch 2.10 none tells."""
    return getattr(saved, "unpack_hook", saved) is None


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return what a scaler multiplies losses by, where it lies, None if it has not begun."""
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale


# -- ranks ----------------------------------------------------------------------------------------------------------------------------

count_collectives: Callable[[Any], int] = spared(
    "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    lambda group: 0,
    'with DDP, "skip" takes steps that it could skip',
)


def reduction_hooks(replicas: object) -> list[str] | None:
    """Return the names of what somebody has put in the place of DDP's all-reduce, None where torch does not tell."""
    hooks: list[tuple[object, object]] | None = getattr(replicas, "_comm_hooks", None)
    return None if hooks is None else [getattr(hook, "__name__", "") for hook, _ in hooks]


def is_flat(weight: Tensor) -> bool:
    """Is it the one weight that the first FSDP makes of many? Between two uses it is only this rank's part."""
    return hasattr(weight, "_is_flat_param")


def shards_of(weight: Tensor) -> Iterator[tuple[str, tuple[int, ...], int, int, int]]:
    """Yield, for the weights of which this rank holds a part in a flat one: name, shape, where that begins in the flat one's own part and
    in the weight, and how long it is."""
    tables = (getattr(weight, name, ()) for name in ("_fqns", "_shapes", "_shard_param_infos"))
    for name, shape, info in zip(*tables, strict=False):
        if info.in_shard:
            yield name, tuple(shape), info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard


tree_leaves: Callable[[Any], list[Any]] = needed("torch.utils._pytree.tree_leaves")
tree_map_only: Callable[[type, Callable[[Any], Any], Any], Any] = needed("torch.utils._pytree.tree_map_only")


def debug_mode() -> Any | None:
    """Return torch's DebugMode; None where this release has none, or one without hooks that are told what a call returned."""
    try:
        found = look_up("torch.utils._debug_mode.DebugMode")
    except (AttributeError, ImportError):
        return None
    return found if hasattr(found, "dispatch_hooks") else None


# -- modules --------------------------------------------------------------------------------------------------------------------------

pre_hooks: Register = needed("torch.nn.modules.module._global_forward_pre_hooks")
forward_hooks: Register = needed("torch.nn.modules.module._global_forward_hooks")
forward_hooks_with_kwargs: Register = needed("torch.nn.modules.module._global_forward_hooks_with_kwargs")
forward_hooks_always_called: Register = needed("torch.nn.modules.module._global_forward_hooks_always_called")
backward_pre_hooks: Register = needed("torch.nn.modules.module._global_backward_pre_hooks")
backward_hooks: Register = needed("torch.nn.modules.module._global_backward_hooks")

MODULE_CALLED: CodeType = needed("torch.nn.Module._call_impl").__code__  # of the frame in which a module runs
RUN_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of one module
OTHER_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
COMPILED_CALL = "_compiled_call_impl"  # what `module.compile()` leaves on a module


def buffer_of(module: torch.nn.Module, name: str) -> Tensor | None:
    """Return a buffer of a module's own, not of its parts; None if it has none of that name. Those of a scripted one are no dictionary."""
    return dict(module._buffers.items()).get(name)


def has_backward_hooks(thing: object) -> bool:
    """Has somebody put hooks on the gradient of a module or of a tensor?"""
    return any(getattr(thing, name, None) for name in ("_backward_hooks", "_backward_pre_hooks"))


def hooks_on_arrival(weight: Tensor) -> dict[int, Any]:
    """Return where it is registered what is called with a gradient that comes to a weight."""
    return getattr(weight, "_backward_hooks", None) or {}


def hooks_once_there(weight: Tensor) -> dict[int, Any]:
    """Return where it is registered what is called with a weight when its gradient has arrived in it."""
    return getattr(weight, "_post_accumulate_grad_hooks", None) or {}


class Ours(NamedTuple):
    """A hook that is none of the trainer's. function: it answers nothing."""

    function: Callable[..., object]

    def __call__(self, given: Tensor) -> None:
        self.function(given)


def call_first(hooks: dict[int, Any], function: Callable[..., object]) -> Callable[[], None]:
    """Have something called before all that is registered, and return what undoes that."""
    handle, others = RemovableHandle(hooks), dict(hooks)
    hooks.clear()  # torch goes through them in the order in which they were put in, whatever else an ordered dictionary is told
    hooks[handle.id] = Ours(function)
    hooks.update(others)
    return handle.remove


def gradient_hooks(weight: Tensor) -> list[Any]:
    """Return what somebody has registered to be called when the gradient of a weight is there."""
    return [*_of_others(hooks_on_arrival(weight)), *_of_others(hooks_once_there(weight))]


def _of_others(hooks: dict[int, Any]) -> list[Any]:
    return [hook for hook in hooks.values() if type(hook) is not Ours] if hooks else []


def accumulation_hooks(weight: Tensor) -> list[Any]:
    """Return what somebody has registered to be called with a weight when its gradient has arrived in it."""
    return _of_others(hooks_once_there(weight))


def take_off_backward_hooks(module: torch.nn.Module) -> None:
    """Take all hooks on gradients off a module and its parts: torch would put a function around what they compute."""
    for part in module.modules():
        for hooks in (part._backward_pre_hooks, part._backward_hooks):
            hooks.clear()


def module_hooks(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Return what somebody has registered to be called with gradients before a module is gone through backward, and after that."""
    full = getattr(module, "_is_full_backward_hook", None) is not False  # those of old are on the gradient of one call in there
    return list(module._backward_pre_hooks.values()), list(module._backward_hooks.values()) if full else []


def hooks_on(tensor: Tensor) -> list[Any]:
    """Return what somebody has registered to be called with the gradient of a tensor."""
    return _of_others(hooks_on_arrival(tensor))


def keywords_of(frame: FrameType) -> dict[str, Any]:
    """Return the keyword arguments of the module call in which torch calls a hook that it does not tell them. frame: that calls it."""
    found = frame.f_locals.get("kwargs") if frame.f_code.co_filename == torch.nn.Module.__call__.__code__.co_filename else None
    return found if isinstance(found, dict) else {}


def uncompiled(module: object) -> object | None:
    """Return the module that `torch.compile` made this one from, None if it did not."""
    return getattr(module, "_orig_mod", None) if type(module).__name__ == "OptimizedModule" else None


# -- torch.compile --------------------------------------------------------------------------------------------------------------------

COMPILED = "_torchdynamo_orig_callable"  # what torch.compile calls the function that it was given
UNTRACED = "_torchdynamo_disable"  # an attribute of functions that compiled code calls, and does not look into

_COMPILER = "torch.compile may compile more often than without nanscope"


class Callbacks(NamedTuple):
    """Functions that torch calls when it begins to compile, and when it is done."""

    begin: list[Any]
    end: list[Any]


def compiler_callbacks() -> Callbacks:
    """Return them, or lists that nobody reads. Loads the compiler."""
    handler = spared("torch._dynamo.callback.callback_handler", None, _COMPILER)
    return Callbacks(getattr(handler, "start_callbacks", []), getattr(handler, "end_callbacks", []))


def is_compiler_loaded() -> bool:
    """Has anybody compiled anything, or may have?"""
    return "torch._dynamo" in sys.modules


def compiles_backward() -> bool:
    """Is compiled autograd on? It takes every hook of a backward pass for a part of the graph."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


_SKIP: Any = spared("torch._C._dynamo.eval_frame._FrameAction.SKIP", None, _COMPILER)
_DEFAULT: Any = spared("torch._C._dynamo.eval_frame._FrameAction.DEFAULT", None, _COMPILER)
_STRATEGY: Callable[[Any, Any], Any] = spared("torch._C._dynamo.eval_frame._FrameExecStrategy", lambda own, rest: None, _COMPILER)
_set_strategy: Callable[[CodeType, Any], None] = spared(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy", lambda code, strategy: None, _COMPILER
)


def offsets_of(rows: object) -> Tensor | None:
    """Return where the rows of a jagged tensor begin in what it packs; None if they are not one after another along its first dimension."""
    plain = getattr(rows, "_ragged_idx", None) == 1 and getattr(rows, "_lengths", None) is None
    offsets: Tensor | None = getattr(rows, "_offsets", None)
    return offsets if plain else None


def leave_uncompiled(code: CodeType, nested: bool) -> None:
    """Let code run as it is where it is called from code that torch compiles. nested: and what it calls."""
    _set_strategy(code, _STRATEGY(_SKIP, _SKIP if nested else _DEFAULT))


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode of ours, which is not compiled.

    To that end torch puts functions around that of a mode, which load the compiler and switch it at every call; a mark on the code does.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return _SKIP is None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        leave_uncompiled(cls.__torch_dispatch__.__code__, nested=True)
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]


def around_compiled_code(begin: Callable[[], object], end: Callable[[], object]) -> Callable[[], None]:
    """Have functions called when compiled code is about to run in any thread, and when code runs again as it is written; both may be
    called several times in a row. Returns what undoes that. Torch has no hook for it, so that one of its functions is wrapped.
    """
    frames = needed("torch._dynamo.eval_frame")
    original: Callable[[object], object] = frames.set_eval_frame
    active = [True]

    def set_eval_frame(callback: object) -> object:
        before = original(None)  # what is called now is not compiled
        if active:
            (end if callback is None else begin)()
        if callback is not None:
            original(callback)
        return before

    def undo() -> None:
        active.clear()  # a wrapper that somebody put over ours stays, and ours then only passes calls on
        if frames.set_eval_frame is set_eval_frame:
            frames.set_eval_frame = original

    leave_uncompiled(set_eval_frame.__code__, nested=False)
    frames.set_eval_frame = set_eval_frame
    return undo


_UNOPENED = "what goes wrong in a function that is compiled gets no line"
_CALLS_COMPILED = "compile_wrapper"  # what torch puts around a function
_GIVEN = ("fn", "args", "kwargs")  # its variables


class Returned(NamedTuple):
    """What a compiled function has returned. known: before torch 2.13 that is not told."""

    known: bool
    value: Any


def around_compiled_calls(
    begin: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], object | None], end: Callable[[Any, Returned], object]
) -> Callable[[], None]:
    """Have functions called around each call of a compiled function. Returns what undoes that.

    begin: is given the function as it is written and its arguments; it answers what `end` is to be told with what is returned, or None.
    Code that is called in between is none of theirs, and neither is a call that raises. While they run nothing is compiled. As above, torch
    has no hook for it.
    """
    frames = look_up("torch._dynamo.eval_frame")
    choose: Any = spared("torch._dynamo.eval_frame._callback_from_stance", None, _UNOPENED)
    settle: Any = spared("torch._dynamo.eval_frame.set_skip_guard_eval_unsafe", None, _UNOPENED)
    if choose is None or settle is None:
        return lambda: None
    active, here = [True], threading.local()  # here.call: the frame of one that runs, and what `begin` has answered

    def _callback_from_stance(callback: object) -> object:  # the last that is called before the function
        chosen: object = choose(callback)
        if chosen is not None and active and getattr(here, "call", None) is None:
            frame = _outside(ours, sys._getframe(1))
            given: list[Any] = [frame.f_locals.get(name) for name in _GIVEN] if frame.f_code.co_name == _CALLS_COMPILED else []
            known = begin(*given) if given and all(one is not None for one in given) else None
            here.call = None if known is None else (frame, known)
        return chosen

    def set_skip_guard_eval_unsafe(unsafe: bool) -> object:  # called before that, too, and then where it has returned or raised
        call = getattr(here, "call", None)
        if call is not None and call[0] is _outside(ours, sys._getframe(1)):
            here.call = None
            variables, tells = call[0].f_locals, "result" in call[0].f_code.co_varnames
            if active and (not tells or "result" in variables):
                end(call[1], Returned(tells, variables.get("result")))
        return settle(unsafe)

    ours = {_callback_from_stance.__code__, set_skip_guard_eval_unsafe.__code__}

    def undo() -> None:
        active.clear()
        for function, original in ((_callback_from_stance, choose), (set_skip_guard_eval_unsafe, settle)):
            if getattr(frames, function.__name__) is function:
                setattr(frames, function.__name__, original)

    for function in (_callback_from_stance, set_skip_guard_eval_unsafe):
        leave_uncompiled(function.__code__, nested=False)
        setattr(frames, function.__name__, function)
    return undo


def _outside(codes: set[CodeType], frame: FrameType) -> FrameType:
    """Return the frame that calls one of ours, over those of other scopes."""
    while frame.f_code in codes and frame.f_back is not None:
        frame = frame.f_back
    return frame
