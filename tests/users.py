"""Acting as another user of the machine: tests run as root, and a child of theirs becomes somebody else."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

SOMEBODY, STRANGER = 12345, 12346
"""Users without a name."""

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def as_user(uid: int, function: Callable[[], Any]) -> Any:
    """Call ``function`` in a process of user ``uid``; return what it returns, or raise an AssertionError for what it
    raised."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with os.fdopen(write_end, "wb") as pipe:
                pickle.dump(function(), pipe)
            code = 0
        except BaseException:  # the parent tells of it
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "see the traceback of the child"
    return pickle.loads(data)
