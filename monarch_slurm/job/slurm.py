"""Hosts from Slurm: one allocation whose nodes run the host agents."""

from __future__ import annotations

import copy
import ipaddress
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from monarch_slurm.host.places import OnLost
from monarch_slurm.job.base import BatchJob, JobState, JobTrait, Script, program_arguments
from monarch_slurm.job.batch import BatchPlan
from monarch_slurm.job.checks import check_meshes
from monarch_slurm.job.connect import connect, is_inside
from monarch_slurm.job.container import Container
from monarch_slurm.job.errors import (
    JobError,
    JobNotFoundError,
    JobSpecError,
    SlurmUnreachableError,
)
from monarch_slurm.job.folder import JobFolder
from monarch_slurm.job.follow import follow_job, print_notice
from monarch_slurm.job.request import NodeSpec, SlurmRequest, split_meshes
from monarch_slurm.job.requested import cancel_all
from monarch_slurm.job.sick import leave_out_sick
from monarch_slurm.job.status import JobId, JobStatus, Phase, query, run_command
from monarch_slurm.job.submission import check_commands, default_python, render, submit, submit_array
from monarch_slurm.job.unreachable import slurm_failure
from monarch_slurm.owned_files import write_whole

logger = logging.getLogger(__name__)

DEFAULT_LOG_DIR = "runs"


