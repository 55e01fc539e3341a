"""From a request for procs to what each of them is started with."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_slurm.host.devices import deal_out
from monarch_slurm.host.identity import ADDRESS_VARIABLE
from monarch_slurm.host.interfaces import collective_settings
from monarch_slurm.host.proc import ProcSpec
from monarch_slurm.wire import Address, Message


@dataclass(frozen=True)
class Place:
    """The host that procs are started on: its id, the name that people know, its agent's socket, its IP address, and
    the variables of its own that are kept where the program forwards others.
    """

    host: str
    name: str
    socket_path: str
    ip: str
    own_variables: frozenset[str] = frozenset()


def procs_asked_for(message: Message, place: Place) -> list[tuple[ProcSpec, Message]]:
    """Return each proc that the request ``message`` asks for, and the message that it gets first.

    Raises:
        ConfigError: it asks for GPUs that this host does not have.
    """
    fields = message.fields
    mesh = fields["mesh"]
    forwarded = {name: value for name, value in fields["forwarded"].items() if name not in place.own_variables}
    dealt = deal_out([proc["gpus"] for proc in fields["procs"]])
    asked = []
    # All procs of the host are in the request, so that each gets its own share of GPUs and cores if only some start.
    for proc, (visible, near) in zip(fields["procs"], dealt, strict=True):
        if proc["rank"] not in fields["ranks"]:
            continue
        name = f"{mesh}.{proc['rank']}"
        first = Message(
            "start", Address(place.host, name), message.src, {"rank": proc["rank"], **fields["start"]}, message.body
        )
        asked_for = {**fields["env"], **proc["env"], ADDRESS_VARIABLE: place.ip}
        env = {**collective_settings(place.ip), **visible, **forwarded, **asked_for}
        cpus = proc["cpus"] or list(near)
        spec = ProcSpec(
            place.host, place.name, name, mesh, proc["rank"], place.socket_path, fields["entry"], env,
            fields["sys_path"], fields["cwd"], cpus, fields["settings"], proc["cpu_nodes"], proc["memory_nodes"],
            proc["command"], proc["inherit_env"], fields["incarnation"],
        )  # fmt: skip
        asked.append((spec, first))
    return asked
