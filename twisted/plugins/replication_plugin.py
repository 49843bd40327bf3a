"""Adds the command ``replication`` to twistd.  There must be no ``__init__.py`` beside this file."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, cast

from twisted.application.service import ServiceMaker

if TYPE_CHECKING:
    from twisted.python.usage import Options


class _ServiceMaker(ServiceMaker):
    """Imports the module without garbage collection, which would find nothing.

    Later collections skip what is loaded.
    """

    @property
    def options(self) -> type[Options]:
        """Return the options, which the module has."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return cast("type[Options]", super().options)
        finally:
            gc.freeze()  # or the first collection would inspect all that is loaded
            if was_enabled:
                gc.enable()


replication = _ServiceMaker(
    "replication",
    "replication.service",
    "Replicate streams of facts: run a master, which writes, or a worker, which follows.",
    "replication",
)
