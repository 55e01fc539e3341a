"""The root of every error that this package raises on purpose."""

from __future__ import annotations


class MonarchSlurmError(Exception):
    """Something went wrong that the user can act on: the text says what happened, where, and what to do.

    The command line prints the text and ends with a non-zero status; it never shows a traceback for it.
    """


class ConfigError(MonarchSlurmError, ValueError):
    """A setting has a value that cannot be used."""
