"""One secret that workers and the programs which attach to them share, and the keys that both make of it."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import zmq
import zmq.utils.z85

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.owned_files import FileRefusedError, create_owned, read_owned
from monarch_slurm.wire.keys import JobKeys, KeyFileError

TRUST_ALL = "trust_all_connections"

KEY_VARIABLE = "MONARCH_SLURM_WORKER_KEY"
"""Names the key file where a program gives none."""

ALLOW_VARIABLE = "MONARCH_SLURM_ALLOW_UNAUTHENTICATED"

MIN_KEY_BYTES = 32

_NO_SECRET = b"known to everybody: trust_all_connections"


class NoKeyError(MonarchSlurmError, ValueError):
    """Workers and their program have no key in common, and may not do without."""


Key = bytes | str | os.PathLike[str]


def choose_secret(private_key: Key | None, ca: Key | None) -> tuple[bytes, bool]:
    """Return the secret to use, and whether everybody knows it.

    Args:
        private_key: the secret, or the path of its file; None takes the file that ``$MONARCH_SLURM_WORKER_KEY`` names.
        ca: None, the same key again, or ``"trust_all_connections"``: with a key, that is used all the same; without
            one, ``$MONARCH_SLURM_ALLOW_UNAUTHENTICATED`` must allow it.

    Raises:
        NoKeyError: there is no key, or it is too short.
        KeyFileError: the file cannot be trusted.
        ValueError: ``ca`` is another key.
    """
    given = [key for key in (private_key, None if ca == TRUST_ALL else ca) if key is not None]
    found = {_read(key) for key in given or filter(None, [os.environ.get(KEY_VARIABLE)])}
    if len(found) > 1:
        raise ValueError("private_key and ca differ: here both sides share one key; give it once")
    if found:
        return found.pop(), False
    if ca == TRUST_ALL and os.environ.get(ALLOW_VARIABLE, "0") not in ("", "0"):
        return _NO_SECRET, True
    raise NoKeyError(
        f"workers need a key (ca={ca!r}): without one, everybody who reaches their port runs code as you. Give workers "
        f"and program the same private_key (the path of a file of mode 0600, or {MIN_KEY_BYTES} random bytes), or name "
        f"that file in {KEY_VARIABLE}; monarch_slurm.actor.make_worker_key(path) makes one. For addresses of this "
        f"machine alone, {ALLOW_VARIABLE}=1 and ca={TRUST_ALL!r} do without"
    )


def make_key_file(path: os.PathLike[str] | str) -> Path:
    """Write a new secret to ``path`` (mode 0600), which must not exist yet; return the path."""
    fd = create_owned(Path(path))
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(MIN_KEY_BYTES) + "\n")
    return Path(path)


def derive_keys(secret: bytes) -> JobKeys:
    """Return the CURVE keys that ``secret`` stands for: the workers' pair and that of programs that attach to them."""
    pairs = []
    for role in (b"worker", b"program"):
        private = hashlib.blake2b(secret, digest_size=32, person=b"ms-" + role).digest()
        text = zmq.utils.z85.encode(private)
        pairs += [zmq.curve_public(text).decode(), text.decode()]
    return JobKeys(*pairs)


def _read(key: Key) -> bytes:
    if isinstance(key, bytes):
        secret, what = key, "the key"
    else:
        secret, what = _read_file(Path(key)), str(key)
    if len(secret) < MIN_KEY_BYTES:
        raise NoKeyError(f"{what} has {len(secret)} bytes; {MIN_KEY_BYTES} random ones or more are needed")
    return secret


def _read_file(path: Path) -> bytes:
    try:
        return read_owned(path, "its key", private=True).strip()
    except FileRefusedError as error:
        raise KeyFileError(str(error)) from None
    except FileNotFoundError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from None
