"""The command line, put together: the verbs of `nanscope.commands` are run, and what went wrong is said in one line.

Notable: each verb imports what it needs when it runs, so that `--help` and `inspect` answer without torch, and a package that is missing
is one line that says what to install.
"""

from __future__ import annotations

import shutil
import sys

from nanscope.commands import ask_a_step, learn, watch_a_run  # noqa: F401 - they add their verbs to the application
from nanscope.commands.application import app
from nanscope.report.exit import settled, status_of
from nanscope.report.streams import legible, silence

WIDEST = 80  # characters of a line of help


def main() -> None:
    """Run the command line."""
    with legible() as given:
        status = settled(
            status_of(lambda: app(prog_name="nanscope", obj=given, terminal_width=min(WIDEST, shutil.get_terminal_size().columns)))
        )
        silence()
    silence()
    sys.exit(status)


if __name__ == "__main__":
    main()
