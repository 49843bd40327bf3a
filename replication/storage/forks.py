"""What a child of ``fork`` shares with its parent, and must not have: the claim of a file, and sessions of a server.

Such a child may outlive a parent that was killed, as a pool of workers does.  The claim would then stay, and no new
process could start.  A child that ends would end what its parent still uses.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def detach(descriptors: Iterable[int]) -> None:
    """Let these descriptors of a child lead nowhere.  They stay open, because their owners may close them later."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in descriptors:
        os.dup2(nothing, each, inheritable=False)
    os.close(nothing)
