"""Monarch's descriptions of telemetry and admin services. Programs may make them; no job here can run the services."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TelemetryConfig:
    """What a job's telemetry would keep and show; times are in seconds."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass(frozen=True)
class MeshAdminConfig:
    """Where a job's admin service would listen."""

    admin_addr: str | None = None
