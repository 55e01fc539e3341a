"""The process of a worker that a rank of a torchrun program has started (`monarch_slurm.job.store_workers`).

It ends with that rank: the kernel closes the rank's end of the socket, however it ends.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading

from monarch_slurm.host.worker import Worker
from monarch_slurm.host.worker_address import WorkerAddress
from monarch_slurm.wire import BindError
from monarch_slurm.wire.shared_key import choose_secret, derive_keys
from monarch_slurm.wire.task_limits import start_thread


def main() -> int:
    """Serve until a program shuts this host down, or the rank that has started this worker is gone."""
    address, key_file, fd = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    rank = socket.socket(fileno=int(fd))
    rank.set_inheritable(False)
    try:
        worker = Worker(derive_keys(choose_secret(key_file, None)[0]), WorkerAddress.parse(address))
    except BindError as error:
        print(error, file=sys.stderr)
        return 1
    rank.sendall(b"+")

    def wait_for_rank() -> None:
        rank.recv(1)
        worker.stop()

    start_thread(threading.Thread(target=wait_for_rank, daemon=True))
    worker.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
