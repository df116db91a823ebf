"""The application that every verb belongs to, and how a verb leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from nanscope.report.exit import FOUND, HEALTHY, STATUSES

if TYPE_CHECKING:
    from nanscope.verdict.incident import Verdict

RUNS = "nanscope-runs"  # a path, or an address: Path would take s3://bucket apart

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the first harmful NaN of a training run, replay its step, prove the fix.\n\n"
    "Start with `nanscope demo`, then put `nanscope run` before your own script.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from nanscope.version import __version__

        print(f"nanscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


def leave(found: bool) -> NoReturn:
    """End a verb that looked for something."""
    raise typer.Exit(FOUND if found else HEALTHY)


def leave_with(verdict: Verdict) -> NoReturn:
    """End a verb that shows a verdict."""
    raise typer.Exit(STATUSES[verdict.status.tone])
