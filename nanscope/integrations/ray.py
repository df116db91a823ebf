"""Ray: its workers take part in the run of the driver, on whatever machine they are.

    ray.init(runtime_env=nanscope.ray())                           # in the driver's code
    nanscope run --ray -- python -m verl.trainer.main_ppo …        # without a change of it

Ray starts its workers from a daemon on each machine, which may have been there before the driver: what the driver's environment says does
not reach them. `runtime_env` does, and with it a function that each worker calls before it does anything. A worker in which nothing
trains leaves no file; one that cannot write where the run is says so on its log, which Ray shows on the driver's.

Notable: Ray ends its workers without a word, so that none of them ends its book. What its last line says was seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from nanscope.errors import NanscopeError
from nanscope.given import a_path, an
from nanscope.integrations.ray_worker import ALSO, INVITED, begin
from nanscope.snapshot.runs import DEEP_EVERY, MAX_BYTES
from nanscope.watching.acting import MAX_REPAIRS, OnNonFinite
from nanscope.watching.invitation import Invitation

BEGIN = "nanscope.integrations.ray_worker.begin"
INTO = f"{__name__}.into"

HOOK = "worker_process_setup_hook"  # of runtime_env: called in each worker, by name or as a function
ENV_HOOK = "RAY_RUNTIME_ENV_HOOK"  # names a function that each `ray.init` passes its runtime_env through
ALSO_INTO = "NANSCOPE_RAY_ALSO_INTO"  # who was to be called there, and is called as well


def ray(
    runtime_env: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] = "nanscope-runs",
    on_nonfinite: OnNonFinite = "record",
    save_steps: Sequence[int] = (),
    max_bytes: int = MAX_BYTES,
    deep_every: int = DEEP_EVERY,
    max_repairs: int = MAX_REPAIRS,
    check: bool = False,
) -> dict[str, Any]:
    """Return the `runtime_env` with which Ray's workers take part in a run: `ray.init(runtime_env=nanscope.ray())`.

    Under `nanscope run` it is that run. Otherwise one begins here, which ends with the driver, and whose verdict is then told on the log.

    runtime_env: what else it is to hold; a setup hook of its own is called as well.
    The others as in `nanscope.watch`; nodes that share no disk need an `out` that all of them reach, as in "s3://bucket/runs".
    Raises NanscopeError for an argument that is not one of these, and if nothing can be written to `out`.
    """
    if runtime_env is not None:
        an("runtime_env", runtime_env, Mapping, "a mapping, or None")
    a_path("out", out, "the path or address of a folder")
    invitation = Invitation.of(os.environ)
    if invitation is None:
        from nanscope.watching.launch import lead

        invitation = lead(
            out=out,
            on_nonfinite=on_nonfinite,
            save_steps=save_steps,
            max_bytes=max_bytes,
            deep_every=deep_every,
            max_repairs=max_repairs,
            check=check,
        )
    return _joined(runtime_env, invitation)


def into(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the runtime_env of a `ray.init` that knows nothing of us, with what it takes to take part; Ray calls this by its name."""
    also = os.environ.get(ALSO_INTO)
    found = _named(also)(runtime_env) if also else runtime_env
    invitation = Invitation.of(os.environ)
    return dict(found or {}) if invitation is None else _joined(found, invitation)


@contextmanager
def by_environment() -> Iterator[None]:
    """While it lasts, every `ray.init` of this process, and of those that it starts, passes through `into`."""
    before = os.environ.get(ENV_HOOK)
    if before not in (None, INTO):
        os.environ[ALSO_INTO] = str(before)
    os.environ[ENV_HOOK] = INTO
    try:
        yield
    finally:
        os.environ.pop(ENV_HOOK)
        if os.environ.pop(ALSO_INTO, None) is not None:
            os.environ[ENV_HOOK] = str(before)


def _joined(runtime_env: Mapping[str, Any] | None, invitation: Invitation) -> dict[str, Any]:
    found = dict(runtime_env or {})
    variables = {**(found.get("env_vars") or {}), INVITED: invitation.to_text()}
    theirs = found.get(HOOK)
    if callable(theirs):
        found[HOOK] = _both(theirs)
    elif theirs != BEGIN:
        found[HOOK] = BEGIN
        if theirs:
            variables[ALSO] = theirs
    found["env_vars"] = variables
    return found


def _both(theirs: Callable[[], object]) -> Callable[[], None]:
    def begin_both() -> None:  # carried to the workers as it is
        begin()
        theirs()

    return begin_both


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NanscopeError(f"Ray was to call {path}, and it cannot be imported: {error}", slug="no-module") from None
    return found
