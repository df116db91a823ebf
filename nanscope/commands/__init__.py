"""The verbs of the command line: each reads its arguments, asks one room of the house, and leaves with one exit status."""

import sys

try:
    import rich  # noqa: F401 - each verb shows its result with it: it is missed now, and not after a night of training
    import typer  # noqa: F401 - and each file of this room needs it
except ModuleNotFoundError:
    sys.exit("nanscope: the command line needs typer and rich: pip install typer rich")
