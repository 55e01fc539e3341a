"""The orderly end of a proc that was forked from a zygote: as Python ends, less what belongs to the zygote.

Python waits for threads that are no daemons, calls what is registered with `atexit`, stops all other threads, and
clears the globals of modules, so that ``__del__`` of objects in them runs. A proc does the same, with differences:

- Finalizers (`weakref.finalize`) of objects that the zygote made do not run: a proc would remove a folder of others.
- Installed modules that the zygote imported keep their globals, since clearing those of torch takes 0.3 s.
- The process ends before destructors of C++ libraries run: those of GPU libraries may crash in a forked process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import sysconfig
import threading
import weakref
from types import ModuleType
from typing import NoReturn

_OWN = __name__.partition(".")[0]
_modules: list[ModuleType] = []
"""Modules of the zygote. Python is to find them alive when it ends, and then clears the globals of those that it finds
in `sys.modules`: frozen as they are (`gc.freeze`), it would not collect them."""
_kept: set[int] = set()
"""Identities of those that keep their globals."""


def prepare_forks() -> None:
    """Note what processes that are forked from now on leave alone when they end. In the zygote."""
    registry: dict[weakref.finalize, object] = getattr(weakref.finalize, "_registry", {})  # type: ignore[type-arg]
    for finalizer in list(registry):
        finalizer.atexit = False
    _modules[:] = sys.modules.values()
    _kept.update(id(module) for name, module in sys.modules.items() if _is_installed(name, module))


def end_in_order(code: int) -> NoReturn:
    """End this forked process with ``code``; for the end of its main thread's work. Raises SystemExit to do so.

    Whoever wants the process to end within a time has to kill it after that.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_modules))
    for name in [name for name, module in sys.modules.items() if id(module) in _kept]:
        del sys.modules[name]
    vars(sys)["_monarch_slurm_end"] = _End(code)
    sys.exit(code)


class _End:
    """Ends the process when it is destroyed. Python clears the module `sys` after all modules but one."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._streams = sys.stdout, sys.stderr
        self._flush_c = ctypes.CDLL(None).fflush
        self._leave = os._exit
        self._errors = OSError, ValueError

    def __del__(self) -> None:
        for stream in self._streams:
            try:
                stream.flush()
            except self._errors:
                continue
        self._flush_c(None)
        self._leave(self._code)


def _is_installed(name: str, module: ModuleType) -> bool:
    """Return whether a module is of Python or of a package beside it, and neither this one nor the user's own."""
    if name.partition(".")[0] in (_OWN, "__main__") or name in ("sys", "builtins"):
        return False
    file = getattr(module, "__file__", None)
    return file is None or file.startswith(_INSTALLED)


_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
