from __future__ import annotations

from typing import Any

from monarch_slurm.host.contacts import Contacts
from monarch_slurm.wire import AGENT, CONTROLLER, Address, Message

HOSTS = ["a", "b", "c", "d"]
DOWN = {"proc": "m.1", "mesh": "m"}


def message(kind: str, source: tuple[str, str], target: tuple[str, str], **fields: Any) -> Message:
    return Message(kind, Address(*target), Address(*source), fields)


def test_nobody_is_told_who_had_nothing_to_do_with_it() -> None:
    contacts = Contacts()
    contacts.note(message("cast", CONTROLLER, ("a", AGENT), proc_mesh="m"))
    contacts.note(message("port", ("a", "m.1"), CONTROLLER))
    assert contacts.of_proc(DOWN, HOSTS) == set()
    assert contacts.of_host("a", HOSTS) == set()


def test_who_has_called_or_was_called_is_told() -> None:
    contacts = Contacts()
    contacts.note(message("cast", ("b", "x.0"), ("a", AGENT), proc_mesh="m"))
    contacts.note(message("spawn", ("a", "m.1"), ("c", AGENT), mesh="child", restartable=False))
    contacts.note(message("watch", ("d", "y.0"), ("a", "m.1")))
    assert contacts.of_proc(DOWN, HOSTS) == {"b", "c", "d"}
    assert contacts.of_proc({"proc": "m.2", "mesh": "m"}, HOSTS) == {"b"}
    assert contacts.of_proc({"proc": "child.0", "mesh": "child"}, HOSTS) == {"a"}
    assert contacts.of_host("a", ["b", "c"]) == {"b", "c"}
    assert contacts.of_host("d", HOSTS) == {"a"}


def test_a_cast_makes_contacts_of_all_its_hosts() -> None:
    contacts = Contacts()
    contacts.note_cast(message("casts", ("a", "m.1"), CONTROLLER, proc_mesh="n"), ["b", "c"])
    assert contacts.of_proc(DOWN, HOSTS) == {"b", "c"}
    assert contacts.of_proc({"proc": "n.7", "mesh": "n"}, HOSTS) == {"a"}


def test_everybody_is_told_of_who_starts_others_again() -> None:
    contacts = Contacts()
    contacts.note(message("spawn", ("a", "m.1"), ("c", AGENT), mesh="kept", restartable=True))
    assert contacts.of_proc(DOWN, HOSTS) == set(HOSTS)
    assert contacts.of_host("a", HOSTS) == set(HOSTS)
