"""The one way in which our commands read their command lines."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, and ends with status 2."""

    def format_help(self) -> str:
        """Return the help, where a module's docstring serves as one, without its marks of code."""
        return super().format_help().replace("``", "")

    def error(self, message: str) -> NoReturn:
        """End."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
