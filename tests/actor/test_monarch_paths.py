"""Names of Monarch, public and private, that programs import: all of them are here under the same path."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "actor": """
        Accumulator Actor ActorError as_endpoint attach attach_to_workers Channel ChannelTransport concurrent_endpoint
        config Context context current_actor_name current_rank current_size debug_controller default_bootstrap_cmd
        enable_transport
        Endpoint endpoint Extent Future get_meter get_or_spawn_controller HostMesh MeshFailure Point Port PortReceiver
        ProcId ProcMesh returns_future run_worker_loop_forever run_worker_loop_until_shutdown send shutdown_context span
        start_worker_loop_forever this_host this_proc traced Uid unhandled_fault_hook ValueMesh
    """,
    "_rust_bindings.monarch_hyperactor.supervision": "SupervisionError",
    "_rust_bindings.monarch_hyperactor.shape": "Shape Slice Region Extent Point",
    "_rust_bindings.monarch_hyperactor.host_mesh": "BootstrapCommand",
    "_rust_bindings.monarch_hyperactor.mailbox": "UndeliverableMessageEnvelope",
    "_src.actor.actor_mesh": "ActorMesh Context Instance",
    "_src.actor.shape": "MeshTrait NDSlice",
    "_src.actor.host_mesh": "HostMesh this_host",
    "_src.actor.proc_mesh": "register_proc_mesh_spawn_callback unregister_proc_mesh_spawn_callback "
    "get_active_proc_meshes",
    "_src.job.job": "BatchJob BashActor",
    "config": "configure configured get_global_config get_runtime_config clear_runtime_config Encoding",
    "job": "DEFAULT_JOB_PATH exec_command JobTrait job_load job_loads JobState load_current_job LocalJob "
    "MeshAdminConfig PortForwarder ProcessJob set_current_job shell SlurmJob TelemetryConfig hosts_from_config",
}


@pytest.mark.parametrize("path", NAMES)
def test_names_under_monarchs_paths(path: str) -> None:
    module = importlib.import_module(f"monarch_slurm.{path}")
    for name in NAMES[path].split():
        assert hasattr(module, name), name


def test_names_at_the_top() -> None:
    import monarch_slurm
    from monarch_slurm import Extent, NDSlice, Shape, configure, configured  # noqa: F401 - that they are there

    assert Shape(["x"], NDSlice.new_row_major([2])).extent == Extent(["x"], [2])
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        monarch_slurm.nothing  # noqa: B018


def test_a_private_path_leads_to_the_same_class() -> None:
    from monarch_slurm._rust_bindings.monarch_hyperactor.supervision import SupervisionError
    from monarch_slurm.actor import SupervisionError as Public

    assert SupervisionError is Public
