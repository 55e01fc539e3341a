"""Native modules for ``--replica-backend ccl``, built on every host before anything trains."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from monarch_slurm.actor import Actor, ActorError, HostMesh, ProcMesh, endpoint
from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.native_build import build_native, built_native

logger = logging.getLogger(__name__)

MODULES = ("_native", "_c10d")
"""What collectives between GPUs need."""

BUILD_SECONDS = 1200.0
"""Seconds that all hosts may take; a compiler takes about a minute on an idle one."""

_PROGRESS_SECONDS = 15.0


class NativeModulesError(MonarchSlurmError):
    """The native modules are not built on all hosts."""


class BuilderActor(Actor):
    """Builds on its host; on hosts that share a cache folder one builds, and the others wait for its lock."""

    @endpoint
    def missing(self) -> list[str]:
        """Return the modules that are not built for this host."""
        return [name for name in MODULES if name not in built_native()]

    @endpoint
    def build(self) -> tuple[str, float]:
        """Build what is missing; return the host's name and the seconds that it took.

        Raises:
            NativeBuildError: it cannot be built here.
        """
        began = time.monotonic()
        build_native(MODULES)
        return socket.gethostname(), time.monotonic() - began


def build_on_hosts(hosts: HostMesh) -> None:
    """Build the modules on each of ``hosts`` that lacks them, and report the progress in the log.

    Raises:
        NativeModulesError: a host cannot build them, or takes too long.
    """
    procs = hosts.spawn_procs(name="build")
    try:
        _build(procs)
    except ActorError as error:
        raise NativeModulesError(f"--replica-backend ccl: {error.exception}") from error
    finally:
        procs.stop()


def _build(procs: ProcMesh) -> None:
    builders: Any = procs.spawn("build", BuilderActor)
    lacking = [missing for _, missing in builders.missing.call().get(BUILD_SECONDS) if missing]
    if not lacking:
        return
    names = ", ".join(sorted({name for missing in lacking for name in missing}))
    logger.warning("building native modules (%s) on %d hosts, once: this takes minutes", names, len(lacking))
    began = time.monotonic()
    building = builders.build.call()
    while True:
        try:
            building.get(_PROGRESS_SECONDS)
        except TimeoutError:
            spent = time.monotonic() - began
            if spent > BUILD_SECONDS:
                raise NativeModulesError(
                    f"--replica-backend ccl: the native modules were not built within {BUILD_SECONDS:g} s; run "
                    "monarch-slurm build-native on a node and look at what it prints"
                ) from None
            logger.warning("still building native modules, for %.0f s", spent)
        else:
            break
    logger.warning("native modules are built, after %.0f s", time.monotonic() - began)
