"""What a process that belongs to a watched run does at the end of its `import torch`: it begins to watch itself.

`nanscope run` puts this folder last on PYTHONPATH. torch asks every installed package for the entry points "torch.backends" when it is
imported, and calls them; the folder beside this file declares one. So nothing is written into anybody's site-packages, no sitecustomize is
shadowed, whatever starts the process (a shell, a launcher, exec) hands it on, another environment's Python finds it as well, and a
process without torch does not even notice.
"""

import os


def begin() -> None:
    """Begin to watch. Never raises: torch would not let itself be imported."""
    if "NANSCOPE_MEMBER" not in os.environ:
        return
    try:
        from nanscope.watching.member import begin as watch

        watch()
    except Exception as error:  # noqa: BLE001 - whatever it is, the process trains
        _say_unwatched(error)


def _say_unwatched(error: Exception) -> None:
    """Leave word in the run's folder that this process is not watched, for whoever tells the verdict."""
    import json
    import sys
    from pathlib import Path

    try:
        folder = json.loads(os.environ["NANSCOPE_MEMBER"])["path"]
        Path(folder, f"unwatched.{os.getpid()}").write_text(f"{sys.executable}: {error}", encoding="utf-8")
    except Exception:  # noqa: BLE001 - there is nobody to tell
        pass
