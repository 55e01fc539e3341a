"""Reading what other machines append to a file."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Protocol

from monarch_slurm.job.errors import JobFolderError

CHUNK = 1 << 16


class Sink(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> object:
        """Take ``text``."""

    def flush(self) -> object:
        """Hand on what was taken."""


class LogReader:
    """Reads what is new in a file that another machine appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self, out: Sink) -> bool:
        """Write what is new to ``out``; return whether there was anything."""
        grown = False
        try:
            with open(self._path, "rb") as file:  # opened anew: NFS looks for new data when a file is opened
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    out.write(self._decoder.decode(chunk))
                    grown = True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise JobFolderError(f"cannot read {self._path}: {error.strerror}") from None
        if grown:
            out.flush()
        return grown
