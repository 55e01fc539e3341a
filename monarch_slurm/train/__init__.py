"""Fault-tolerant training: replicas that lose processes and nodes on the way, and do not stop.

- `config`, `events`: what a run is, and what happens in it
- `session`: from a plan to a finished report; `manager` sees one run through; `answers` tells others of it
- `supervisor`, `watchdog`: one replica, started again in place; `injection` breaks it on purpose
- `trainer`: the actor in a trainer's process; `engine`, `llama`, `data`, `schedule`: what it trains
- `fault_tolerance`, `group`, `transfer`, `state`, `replica`, `addresses`: TorchFT as it is used here
- `timeline`, `curves`, `event_index`: what the events mean; `live`, `report` show it
"""

from monarch_slurm.train.config import Place, TrainConfig

__all__ = ["Place", "TrainConfig"]
