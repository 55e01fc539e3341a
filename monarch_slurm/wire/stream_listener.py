"""Where the processes of a machine dial another one of the same user."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

from monarch_slurm.wire.admission import StrangerLog
from monarch_slurm.wire.guarded_listener import SHORTAGES, ShortageLog
from monarch_slurm.wire.origin import Origin
from monarch_slurm.wire.runtime_dir import check_private, check_socket_path
from monarch_slurm.wire.sockets import BindError
from monarch_slurm.wire.stream import StrangerError, check_peer

_BACKLOG = 4096


class StreamListener:
    """A listening Unix socket in a private folder.

    Args:
        path: of the socket, which is made.
        epoll: tells when somebody dials.
        kind: what dials, for messages.

    Raises:
        SocketPathError: the folder is not private, or the path is too long.
        BindError: it cannot be listened on.
    """

    def __init__(self, path: Path, epoll: select.epoll, kind: str) -> None:
        check_private(path.parent)
        check_socket_path(path)
        self._shortages = ShortageLog(f"cannot take another {kind}'s connection", f"each {kind} takes one")
        self._strangers = StrangerLog(str(path), "belong to other users")
        self._epoll = epoll
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(os.fspath(path))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise BindError(f"cannot listen on {path}: {error.strerror}") from None
        self._socket.setblocking(False)
        self.fd = self._socket.fileno()
        self.paused = False
        """Whether no connection is taken until `resume`: this process has no descriptor for one."""
        epoll.register(self.fd, select.EPOLLIN)

    def accept(self) -> socket.socket | None:
        """Return a connection with a process of this user; None if there is none to be had."""
        try:
            connection, _ = self._socket.accept()
            check_peer(connection)
        except StrangerError as error:
            self._strangers.note(Origin("", error.uid))
            connection.close()
        except OSError as error:
            if error.errno in SHORTAGES:
                self._shortages.note(error.errno)
                # Who dials stays in the queue, and would be reported over and over.
                self._epoll.modify(self.fd, 0)
                self.paused = True
        else:
            return connection
        return None

    def resume(self) -> None:
        """Take connections again."""
        self.paused = False
        self._epoll.modify(self.fd, select.EPOLLIN)

    def close(self) -> None:
        """Listen no more."""
        self._strangers.flush()
        self._socket.close()
