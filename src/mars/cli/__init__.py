"""The command ``mars``: read arguments, call the package, print what came out."""

from mars.cli.app import main

__all__ = ["main"]
