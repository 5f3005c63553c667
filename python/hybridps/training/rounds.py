"""Rounds that not every rank takes part in: what LocalSteps(staleness=...) runs on.

Every round is one operation of all ranks, in which those that are still computing contribute zeros: so all ranks see the
same rounds with the same bits, and weights of the group stay one thing. A thread on each rank, the courier, is there for
the rounds while the rank computes. Group rank 0 decides who takes part: the ranks that are ready, once they are `quorum`,
and never if a rank that is not among them could then only contribute to weights more than `staleness` rounds newer than
those it began with. A caller may give the participants of each round instead; then every bit is determined.

Taking a round's contributions together before the outer optimizer steps, and their weights by age, are FedBuff's (Nguyen
et al., "Federated Learning with Buffered Asynchronous Aggregation", arXiv 2106.06639): the mean of the participants'
contributions, each times (1 + age) ** -age_power, where age counts rounds that ended since the contributor got its weights.

Threads: `take_part`, `meet` and `end` in the caller's; the courier runs `contribute` and `merge`, one at a time, and on
rank 0 a second thread receives. Nothing is shared without a lock but what `contribute` and `merge` own while a round runs.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from hybridps.backend.groups import ORDER_TAG, READY_TAG, backend_of

_ABSENT = -1
_MEETING, _END = -1, -2  # in place of a round's number
_END_WITHIN_S = 5.0  # a failure ends what the threads wait for
_QUICKER = 0.75  # of the time that a rank took last: sooner than that it is not expected
_READY, _PAUSED, _ENDED = range(3)  # what a rank tells rank 0


class Rounds:
    """contribute(scale): begins the round's operation with this rank's part times scale, or with zeros (None); waits for it.
    merge(took_part): what came of it.

    A failure on any rank ends the rounds on all: `take_part`, `meet` and `end` raise it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        contribute: Callable[[float | None], None],
        merge: Callable[[bool], None],
        staleness: int,
        quorum: int,
        age_power: float,
        patience: float,
        schedule: Callable[[int], Iterable[int]] | None,
    ):
        self._group, self._contribute, self._merge = group, contribute, merge
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._staleness, self._quorum, self._power = staleness, quorum, age_power
        self._patience, self._schedule = patience, schedule
        self._error: BaseException | None = None
        self._done, self._resume = threading.Event(), threading.Event()
        self.rounds = 0
        self.ages: list[list[int]] = []  # of the last rounds, by rank; -1: did not take part
        # Rank 0.
        self._told: queue.Queue[tuple[int, int]] = queue.Queue()
        self._state = [_ABSENT] * self._size
        self._since = [0] * self._size  # the round whose beginning each rank's weights are of
        self._last_round_at = time.monotonic()
        self._began = [self._last_round_at] * self._size  # when each rank last went on computing, and
        self._took: list[float | None] = [None] * self._size  # how long it has taken, the last time
        self._threads = [threading.Thread(target=self._run, name="hybridps-rounds", daemon=True)]
        if self._rank == 0 and self._size > 1:
            self._threads.append(threading.Thread(target=self._receive, name="hybridps-ready", daemon=True))
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------------------------- of the rank itself

    def take_part(self) -> None:
        """This rank's contribution is ready; returns when a round has taken it."""
        self._tell(_READY)

    @contextlib.contextmanager
    def meet(self):
        """Every rank's courier stands still, and its caller is here, within the block; all ranks have to come."""
        self._tell(_PAUSED)
        try:
            yield
        finally:
            self._resume.set()

    def go_on_from(self, rounds: int) -> None:
        """Counts on from there, with weights that all have just got; within a meeting, on all ranks alike."""
        self._since = [rounds] * self._size
        self.rounds, self.ages = rounds, []

    def end(self) -> None:
        """When all ranks have called it, the last rounds are over. Until then this one goes on being there for others'."""
        self._tell(_ENDED)
        for thread in self._threads:
            thread.join()

    def _tell(self, what: int) -> None:
        self._done.clear()
        if self._error is None:  # _fail() sets it before the event
            if self._rank == 0:
                self._told.put((0, what))
            else:
                dist.send(torch.tensor([what]), group=self._group, group_dst=0, tag=READY_TAG)
            self._done.wait()
        if self._error is not None:
            # The program may destroy its groups next, and torch lets nobody issue operations meanwhile.
            for thread in self._threads:
                thread.join(_END_WITHIN_S)
            raise RuntimeError(f"hybridps: LocalSteps: the rounds have ended: {self._error}") from self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._done.set()
        self._told.put((0, _ENDED))
        with contextlib.suppress(Exception):
            backend_of(self._group).abort()  # so that the others hear of it
        self._resume.set()

    # ------------------------------------------------------------------------------------------------- the courier

    def _run(self) -> None:
        try:
            while self._error is None:
                order = self._next()
                number, ages = order[0], order[1:]
                if number == _END:
                    self._done.set()
                    return
                if number == _MEETING:
                    self._resume.clear()
                    self._done.set()
                    if self._error is None:
                        self._resume.wait()
                    continue
                age = ages[self._rank]
                count = sum(a != _ABSENT for a in ages)
                # The owner divides by the number of ranks.
                self._contribute(None if age == _ABSENT else (1 + age) ** -self._power * self._size / count)
                self.rounds = number + 1
                self.ages = [*self.ages[-255:], ages]
                self._merge(age != _ABSENT)
                if age != _ABSENT:
                    self._done.set()
        except BaseException as error:
            self._fail(error)

    def _next(self) -> list[int]:
        if self._rank != 0:
            order = torch.empty(1 + self._size, dtype=torch.int64)
            dist.recv(order, group=self._group, group_src=0, tag=ORDER_TAG)
            return order.tolist()
        chosen = self._decide()
        order = torch.tensor(chosen)
        for work in [dist.isend(order, group=self._group, group_dst=r, tag=ORDER_TAG) for r in range(1, self._size)]:
            work.wait()
        return chosen

    def _receive(self) -> None:
        try:
            ended = 0
            while ended < self._size - 1:
                what = torch.empty(1, dtype=torch.int64)
                sender = dist.recv(what, group=self._group, tag=READY_TAG)
                self._told.put((dist.get_group_rank(self._group, sender), int(what)))
                ended += int(what) == _ENDED
        except BaseException as error:
            self._fail(error)

    # --------------------------------------------------------------------------------------------- rank 0's decisions

    def _decide(self) -> list[int]:
        nobody = [_ABSENT] * self._size
        enough_since: float | None = None
        while True:
            wait = None
            working = [r for r in range(self._size) if self._state[r] in (_ABSENT, _READY)]
            if not working:
                if all(state == _ENDED for state in self._state):
                    return [_END, *nobody]
                if _ENDED in self._state:
                    ended = [r for r in range(self._size) if self._state[r] == _ENDED]
                    raise RuntimeError(
                        f"ranks {ended} have called close(), and the others state_dict() or load_state_dict(), which "
                        "need all ranks. What to do: make the same calls in the same order on every rank"
                    )
                self._state = [_ABSENT if state == _PAUSED else state for state in self._state]
                return [_MEETING, *nobody]
            ready = self._ready(working)
            if ready:
                now = time.monotonic()
                enough_since = enough_since or now
                # Those that are about to be ready too would else wait for the next round.
                until = enough_since + self._patience * (enough_since - self._last_round_at)
                if self._schedule is not None or now >= until or not self._expected(set(working) - set(ready), until):
                    return self._begin(ready)
                wait = until - now
            with contextlib.suppress(queue.Empty):
                rank, what = self._told.get(timeout=wait)
                self._state[rank] = what
                if what == _READY:
                    self._took[rank] = time.monotonic() - self._began[rank]
            if self._error is not None:
                raise self._error

    def _ready(self, working: list[int]) -> list[int]:
        """Who takes part in a round that may begin now; nobody: it may not."""
        ready = [r for r in working if self._state[r] == _READY]
        if self._schedule is not None:
            wanted = sorted(set(self._schedule(self.rounds)) & set(working))
            if not wanted:
                if not ready:
                    return []  # they may be about to leave
                raise ValueError(f"the schedule of round {self.rounds} names no rank that is still at work")
            for rank in working:
                if rank not in wanted and self.rounds + 1 - self._since[rank] > self._staleness:
                    raise ValueError(
                        f"the schedule leaves rank {rank} out of round {self.rounds}; the rank would then be more than "
                        f"staleness={self._staleness} rounds behind"
                    )
            return wanted if set(wanted) <= set(ready) else []
        if len(ready) < min(self._quorum, len(working)):
            return []
        late = [r for r in working if r not in ready and self.rounds + 1 - self._since[r] > self._staleness]
        return [] if late else ready

    def _expected(self, ranks: Iterable[int], until: float) -> bool:
        """Whether one of them may be ready by then: it was nearly as quick the last time, or there is no last time."""
        took = [(rank, self._took[rank]) for rank in ranks]
        return any(seconds is None or self._began[rank] + _QUICKER * seconds <= until for rank, seconds in took)

    def _begin(self, ranks: list[int]) -> list[int]:
        ages = [_ABSENT] * self._size
        for rank in ranks:
            ages[rank] = self.rounds - self._since[rank]
            self._since[rank] = self.rounds + 1
            self._state[rank] = _ABSENT
        self._last_round_at = time.monotonic()
        for rank in ranks:
            self._began[rank] = self._last_round_at
        return [self.rounds, *ages]
