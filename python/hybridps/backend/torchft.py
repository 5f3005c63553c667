"""A process group for torchft's Manager over hybridps; importable where torchft is.

    from hybridps.torchft import ProcessGroupHybrid
    manager = torchft.Manager(pg=ProcessGroupHybrid(timeout=timedelta(seconds=30)), ...)

Each quorum is a life of its own: members of all launchers find each other by the address that the Manager gives, whatever
their run ids. The engine and its connections stay from one to the next. docs/elastic.md has a whole job.
"""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import ProcessGroup as BaseProcessGroup
from torchft.process_group import ProcessGroupWrapper

from hybridps.backend.load import load_extension
from hybridps.backend.register import refuse_in_clear

__all__ = ["ProcessGroupHybrid"]


class ProcessGroupHybrid(ProcessGroupWrapper):
    """What torchft's Manager drives: configure() with each quorum, errored() after each step.

    timeout  of each operation, and of the making of a group
    compress, dedicated_servers  as in hybridps.Options
    Threads: as torchft calls it, from the trainer's thread and the Manager's; one configure(), abort() or shutdown() at a time.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), *, compress: str = "", dedicated_servers: bool = True):
        super().__init__(timeout=timeout)
        self._extension = load_extension()
        self._options = {"compress": compress, "dedicated_servers": dedicated_servers}
        self._hold = None  # on the engine, since the first configure()
        self._backend = None
        self._address = ""
        self._lock = threading.Lock()

    def getBackendName(self) -> str:
        return "torchft-hybridps"

    def configure(self, store_addr, replica_id, rank, world_size, quorum_id=None, *args, **kwargs) -> None:
        if self._hold is None:
            self._hold = self._extension.EngineHold()
        self._address = store_addr
        # A life that works is left with a goodbye, so that those who are behind may end what they are in; another is aborted.
        if self.errored() is None:
            self._leave(f"replica {replica_id} has gone on to another quorum of torchft ({quorum_id})")
        super().configure(store_addr, replica_id, rank, world_size, quorum_id, *args, **kwargs)

    def _create_pg(self, store, rank: int, world_size: int) -> BaseProcessGroup:
        # The address ends with quorum and rank in the replica group: nobody else meets there, and nobody twice.
        incarnation = self._address.partition("/")[2] or self._address
        options = self._extension.ProcessGroupHybrid.Options(
            timeout=self._timeout, incarnation=f"{incarnation} of {self._quorum_id}", **self._options
        )
        about = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=self._timeout,
            group_id="torchft",
            global_ranks_in_group=[],
            enable_reconfigure=False,
        )
        refuse_in_clear(about)
        backend = self._extension.create_backend(about, options, time.monotonic())
        group = BaseProcessGroup(store, rank, world_size)
        group._set_default_backend(BaseProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), BaseProcessGroup.BackendType.CUSTOM, backend)
        if torch.cuda.is_available():
            group._register_backend(torch.device("cuda"), BaseProcessGroup.BackendType.CUSTOM, backend)
        with self._lock:
            self._backend = backend
        return group

    def errored(self):
        """The failure of the present life, which ends with the next configure(); None while it works."""
        with self._lock:
            backend = self._backend
        if backend is None or backend.get_error() == ErrorType.SUCCESS:
            return None
        return RuntimeError(f"hybridps: the process group has failed: {backend.get_error()}")

    def _leave(self, reason: str) -> None:
        with self._lock:
            backend, self._backend = self._backend, None
        self._pg = None
        if backend is not None:
            backend.leave_for_next(reason)

    def abort(self, errored: bool = True) -> None:
        super().abort(errored)
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def shutdown(self) -> None:
        self._leave("a replica has shut its process group down")
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end()
