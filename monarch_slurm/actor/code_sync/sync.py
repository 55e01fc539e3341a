"""The program's end: compare, send what hosts lack, have them put it in place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_slurm.actor.code_sync.receiver import Receiver
from monarch_slurm.actor.code_sync.reloading import Reloader, map_paths
from monarch_slurm.actor.code_sync.tree import Manifest, WorkspaceError, scan
from monarch_slurm.actor.code_sync.workspace import ENVIRONMENT_EXCLUDE, WORKSPACE_VARIABLE, Workspace
from monarch_slurm.actor.context import context
from monarch_slurm.actor.errors import ActorError
from monarch_slurm.actor.ndslice import Slice
from monarch_slurm.actor.proc_mesh import ProcMesh
from monarch_slurm.actor.shape import Point, Shape

if TYPE_CHECKING:
    from monarch_slurm.actor.host_mesh import HostMesh

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
BATCH_BYTES = 8 * 2**20
"""What is on the way to each host at a time."""

_digests: dict[str, tuple[Any, str]] = {}


@dataclass(frozen=True)
class SyncResult:
    """What a synchronization has done, summed over hosts.

    Attributes:
        copied: files and links that were made or changed.
        bytes: that were sent.
        deleted: files and links that are gone.
        reloaded: names of modules that were loaded again somewhere.
    """

    copied: int = 0
    bytes: int = 0
    deleted: int = 0
    reloaded: tuple[str, ...] = ()


@dataclass
class Copies:
    """Where one host has its workspace, and the copies of the program's folders: pairs of paths there and here."""

    workspace: str
    folders: list[tuple[str, str]] = field(default_factory=list)

    def spawn_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return what is to be another in the request for procs on this host, so that they use the copies."""
        (cwd,) = map_paths([fields["cwd"]], self.folders) if fields["cwd"] else ("",)
        env = {WORKSPACE_VARIABLE: self.workspace, **fields["env"]}
        return {"cwd": cwd, "sys_path": map_paths(fields["sys_path"], self.folders), "env": env}


async def sync_workspace(
    hosts: HostMesh, workspace: Workspace, conda: bool, auto_reload: bool
) -> tuple[SyncResult, dict[str, Copies]]:
    """Copy folders, and the environment if ``conda``, to all of ``hosts``; return what was done, and where each host
    (by id) has its copies of the folders.

    Raises:
        WorkspaceError: a folder cannot be read here or written there, or a module cannot be loaded again.
        SupervisionError: a host was lost.
    """
    folders = [(folder, place, tuple(workspace.exclude)) for folder, place in workspace.folders().items()]
    if conda:
        if workspace.env is None:
            raise WorkspaceError("this workspace has no conda environment to copy")
        folders.append((workspace.env.folder(), "", ENVIRONMENT_EXCLUDE))
    ids = [hosts._hosts[rank] for rank in hosts._shape.ndslice]
    copies = {host: Copies("") for host in ids}
    changed: dict[str, set[str]] = {host: set() for host in ids}
    copied = sent = deleted = 0
    if not folders:
        return SyncResult(), {}
    procs = hosts.spawn_procs(name="sync")
    try:
        receivers: Any = procs.spawn("sync", Receiver)
        for folder, place, exclude in folders:
            manifest, outside = await asyncio.to_thread(scan, folder, exclude, _digests)
            if outside:
                logger.warning("%s: links that lead out of it are not copied: %s", folder, ", ".join(outside[:10]))
            if place:
                begun = (await receivers.begin.call(place, manifest)).values()
            else:
                begun = (await receivers.begin_environment.call(str(folder), manifest)).values()
            sent += await _send(receivers, folder, manifest, [missing for *_, missing in begun])
            finished = (await receivers.finish.call()).values()
            for host, (root, path, _), (new, gone) in zip(ids, begun, finished, strict=True):
                if place:
                    copies[host].workspace = root
                    copies[host].folders.append((str(folder), path))
                changed[host].update(f"{where}/{name}" for name in new for where in (path, folder))
                copied += len(new)
                deleted += len(gone)
    except ActorError as error:
        raise _first(error) from None
    finally:
        await procs.stop()
    reloaded = await _reload(copies, changed) if auto_reload else ()
    return SyncResult(copied, sent, deleted, reloaded), {host: copy for host, copy in copies.items() if copy.workspace}


def _first(error: ActorError) -> Exception:
    return error.exception if isinstance(error.exception, WorkspaceError) else error


async def _send(receivers: Any, folder: Path, manifest: Manifest, missing: Sequence[list[str]]) -> int:
    """Send to each host what it lacks: the same to all at once, if that is so."""
    if all(paths == missing[0] for paths in missing):
        targets = [(receivers, missing[0], len(missing))]
    else:
        extent = receivers.extent
        points = [dict(Point(rank, extent)) for rank in range(len(missing))]
        targets = [(receivers.slice(**point), paths, 1) for point, paths in zip(points, missing, strict=True)]
    sent = 0
    for target, paths, count in targets:
        for batch in _batches(folder, paths):
            await target.write.call(batch)
            sent += count * sum(len(data) for *_, data in batch)
    return sent


def _batches(folder: Path, paths: Sequence[str]) -> Iterator[list[tuple[str, int, bytes]]]:
    batch: list[tuple[str, int, bytes]] = []
    size = 0
    for path in paths:
        for offset, data in _pieces(folder / path):
            batch.append((path, offset, data))
            size += len(data)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            offset = 0
            while (data := file.read(PIECE_BYTES)) or not offset:
                yield offset, data
                if not data:
                    return
                offset += len(data)
    except OSError as error:
        raise WorkspaceError(f"cannot copy {path}: {error.strerror}") from None


async def _reload(copies: dict[str, Copies], changed: dict[str, set[str]]) -> tuple[str, ...]:
    """Have the procs that the calling actor owns on these hosts load changed modules again."""
    instance = context().actor_instance
    reloaders: list[Any] = []
    answers = []
    for procs in instance.runtime.owned.of(instance)[0]:
        for host in set(procs.layout.hosts) & set(copies):
            for rank in sorted(procs.layout.ranks_on(host) & procs.alive):
                proc = ProcMesh._reference(procs.layout, Shape((), Slice(offset=rank, sizes=(), strides=())))
                reloaders.append(proc.spawn("reload", Reloader))
                answers.append(reloaders[-1].reload.call_one(changed[host], copies[host].folders))
    names: set[str] = set()
    try:
        for answer in answers:
            names.update(await answer)
    except ActorError as error:
        raise _first(error) from None
    finally:
        for reloader in reloaders:
            await reloader.stop()
    return tuple(sorted(names))
