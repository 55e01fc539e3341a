"""Services of Monarch's jobs that there are none of here, and what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

from monarch_slurm.job.telemetry import MeshAdminConfig, TelemetryConfig


class Services:
    """Refuses each of them: a program that asks for one should not go on without."""

    def enable_telemetry(
        self,
        config: TelemetryConfig | None = None,
        *,
        mesh_admin_config: MeshAdminConfig | None = None,
        **kwargs: Any,
    ) -> NoReturn:
        """Refuse: there is no such service.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "jobs have no telemetry service here; leave enable_telemetry() out. `monarch-slurm status` and "
            "`monarch-slurm stacks` show what a running job does"
        )

    def telemetry_query_client(self) -> NoReturn:
        """Refuse, as `enable_telemetry` does."""
        raise NotImplementedError("jobs have no telemetry service here, so there is nothing to query")

    def enable_admin(self, config: MeshAdminConfig | None = None, **kwargs: Any) -> NoReturn:
        """Refuse: there is no such service.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "jobs have no admin HTTP service here; leave enable_admin() out. `monarch-slurm status` asks a running job"
        )

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **kwargs: Any,
    ) -> NoReturn:
        """Refuse: hosts mount nothing.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("hosts mount no folders here; HostMesh.sync_workspace copies folders to them")

    def gather_mount(
        self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None
    ) -> NoReturn:
        """Refuse, as `remote_mount` does."""
        raise NotImplementedError("hosts mount no folders here; endpoints and RDMABuffer bring files back")

    def profile(self, *, on_trace_ready: Any = None) -> NoReturn:
        """Refuse: jobs have no profiler.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "jobs have no profiler here; run torch.profiler in an actor, or `monarch-slurm stacks`"
        )
