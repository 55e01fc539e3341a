"""Names of Monarch, public and private, that programs import: all of them are here under the same path."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

NAMES = {
    "actor": """
        Accumulator Actor ActorError as_endpoint attach attach_to_workers Channel ChannelTransport concurrent_endpoint
        config Context context current_actor_name current_rank current_size debug_controller default_bootstrap_cmd
        enable_transport
        Endpoint endpoint Extent Future get_meter get_or_spawn_controller HostMesh MeshFailure Point Port PortReceiver
        ProcId ProcMesh returns_future run_worker_loop_forever run_worker_loop_until_shutdown send
        hosts_from_config shutdown_context span
        start_worker_loop_forever this_host this_proc traced Uid unhandled_fault_hook ValueMesh
    """,
    "_rust_bindings.monarch_hyperactor.supervision": "SupervisionError",
    "_rust_bindings.monarch_hyperactor.shape": "Shape Slice Region Extent Point",
    "_rust_bindings.monarch_hyperactor.host_mesh": "BootstrapCommand",
    "_rust_bindings.monarch_hyperactor.mailbox": "UndeliverableMessageEnvelope",
    "_src.actor.actor_mesh": "ActorMesh Context Instance _context",
    "_src.actor.shape": "MeshTrait NDSlice Shape Extent",
    "_src.actor.mock": "patch_actor patch_tensor_engine get_actor_class",
    "_src.spmd.host_mesh": "host_mesh_from_store",
    "actor.concurrent": "concurrent_endpoint",
    "tools.utils": "MONARCH_HOME conda",
    "tools.config": "Config",
    "job.spmd": "StoreJob SPMDJob serve",
    "_rust_bindings.monarch_hyperactor.channel": "BindSpec ChannelAddr ChannelTransport",
    "_rust_bindings.monarch_hyperactor.config": "Encoding configure get_global_config get_runtime_config "
    "clear_runtime_config reload_config_from_env reset_config_to_defaults",
    "_src.actor.host_mesh": "HostMesh this_host",
    "_src.actor.proc_mesh": "register_proc_mesh_spawn_callback unregister_proc_mesh_spawn_callback "
    "get_active_proc_meshes",
    "_src.job.job": "BatchJob BashActor",
    "config": "configure configured get_global_config get_runtime_config clear_runtime_config Encoding "
    "ChannelTransport parametrize_config parametrize_config_pointwise",
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


def test_the_current_context_is_where_monarch_has_it() -> None:
    from monarch_slurm._src.actor.actor_mesh import _context
    from monarch_slurm.actor import context

    assert context() is context() is _context.get()
    assert _context.get().message_rank.rank == 0


def test_where_home_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from monarch_slurm.tools.utils import MONARCH_HOME, conda

    monkeypatch.setenv("MONARCH_HOME", str(tmp_path / "home"))
    assert MONARCH_HOME("a", "b") == tmp_path / "home/a/b"
    assert (tmp_path / "home/a/b").is_dir()
    monkeypatch.delenv("MONARCH_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert MONARCH_HOME() == tmp_path / ".monarch"
    monkeypatch.setenv("CONDA_PREFIX", "/opt/envs/train")
    assert (conda.active_env_dir(), conda.active_env_name()) == ("/opt/envs/train", "train")
    monkeypatch.delenv("CONDA_PREFIX")
    assert (conda.active_env_dir(), conda.active_env_name()) == (None, None)


def test_a_configuration_of_monarchs_tools() -> None:
    from monarch_slurm.actor import Workspace
    from monarch_slurm.tools.config import Config

    config = Config(scheduler="slurm", scheduler_args={"partition": "p"})
    assert (config.workspace, config.dryrun) == (Workspace.null(), False)
    with pytest.warns(FutureWarning, match="deprecated"):
        assert Config(workspace="/src").workspace == Workspace(dirs={"/src": ""})  # type: ignore[arg-type]
    with pytest.warns(FutureWarning, match="deprecated"):
        assert Config(workspace=None).workspace == Workspace.null()  # type: ignore[arg-type]
