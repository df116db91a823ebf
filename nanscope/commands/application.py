"""The application that every verb belongs to: its help on one screen, in groups, as narrow as the terminal is; and how a verb leaves.

Watch a run:
  run      Run a training script and watch it, with all it starts.
  ...
Ask a step:
  replay   Run a saved step again: what would have prevented it?
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from nanscope.report.exit import FAILED, FOUND, HEALTHY, STATUSES
from nanscope.text import meant

if TYPE_CHECKING:
    from nanscope.verdict.incident import Verdict


RUNS = "nanscope-runs"  # a path, or an address: Path would take s3://bucket apart

Does = TypeVar("Does", bound=Callable[..., Any])

WATCH, ASK, LEARN = "Watch a run", "Ask a step", "Learn"  # the groups of verbs, in the order of the help
NARROW = 60  # characters: in a narrower terminal what an option does stands under its name


class Verb(TyperCommand):
    """A verb, whose help folds in a narrow terminal, and which knows what a mistyped option was to be."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read its options. Raises what click raises for one that there is not."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "possibilities", None) is not None:
                name = getattr(error, "option_name", "")
                error.possibilities = None  # type: ignore[attr-defined] # as click lists them
                error.message = no_option(ctx, name)  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write its arguments and options."""
        if formatter.width >= NARROW:
            super().format_options(ctx, formatter)
            return
        for kind in ("argument", "option"):
            records = [param.get_help_record(ctx) for param in self.get_params(ctx) if param.param_type_name == kind]
            if any(records):
                with formatter.section(f"{kind.capitalize()}s"):
                    _write(formatter, [record for record in records if record])


class Verbs(TyperGroup):
    """All of them, in groups."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that is meant. Raises click's usage error, with the one that was perhaps meant, if there is none."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            shown = [name for name, verb in self.commands.items() if not verb.hidden]
            ctx.fail(f"there is no verb {args[0]!r}{meant(args[0], shown)}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs, a line each, and then the options that have no verb."""
        shown = [(name, verb) for name, verb in self.commands.items() if not verb.hidden]
        widest = max(len(name) for name, _ in shown)
        formatter.write_paragraph()
        for group in (WATCH, ASK, LEARN):
            formatter.write(f"{group}:\n")
            rows = [(f"{name:{widest}}", _first_line(verb)) for name, verb in shown if getattr(verb, "rich_help_panel", None) == group]
            with formatter.indentation():
                _write(formatter, rows) if formatter.width < NARROW else formatter.write_dl(rows)
        options = ", ".join(param.opts[-1] for param in self.get_params(ctx) if param.opts[-1] != "--show-completion")
        formatter.write_text(f"{options}; VERB --help tells more")


def no_option(ctx: Any, name: str) -> str:
    """Return that a verb has no such option, and which was perhaps meant."""
    return f"there is no option {name}{meant(name, [option for param in ctx.command.params for option in param.opts])}"


def _first_line(verb: Any) -> str:
    return (verb.help or "").strip().splitlines()[0].removesuffix(".")


def _write(formatter: Any, rows: list[tuple[str, str]]) -> None:
    """Write what something does under its name."""
    for name, words in rows:
        formatter.write_text(name.strip())
        with formatter.indentation():
            formatter.write_text(words)


class Application(typer.Typer):
    """A command line whose verbs are of our kind."""

    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = Verb, **how: Any) -> Callable[[Does], Does]:
        """Add a verb, and return what does it as it is."""
        return super().command(name, cls=cls, **how)


app = Application(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the first harmful NaN of a training run, replay its step, prove the fix. "
    "Start with `nanscope demo`, then put `nanscope run` before your own script.",
)


def is_verb(name: str) -> bool:
    """Does the command line have a verb of this name?"""
    return any((known.name or getattr(known.callback, "__name__", "")) == name for known in app.registered_commands)


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


def leave(found: bool, whole: bool = True) -> NoReturn:
    """End a verb that looked for something. whole: every file that was asked for is there."""
    raise typer.Exit(FAILED if not whole else FOUND if found else HEALTHY)


def leave_with(verdict: Verdict) -> NoReturn:
    """End a verb that shows a verdict."""
    raise typer.Exit(STATUSES[verdict.status.tone])
