"""The message that takes a cast to a host of the tree, for itself and for those below, and how it is divided there.

Its fields are ``number`` of the cast, ``after`` (number of the cast before it), ``odd`` (by slot: the cast before it,
and how many direct messages went before it, where that is not ``after`` and none new), ``to`` (for each host its slot
and ranks), ``slot`` of the host that it is sent to, ``fanout``, and ``cast``: the fields of the cast itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_slurm.host.cast_tree import child_towards
from monarch_slurm.wire import Address, Message

APART = frozenset(("heartbeat", "welcome", "fenced", "share", "barrier", "tree_child", "tree_parent", "tree_cut"))
"""Kinds of messages that have no place in the order of what is sent to a host."""

FOR_OTHERS = frozenset(("casts", "publish"))
"""Kinds of messages to the controller that are for other hosts: their order is that of what goes to those."""

Ranks = Sequence[int]


def divide(share: Message) -> tuple[tuple[int, int, list[int]] | None, dict[int, Message]]:
    """Return what is for the host that got ``share``, and what is for each of its children, by slot.

    For the host itself: the number of the cast before, the number of direct messages before, and the ranks; None if
    the cast is not for it.
    """
    fields = share.fields
    here, fanout, odd = fields["slot"], fields["fanout"], fields["odd"]
    own = None
    below: dict[int, list[Any]] = {}
    for entry in fields["to"]:
        if entry[0] == here:
            after, directs = odd.get(here, (fields["after"], 0))
            own = after, directs, unpacked(entry)
        else:
            below.setdefault(child_towards(here, entry[0], fanout), []).append(entry)
    parts = {}
    for child, entries in below.items():
        odd_there = {entry[0]: odd[entry[0]] for entry in entries if entry[0] in odd} if odd else {}
        part = {**fields, "slot": child, "to": entries, "odd": odd_there}
        parts[child] = Message(share.kind, share.dst, share.src, part, share.body)
    return own, parts


def for_one_host(message: Message, address: Address, ranks: list[int]) -> Message:
    """Return what the "casts" ``message``, or the share of one, is to the agent ``address`` with its procs ``ranks``.

    That is a "cast"; with the field ``request`` something that the agent itself is asked for, "stop" or "kill"; with
    ``each``, which says what is particular to each proc of a host, the request to spawn those procs.
    """
    fields = message.fields
    if "request" in fields:
        return Message(fields["request"], address, message.src, {**fields, "ranks": ranks})
    if "each" not in fields:
        return Message("cast", address, message.src, {**fields, "base_ranks": ranks}, message.body)
    first = ranks[0] - ranks[0] % len(fields["each"])
    procs = [{"rank": first + i, **particular} for i, particular in enumerate(fields["each"])]
    return Message("spawn", address, message.src, {**fields, "ranks": ranks, "procs": procs}, message.body)


def packed(ranks: Ranks) -> list[Any]:
    """Return ascending ranks as the first and the number of them, or if they have gaps as a list."""
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return [ranks[0], len(ranks)]
    return [list(ranks)]


def unpacked(entry: Sequence[Any]) -> list[int]:
    """Return the ranks of one entry of a share, behind its slot."""
    if len(entry) == 2:
        return list(entry[1])
    _, first, count = entry
    return list(range(first, first + count))
