"""Plain TCP sockets between ranks: the floor that benchmarks hold a backend against. One thread, nothing but the kernel's work."""

import selectors
import socket
import time

PIECE = 256 * 1024
PORT = 29700


class Sockets:
    """Each rank owns a part: it receives the others' parts, sums them, and sends the sum to all. One thread, a socket
    to each peer, pieces of 256 KiB, results received in place: what is left is what the kernel takes, and the sum."""

    def __init__(self, size: int, rank: int, world: int, addresses: list[str]):
        import torch

        torch.set_num_threads(1)
        self.rank, self.world = rank, world
        self.tensor = torch.ones(size // 4)
        part = len(self.tensor) // world
        self.parts = [self.tensor[i * part : (i + 1) * part if i + 1 < world else None] for i in range(world)]
        self.theirs = {peer: torch.empty_like(self.parts[rank]) for peer in range(world) if peer != rank}
        self.sockets = {}
        listener = socket.create_server((addresses[rank], PORT), backlog=world)
        for peer in range(rank):
            self.sockets[peer] = self._dial(addresses[peer])
        for _ in range(rank + 1, world):
            connection, _ = listener.accept()
            self.sockets[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = connection
        listener.close()
        for connection in self.sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def close(self) -> None:
        for connection in self.sockets.values():
            connection.close()

    def _dial(self, address: str) -> socket.socket:
        for _ in range(600):
            try:
                connection = socket.create_connection((address, PORT))
            except OSError:
                time.sleep(0.05)
                continue
            connection.sendall(self.rank.to_bytes(4, "little"))
            return connection
        raise TimeoutError(f"nobody at {address}:{PORT}")

    def _exchange(self, to_send: dict, to_receive: dict) -> None:
        sends = {peer: memoryview(t.numpy()).cast("B") for peer, t in to_send.items()}
        receives = {peer: memoryview(t.numpy()).cast("B") for peer, t in to_receive.items()}
        with selectors.DefaultSelector() as selector:
            for peer, connection in self.sockets.items():
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            left = 2 * len(self.sockets)
            while left:
                for key, events in selector.select():
                    peer, connection = key.data, key.fileobj
                    if events & selectors.EVENT_READ and receives[peer]:
                        receives[peer] = receives[peer][connection.recv_into(receives[peer][:PIECE]) :]
                    if events & selectors.EVENT_WRITE and sends[peer]:
                        sends[peer] = sends[peer][connection.send(sends[peer][:PIECE]) :]
                    wanted = (selectors.EVENT_READ if receives[peer] else 0) | (
                        selectors.EVENT_WRITE if sends[peer] else 0
                    )
                    if wanted != key.events:
                        left -= (key.events ^ wanted).bit_count()
                        if wanted:
                            selector.modify(connection, wanted, peer)
                        else:
                            selector.unregister(connection)

    def once(self):
        own = self.parts[self.rank]
        self._exchange({peer: self.parts[peer] for peer in self.sockets}, self.theirs)
        for theirs in self.theirs.values():
            own.add_(theirs)
        self._exchange(dict.fromkeys(self.sockets, own), {peer: self.parts[peer] for peer in self.sockets})

    def align(self):
        import torch

        token = torch.zeros(1)
        self._exchange(dict.fromkeys(self.sockets, token), {peer: torch.zeros(1) for peer in self.sockets})

    def check(self) -> bool:
        self.tensor.fill_(1)
        self.once()
        return bool((self.tensor == self.world).all())

    def circle(self, size: int, step: int = 1) -> None:
        """Sends `size` bytes to the rank that is `step` further on, and receives as many from the one `step` before: one
        stream each way, of one piece again and again, so that memory takes no time."""
        piece = memoryview(bytearray(PIECE))
        left: dict[int, dict[int, int]] = {(self.rank + way) % self.world: {} for way in (step, -step)}
        left[(self.rank + step) % self.world][selectors.EVENT_WRITE] = size
        left[(self.rank - step) % self.world][selectors.EVENT_READ] = size
        with selectors.DefaultSelector() as selector:
            for peer, ways in left.items():
                selector.register(self.sockets[peer], sum(ways), ways)
            while selector.get_map():
                for key, events in selector.select():
                    ways, connection = key.data, key.fileobj
                    for way in [way for way in ways if way & events]:
                        part = piece[: ways[way]]
                        moved = connection.send(part) if way == selectors.EVENT_WRITE else connection.recv_into(part)
                        if not moved:
                            raise ConnectionError("a rank has closed its stream")
                        ways[way] -= moved
                        if not ways[way]:
                            del ways[way]
                            if ways:
                                selector.modify(connection, sum(ways), ways)
                            else:
                                selector.unregister(connection)
