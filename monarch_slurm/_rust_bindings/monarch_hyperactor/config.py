"""At home in `monarch_slurm.config`."""

from monarch_slurm.config import (
    Encoding,
    clear_runtime_config,
    configure,
    get_global_config,
    get_runtime_config,
    reload_config_from_env,
    reset_config_to_defaults,
)

__all__ = [
    "Encoding",
    "clear_runtime_config",
    "configure",
    "get_global_config",
    "get_runtime_config",
    "reload_config_from_env",
    "reset_config_to_defaults",
]
