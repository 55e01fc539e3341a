"""Settings of Monarch that have no meaning here. They are checked, stored and given back, so that programs which set
them run; nothing looks at them.
"""

from __future__ import annotations

import enum
from typing import Any


class Encoding(enum.Enum):
    """Monarch's encodings of messages."""

    Bincode = "serde_bincode"
    Json = "serde_json"
    Multipart = "serde_multipart"


ALIASES = {
    "codec_max_frame_length": "max_frame_length",
    "mesh_proc_spawn_max_idle": "proc_start_timeout",
}
"""Monarch's name of a setting: the one that it has here."""

DURATIONS = {
    "message_delivery_timeout": "30s",
    "actor_spawn_max_idle": "30s",
    "get_actor_state_max_idle": "30s",
    "get_proc_state_max_idle": "1m",
    "proc_stop_max_idle": "30s",
    "supervision_watchdog_timeout": "2m",
    "message_ack_time_interval": "500ms",
    "split_max_buffer_age": "50ms",
    "channel_net_rx_buffer_full_check_interval": "5s",
    "channel_reconnect_timeout": "1m",
    "channel_tcp_keepalive_idle": "1m",
    "forwarder_flush_timeout": "5s",
    "server_heartbeat_interval": "1s",
    "pending_actor_delivery_timeout": "30s",
    "stop_grace_period": "10s",
    "rdma_qp_init_timeout": "30s",
    "mesh_admin_config_dump_bridge_timeout": "5s",
    "mesh_admin_pyspy_bridge_timeout": "13s",
    "mesh_admin_pyspy_client_timeout": "20s",
    "mesh_admin_pyspy_max_profile_duration": "5m",
    "mesh_admin_pyspy_timeout": "10s",
    "mesh_admin_query_child_timeout": "100ms",
    "mesh_admin_resolve_actor_timeout": "200ms",
    "mesh_admin_single_host_timeout": "3s",
    "mesh_admin_tree_timeout": "10s",
    "otel_metric_export_interval": "1s",
    "process_memory_metric_interval": "5m",
}
"""Name and default of each that is a length of time."""

VALUES: dict[str, Any] = {
    "mesh_terminate_concurrency": 16,
    "mesh_bootstrap_enable_pdeathsig": True,
    "mesh_admin_addr": "[::]:1729",
    "enable_log_forwarding": False,
    "enable_file_capture": False,
    "tail_log_lines": 0,
    "read_log_buffer": 100,
    "force_file_log": False,
    "prefix_with_rank": True,
    "message_ack_every_n_messages": 1000,
    "message_ttl_default": 64,
    "split_max_buffer_size": 5,
    "channel_tcp_congestion": "",
    "message_latency_sampling_rate": 0.01,
    "enable_dest_actor_reordering_buffer": True,
    "default_encoding": Encoding.Multipart,
    "small_write_threshold": 256,
    "max_cast_dimension_size": 16,
    "remote_alloc_bind_to_inaddr_any": False,
    "remote_alloc_bootstrap_addr": "",
    "remote_alloc_allowed_port_range": slice(0, 2**16),
    "proc_launcher_kind": "",
    "enable_otel_metrics": True,
    "enable_otel_tracing": True,
    "pyspy_bin": "",
    "rdma_peer_device_affinity": "",
    "rdma_runtime_worker_threads": 4,
    "rdma_tcp_fallback_parallelism": 1,
    "rdma_qps_per_cq": 64,
    "rdma_cq_poller_per_device": True,
    "rdma_host_odp": False,
    "rdma_min_stripe_size_kb": 512,
    "enable_recorder_tracing": True,
    "enable_sqlite_tracing": False,
    "enable_unawaited_python_task_traceback": False,
    "file_log_level": "",
    "mesh_admin_max_concurrent_resolves": 2,
    "monarch_log_suffix": "",
    "scuba_log_enter_exit": False,
    "sequencer_max_locked_keys": 128,
    "terminated_snapshot_retention": 100,
    "use_direct_spawn": False,
}
"""Name and default of each other one; a value must have the type of the default."""

NUMBERS_OR_NONE = ("tokio_worker_threads", "rdma_max_nics_per_buffer")
"""Those that are a number or None, which is the default."""

NOT_ZERO = ("tokio_worker_threads", "rdma_max_nics_per_buffer", "rdma_qps_per_cq", "rdma_min_stripe_size_kb")
"""Numbers that must be 1 or more. The others may be 0, and none may be negative."""
