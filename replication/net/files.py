"""Files that a configuration names: a pipe or a device there could be waited for without an end.  No Twisted."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Final

_OWN: Final = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # what this process was given, as by the shell's <(…)


def refuse_pipes(*files: str | None) -> None:
    """Raise OSError for a pipe or a device; a descriptor of this process passes.  A missing file is left to the reader.

    None stands for a file that is not given.
    """
    for each in files:
        if each is None or each.startswith(_OWN) or not Path(each).exists():
            continue
        mode = Path(each).stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # for a directory, the reader has a better error
            raise OSError(errno.EINVAL, "it is a pipe or a device: name a regular file", each)
