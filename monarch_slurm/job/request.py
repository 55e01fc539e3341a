"""What is asked of Slurm: nodes, of one kind or of a kind for each mesh, and what is set up before anything runs.

A `SlurmRequest` holds what a user has said, checked; `monarch_slurm.job.submission` makes a script of it.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from monarch_slurm.host.places import OnLost
from monarch_slurm.job.address import check_address, check_many
from monarch_slurm.job.checks import check_spares
from monarch_slurm.job.container import Container
from monarch_slurm.job.errors import JobSpecError
from monarch_slurm.job.slurm_options import KEYWORDS, check_srun_options, merged_options

logger = logging.getLogger(__name__)

TIME_LIMIT = re.compile(r"(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class NodeSpec:
    """Nodes of one mesh that are unlike those of other meshes: one component of a heterogeneous job.

    What is None here is as the job says.

    Attributes:
        nodes: how many.
        mem: memory per node, such as ``"200G"``.
        gres: other generic resources of each node, such as ``"nvme:1"``.
        slurm_args: further options of sbatch for these nodes.
        spares: nodes of this kind beyond those of the mesh, for the places of its hosts that are lost, do not start or
            are not fit.
    """

    nodes: int
    partition: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    constraint: str | None = None
    gres: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool | None = None
    slurm_args: tuple[str, ...] = ()
    spares: int = 0

    def __post_init__(self) -> None:
        names = {item.name for item in fields(self)}
        mine = {option: name for option, name in KEYWORDS.items() if name in names}
        kept, keywords = merged_options(self.slurm_args, mine)
        for name, value in keywords.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "slurm_args", kept)
        check_spares(self.spares)


@dataclass(frozen=True)
class SlurmRequest:
    """What is asked of Slurm, whatever the hosts are for. See `monarch_slurm.job.SlurmJob` for most of it.

    Attributes:
        nodes: how many are to be used.
        components: of a heterogeneous job, in order, together ``nodes``; empty for a job of like nodes.
        slurm_args: further options of sbatch, each as on its command line. Those that are attributes here, such as
            ``--time``, replace these attributes. See `monarch_slurm.job.slurm_options`.
        srun_args: further options of the srun that starts each host.
        setup: shell lines for the head node before the program and the agents start.
        preflight: shell commands that must succeed on each node before its agent starts.
        python: command that starts Python on the nodes.
        notice: seconds before the time limit at which the program is asked to end; None leaves it to us.
        requeue: whether the job starts again after its head node is lost, near its time limit, and when preempted.
        spares: how many more are there to take the places of others; of ``components``, each has its own.
        on_lost: what to do when a host is lost and no spare is left.
        health_check: whether hosts are examined before they are used; None does so if there are spares.
        address: option for `find_address`: where the controller listens.
        data_address: likewise, for what procs tell one another; None on each node takes the one that reaches the
            controller.
        avoid: whether nodes that were lost or not fit recently are left out, see `monarch_slurm.job.sick`.
    """

    nodes: int
    job_name: str
    python: str
    components: tuple[NodeSpec, ...] = ()
    slurm_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    time_limit: str | None = None
    partition: str | None = None
    exclusive: bool = True
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    gres: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    dependency: str | None = None
    account: str | None = None
    qos: str | None = None
    comment: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    venv: str | None = None
    conda: str | None = None
    setup: tuple[str, ...] = ()
    preflight: tuple[str, ...] = ()
    container: Container | None = None
    notice: int | None = None
    requeue: bool = False
    spares: int = 0
    on_lost: OnLost = "shrink"
    health_check: bool | None = None
    address: str | None = None
    data_address: str | None = None
    avoid: bool = True

    def __post_init__(self) -> None:
        self._merge_slurm_args()
        if self.time_limit is not None and not TIME_LIMIT.fullmatch(self.time_limit):
            raise JobSpecError(
                f"time limit {self.time_limit!r}: write minutes, hours:minutes:seconds, days-hours or "
                "days-hours:minutes:seconds"
            )
        check_spares(self.spares, self.on_lost)
        if self.all_nodes > 1 or self.on_lost == "request":
            check_address("address", self.address)
            check_address("data address", self.data_address)
        if self.all_nodes > 1:
            check_many(
                "address" if self.data_address == self.address else "data address", self.data_address, self.all_nodes
            )
        if self.spares and self.components:
            raise JobSpecError(
                "spares of a heterogeneous job: of which kind? Ask for them by mesh, as in NodeSpec(4, spares=1)"
            )
        if self.venv is not None and self.conda is not None:
            raise JobSpecError("venv and conda exclude each other: one Python is activated")
        if self.notice is not None and self.notice < 1:
            raise JobSpecError(f"notice is {self.notice}; at least 1 second expected")
        check_srun_options(self.srun_args)
        if bad := [line for line in self.setup if line.lstrip().startswith("#SBATCH")]:
            raise JobSpecError(f"setup line {bad[0]!r}: options of sbatch belong into slurm_args (--slurm-arg)")
        if bad := [name for name in self.env if not _VARIABLE.fullmatch(name)]:
            raise JobSpecError(f"environment variable {bad[0]!r}: letters, digits and '_' expected")

    def _merge_slurm_args(self) -> None:
        """Make options of sbatch that are attributes here these attributes."""
        kept, keywords = merged_options(self.slurm_args)
        for name, value in keywords.items():
            before = getattr(self, name)
            if before not in (None, value) and name not in ("job_name", "exclusive"):  # which always say something
                logger.warning("slurm_args: %s %r replaces %r", name, value, before)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "slurm_args", kept)

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """Number of nodes to be used and of spares, of each kind of nodes, in Slurm's order of the nodes."""
        return [(spec.nodes, spec.spares) for spec in self.components] or [(self.nodes, self.spares)]

    @property
    def all_nodes(self) -> int:
        """Number of nodes, spares included."""
        return sum(used + spares for used, spares in self.kinds)

    def wishes(self, spec: NodeSpec) -> dict[str, Any]:
        """Return what is asked of each node of ``spec``, by the names that the attributes have here, too."""
        names = (
            "partition", "gpus_per_node", "cpus_per_task", "mem", "constraint", "gres", "nodelist", "exclude",
            "exclusive",
        )  # fmt: skip
        return {name: getattr(self, name) if getattr(spec, name) is None else getattr(spec, name) for name in names}

    def of_kind(self, kind: int) -> SlurmRequest:
        """Return the request for nodes of one of `kinds` alone."""
        if not self.components:
            return self
        spec = self.components[kind]
        return replace(
            self,
            nodes=spec.nodes,
            spares=spec.spares,
            components=(),
            slurm_args=(*self.slurm_args, *spec.slurm_args),
            **self.wishes(spec),
        )

    def prologue(self) -> list[str]:
        """Return the shell lines of the batch script that make the environment of program and agents.

        What cannot be loaded or activated ends the job, before anything runs in a half-made environment.
        """
        lines = []
        if self.modules:
            # A batch script is no login shell, so the function may have to be defined first.
            lines.append("type module >/dev/null 2>&1 || . /etc/profile")
            lines += [f"module load {shlex.quote(name)} || exit 1" for name in self.modules]
        if self.venv is not None:
            lines.append(f". {shlex.quote(f'{self.venv}/bin/activate')} || exit 1")
        if self.conda is not None:
            lines.append(f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(self.conda)} || exit 1')
        lines += [f"export {name}={shlex.quote(str(value))}" for name, value in self.env.items()]
        return [*lines, *self.setup]


def split_meshes(meshes: Mapping[str, int | NodeSpec]) -> tuple[dict[str, int], tuple[NodeSpec, ...]]:
    """Return the size of each mesh, and the components of the job if any mesh has nodes of its own kind."""
    sizes = {name: mesh.nodes if isinstance(mesh, NodeSpec) else mesh for name, mesh in meshes.items()}
    if not any(isinstance(mesh, NodeSpec) for mesh in meshes.values()):
        return sizes, ()
    return sizes, tuple(mesh if isinstance(mesh, NodeSpec) else NodeSpec(mesh) for mesh in meshes.values())