class SlurmJob(JobTrait):
    """A job whose hosts are the nodes of one allocation of Slurm.

    With a client script, the script runs on the head node of the allocation as the controller, and the job ends with
    it: ``SlurmJob({"hosts": 4}).apply("python train.py")``. Without one, the program that calls `state` is the
    controller, wherever it runs, and the nodes must be able to dial it; they give up after `CLIENT_WAIT` seconds.

    The job goes on when a node other than the head is lost. Everything about it is in `folder`.

    Args:
        meshes: name and number of nodes of each mesh; nodes are dealt out in this order. A `NodeSpec` in place of a
            number asks for nodes of another kind, and makes the job a heterogeneous one.
        python_exe: command that starts Python on the nodes, in shell words; None takes the Python that runs here.
        slurm_args: further options of sbatch, as on its command line. One that has a keyword here replaces it; one that
            this package sets itself, such as ``--array``, ``--signal`` or ``--output``, is refused.
        job_name: Slurm's name of the job.
        ntasks_per_node: CPUs are asked for as this many tasks of ``cpus_per_task`` would; one agent runs per node.
        time_limit: as ``sbatch --time`` takes it; None leaves it to the partition. About a minute before the end the
            client script gets SIGTERM.
        log_dir: folder in which the job's folder is made; all nodes must see it.
        exclusive: whether the nodes are for this job alone. If not, and ``partition`` and ``gpus_per_node`` are given,
            it gets the part of each node's CPUs and memory that goes with its GPUs, unless it asks for others.
        mem: memory per node, such as ``"200G"``.
        job_start_timeout: seconds that `state` waits in the queue; None waits without limit.
        address: what others dial on each machine of the job: interface, network or IP address, or ``"fastest"`` for the
            fastest link that is up; None takes the one that reaches the others.
        data_address: the same for what procs tell one another: collectives, RDMA over TCP, TorchFT; None takes
            ``address``.
        gres, constraint, nodelist, exclude, reservation, dependency, comment: as sbatch takes them.
        modules: environment modules to load before program and agents start.
        venv: folder of a virtual environment to activate there; ``python`` then is its Python.
        conda: name or folder of a conda environment to activate, likewise.
        env: environment variables of program and agents.
        setup: further shell lines for the head node before the agents start, such as ``ulimit -n 65536``.
        preflight: shell commands that must succeed on a node before its agent starts; a host whose command fails is
            named with what the command said.
        srun_args: further options of the srun that starts each host, such as ``--network=``.
        container: image that program and agents run in: a path, or a `Container`.
        notice: seconds before the time limit at which the client script gets SIGTERM; None takes a minute, or a
            quarter of a short limit.
        requeue: whether the job starts again after its head node is lost, on what nodes there are.
        spares: nodes beyond those of the meshes, for the places of hosts that are lost, do not start or are not fit. In
            a heterogeneous job each `NodeSpec` has its own.
        on_lost: what if no spare is left: ``"shrink"`` goes on without the host, ``"request"`` submits a small job for
            one more node and waits for it, ``"fail"`` fails the program.
        health_check: examine the hosts before they are used, for up to 10 s; None does so if there are spares.
        avoid: leave out nodes that were lost or not fit recently in jobs with the same ``log_dir``, as far as Slurm has
            others; what is left out is printed.
        bind_to: the same as ``address``, an IP address alone; ``"0.0.0.0"`` and ``"::"`` leave the choice to us.
        monarch_port: ignored: ports are chosen by the system, so that jobs on one node cannot collide.
        out_of_cluster: ignored: agents dial the controller, so there is no gateway to choose.
        attach_to: ignored, likewise.

    Raises:
        JobSpecError: an argument makes no sense.
        ValueError: ``bind_to`` is no IP address.
    """

    def __init__(
        self,
        meshes: Mapping[str, int | NodeSpec],
        python_exe: str | None = None,
        slurm_args: Sequence[str] = (),
        monarch_port: int = 0,
        job_name: str = "monarch_job",
        ntasks_per_node: int = 1,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: str | None = None,
        bind_to: str | None = None,
        *,
        address: str | None = None,
        data_address: str | None = None,
        gres: str | None = None,
        constraint: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        reservation: str | None = None,
        dependency: str | None = None,
        comment: str | None = None,
        modules: Sequence[str] = (),
        venv: str | None = None,
        conda: str | None = None,
        env: Mapping[str, str] | None = None,
        setup: Sequence[str] = (),
        preflight: Sequence[str] = (),
        srun_args: Sequence[str] = (),
        container: str | Container | None = None,
        notice: int | None = None,
        requeue: bool = False,
        spares: int = 0,
        on_lost: OnLost = "shrink",
        health_check: bool | None = None,
        avoid: bool = True,
    ) -> None:
        super().__init__()
        sizes, components = split_meshes(meshes)
        self._meshes = check_meshes(sizes)
        if ntasks_per_node < 1:
            raise JobSpecError(f"ntasks_per_node is {ntasks_per_node}; at least 1 expected")
        if ntasks_per_node > 1:
            cpus_per_task = ntasks_per_node * (cpus_per_task or 1)
        if bind_to is not None and not (ip := ipaddress.ip_address(bind_to)).is_unspecified:
            if address not in (None, str(ip)):
                raise JobSpecError(f"address {address!r} and bind_to {bind_to!r} contradict each other; give one")
            address = str(ip)
        self._request = SlurmRequest(
            nodes=sum(self._meshes.values()),
            job_name=job_name,
            python=python_exe or ("python" if venv or conda else default_python()),
            components=components,
            slurm_args=tuple(slurm_args),
            srun_args=tuple(srun_args),
            time_limit=None if time_limit is None else str(time_limit),
            partition=partition,
            exclusive=exclusive,
            gpus_per_node=gpus_per_node,
            cpus_per_task=cpus_per_task,
            mem=mem,
            account=account,
            qos=qos,
            gres=gres,
            constraint=constraint,
            nodelist=nodelist,
            exclude=exclude,
            reservation=reservation,
            dependency=dependency,
            comment=comment,
            env=dict(env or {}),
            modules=tuple(modules),
            venv=venv,
            conda=conda,
            setup=tuple(setup),
            preflight=tuple(preflight),
            container=Container(container) if isinstance(container, str) else container,
            notice=notice,
            requeue=requeue,
            spares=spares,
            on_lost=on_lost,
            health_check=health_check,
            address=address,
            data_address=data_address or address,
            avoid=avoid,
        )
        self._log_dir = Path(log_dir or DEFAULT_LOG_DIR)
        self._start_timeout = job_start_timeout
        self._job_id: JobId | None = None
        self._folder: JobFolder | None = None
        self._connected: JobState | None = None

    def add_mesh(self, name: str, num_nodes: int | NodeSpec) -> None:
        """Ask for one more mesh, before the job is applied.

        Raises:
            JobError: it has been applied already.
            JobSpecError: there is a mesh of this name, or the number makes no sense.
        """
        if self.active:
            raise JobError(f"{self!r} has been applied; a mesh cannot be added any more")
        if name in self._meshes:
            raise JobSpecError(f"this job has a mesh named {name!r} already")
        kinds = self._request.components or [*self._meshes.values()]
        sizes, components = split_meshes({**dict(zip(self._meshes, kinds, strict=True)), name: num_nodes})
        self._meshes = check_meshes(sizes)
        self._request = replace(self._request, nodes=sum(sizes.values()), components=components)

    @property
    def job_id(self) -> JobId:
        """Slurm's number of the job; for a task of an array a text such as ``"12_3"``.

        Raises:
            JobError: it has not been submitted.
        """
        if self._job_id is None:
            raise JobError("this job has not been submitted; call apply() or state() first")
        return self._job_id

    @property
    def folder(self) -> Path:
        """The job's folder.

        Raises:
            JobError: it has not been submitted.
        """
        return self._job_folder.path

    @property
    def _job_folder(self) -> JobFolder:
        if self._folder is None:
            raise JobError("this job has not been submitted; call apply() or state() first")
        return self._folder

    @property
    def python(self) -> list[str]:
        """Command that starts Python where the program and the agents run: in the container, if there is one."""
        container = self._request.container
        return shlex.split(self._request.python if container is None else container.python)

    def script(self) -> str:
        """Return the script that would be submitted, with ``JOB_FOLDER`` for the folder that is made then.

        Raises:
            NoSlurmError: Slurm's commands are not here.
        """
        return render(self._without_sick_nodes(self._log_dir.absolute()), self._pretended_folder())

    def dry_run(self, client_script: Script | None = None) -> str:
        """Return `script`, and as comments below it what the script runs: the client script, and a step per host.

        Raises:
            NoSlurmError: Slurm's commands are not here.
        """
        folder = self._pretended_folder()
        plan = self._plan(client_script)
        group = 0 if len(self._request.components) > 1 else None
        lines = []
        if plan.program is not None:
            lines.append(f"# on the head node: {shlex.join(plan.program_command(folder, 'NODE', group))}")
        lines.append(f"# for each host: {shlex.join(plan.host_command(folder, 'NODE', 0, group))}")
        return self.script() + "\n".join(["", *lines, ""])

    def _without_sick_nodes(self, base: Path) -> SlurmRequest:
        return leave_out_sick(self._request, base, print_notice)

    def _pretended_folder(self) -> JobFolder:
        return JobFolder(self._log_dir.absolute() / "JOB_FOLDER")

    def _plan(self, client_script: Script | None) -> BatchPlan:
        request = self._request
        return BatchPlan(
            program=None if client_script is None else tuple(program_arguments(client_script, shlex.join(self.python))),
            python=request.python,
            address=request.data_address,
            requeue=request.requeue,
            srun_args=request.srun_args,
            preflight=request.preflight,
            container=request.container,
        )

    def apply_array(self, client_scripts: Sequence[Script], parallel: int | None = None) -> list[SlurmJob]:
        """Submit one job for each of ``client_scripts``, all alike, as one array of Slurm; return them.

        This object itself stays as it is.

        Args:
            parallel: how many may run at a time; None does not limit it.

        Raises:
            JobSpecError: there is no script, or the job is heterogeneous.
            NoSlurmError, SubmitError
        """
        if not client_scripts:
            raise JobSpecError("an array needs at least one client script")
        if self._request.components:
            raise JobSpecError("Slurm has no arrays of heterogeneous jobs; apply them one by one")
        folder = JobFolder.create(self._log_dir, self._request.job_name)
        tasks, plans = [], []
        try:
            for index, script in enumerate(client_scripts):
                task = copy.copy(self)
                task._folder = folder.make_task(index)
                task._job_id = None
                write_whole(task._folder.job_pickle, BatchJob(task).dumps())
                tasks.append(task)
                plans.append((task._folder, self._plan(script)))
            array_id = submit_array(self._without_sick_nodes(folder.path.parent), folder, plans, parallel or len(tasks))
        except JobError:
            folder.remove()
            raise
        folder.link_as(array_id)
        for index, (task, (task_folder, _)) in enumerate(zip(tasks, plans, strict=True)):
            task.adopt(f"{array_id}_{index}", task_folder)
        return tasks

    def adopt(self, job_id: JobId, folder: JobFolder) -> None:
        """Become the job of Slurm that has this id and this folder."""
        self._job_id, self._folder = job_id, folder
        self._mark_applied()

    def status(self) -> JobStatus:
        """Return what Slurm says about the job now.

        Raises:
            JobNotFoundError, SlurmUnreachableError, NoSlurmError
        """
        return query(self.job_id)

    def follow(self, out: TextIO) -> int:
        """Copy the client script's output to ``out`` until the job has ended; return its exit code.

        Raises:
            JobEndedError: the job ended, and its client script did not by itself. The text says why.
        """
        return follow_job(self.job_id, self._job_folder, out)

    def _create(self, client_script: Script | None) -> None:
        plan = self._plan(client_script)
        check_commands()  # before anything is made
        folder = JobFolder.create(self._log_dir, self._request.job_name)
        self._folder = folder
        try:
            write_whole(folder.job_pickle, BatchJob(self).dumps())
            self._job_id = int(submit(self._without_sick_nodes(folder.path.parent), folder, plan))
        except JobError:
            self._folder = None
            folder.remove()
            raise
        folder.link_as(str(self._job_id))

    def _state(self) -> JobState:
        if self._connected is None:
            self._connected = connect(
                self._job_id, self._job_folder, self._meshes, self._request, self._plan(None), self._start_timeout
            )
        return self._connected.again()

    def can_run(self, spec: JobTrait) -> bool:
        """Return whether ``spec`` asks for the same and this job is active and has not had a controller yet."""
        if not isinstance(spec, SlurmJob) or self._folder is None:
            return False
        if (spec._meshes, spec._request) != (self._meshes, self._request):
            return False
        if self._folder.controller_file.exists() or not self._folder.path.is_dir():
            return False
        try:
            return self.status().phase in (Phase.WAITING, Phase.RUNNING)
        except (JobNotFoundError, SlurmUnreachableError):
            return False

    def _kill(self) -> None:
        if self._job_id is None or is_inside(self._job_folder):
            return  # inside, the job ends when this program does
        if self._connected is not None:
            self._connected.shutdown()
            self._connected = None
        cancel_all(self._job_folder)
        done = run_command(["scancel", str(self._job_id)])
        if done.returncode != 0 and "invalid job id" not in done.stderr.lower():
            raise slurm_failure(done, f"could not cancel job {self._job_id}", run_command)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}

    def __repr__(self) -> str:
        where = f", job {self._job_id} in {self._folder.path}" if self._folder and self._job_id else ""
        return f"SlurmJob({self._meshes!r}{where})"


def follow(job: SlurmJob, out: TextIO) -> int:
    """Copy the output of ``job``'s client script to ``out`` until it has ended; see `SlurmJob.follow`."""
    return job.follow(out)
