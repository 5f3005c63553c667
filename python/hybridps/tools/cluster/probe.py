"""Plain sockets between two cards: round trips, rates, clocks, the path's MTU."""

import contextlib
import errno
import hmac
import random
import socket
import statistics
import struct
import threading
import time

from hybridps.backend import load

PINGS = 50
FRAME = 1 << 20
CONNECT_SECONDS = 2.0
UDP_SECONDS = 0.15
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: never cut up, and do not believe what was learned
SECRET_SECONDS = 5.0  # for all of it
STRANGERS_MAX = 32  # connections at a time that have not yet shown the secret: each has a thread
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed by the other side")
        data += part
    return data


def _drain(connection: socket.socket) -> float:
    """Takes frames until an empty one; bytes per second, of what came after the first quarter of the time."""
    view = memoryview(bytearray(FRAME))
    arrivals, total = [], 0
    begin = time.monotonic()
    while True:
        size = struct.unpack("!I", _receive(connection, 4))[0]
        if size == 0:
            break
        if size > FRAME:
            raise ConnectionError("not a frame")
        left = size
        while left:
            count = connection.recv_into(view, left)
            if not count:
                raise ConnectionError("closed by the other side")
            left -= count
            total += count
            arrivals.append((time.monotonic(), total))
    if not arrivals:
        return 0.0
    end = arrivals[-1][0]
    start = begin + (end - begin) / 4
    at, had = next(entry for entry in arrivals if entry[0] >= start)
    return (total - had) / (end - at) if end > at else total / max(end - begin, 1e-9)


def _segments(connection: socket.socket) -> tuple[int, int]:
    """(segments that were sent, of these again) on this connection so far. tcpi_segs_out and tcpi_total_retrans of
    linux/tcp.h."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 144)
    if len(info) < 140:  # an older kernel
        return 0, 0
    return struct.unpack_from("=I", info, 136)[0], struct.unpack_from("=I", info, 100)[0]


def _pour(connection: socket.socket, seconds: float) -> None:
    frame = struct.pack("!I", FRAME) + bytes(FRAME)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection.sendall(frame)
    connection.sendall(struct.pack("!I", 0))


def port_range(text: str) -> range:
    """The ports of a valid HYBRIDPS_PORTS, as "20000-20099"; empty: any free port."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)


class Listener:
    """Answers the probes that come to one card: threads of its own, until close().

    Listens on a free port of `ports`, where a firewall may let only these through.
    """

    def __init__(self, address: str, secret: bytes, ports: range = range(0)):
        self._secret = secret
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)
        self._tcp, self._udp = self._listen(address, ports)
        self.port: int = self._tcp.getsockname()[1]
        self.udp_port: int = self._udp.getsockname()[1]
        for function in (self._accept, self._echo):
            threading.Thread(target=function, daemon=True).start()

    @staticmethod
    def _listen(address: str, ports: range) -> tuple[socket.socket, socket.socket]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in random.sample(ports, len(ports)) or [0]:
            udp = socket.socket(family, socket.SOCK_DGRAM)
            try:
                udp.bind((address, port))
                return socket.create_server((address, port), family=family, backlog=64), udp
            except OSError as error:
                udp.close()
                if not ports or error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(f"no port of HYBRIDPS_PORTS, {ports[0]} to {ports[-1]}, is free")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._tcp.accept()
            except OSError:
                return
            self._strangers.acquire()  # the next ones wait in the kernel's queue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _echo(self) -> None:
        while True:
            try:
                data, sender = self._udp.recvfrom(1 << 16)
                if hmac.compare_digest(data[:16], self._secret):
                    self._udp.sendto(data[16:24], sender)
            except OSError:
                return

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if not self._knows_secret(connection):
                return
            connection.settimeout(30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                order = connection.recv(1)
                if order == b"P":
                    came = time.time_ns()
                    connection.sendall(struct.pack("!QQ", came, time.time_ns()))
                elif order == b"S":
                    connection.sendall(struct.pack("!d", _drain(connection)))
                elif order == b"G":
                    _pour(connection, min(struct.unpack("!d", _receive(connection, 8))[0], 10))
                else:
                    return

    def _knows_secret(self, connection: socket.socket) -> bool:
        until, shown = time.monotonic() + SECRET_SECONDS, b""
        try:
            while len(shown) < 16:
                connection.settimeout(max(0.001, until - time.monotonic()))
                shown += (part := connection.recv(16 - len(shown)))
                if not part:
                    break
            return hmac.compare_digest(shown, self._secret)
        finally:
            self._strangers.release()

    def close(self) -> None:
        for one in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # else accept() keeps waiting
            one.close()


def _path_mtu(source: str, to: str, port: int, secret: bytes, mtu: int) -> int:
    """The largest packet that arrives uncut, `mtu` at most; 0: nothing is known, since none came back (UDP barred?)."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    if family != socket.AF_INET or mtu < 100:
        return 0
    headers = HEADERS[family]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        probe.bind((source, 0))
        probe.settimeout(UDP_SECONDS)
        number = 0

        def arrives(size: int) -> bool:
            nonlocal number
            for _ in range(3):
                number += 1
                mark = struct.pack("!Q", number)
                try:
                    probe.sendto((secret + mark).ljust(size - headers, b"\0"), (to, port))
                    while probe.recv(64) != mark:
                        pass
                    return True
                except OSError:  # too long for this card, or nothing came back in time
                    continue
            return False

        if arrives(mtu):
            return mtu
        low, high = 576, mtu
        if not arrives(low):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if arrives(middle) else (low, middle)
        return low


def _connect(source: str, to: str, port: int, secret: bytes, packet: int = 0) -> socket.socket:
    """`packet`: the largest that may be sent and asked for, where larger ones are known to be lost."""
    connection = socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET)
    try:
        if packet:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, packet - 40)
        connection.settimeout(CONNECT_SECONDS)
        connection.bind((source, 0))
        connection.connect((to, port))
    except BaseException:
        connection.close()
        raise
    connection.settimeout(30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(secret)
    return connection


def probe(own: dict, other: dict, secret: bytes, seconds: float) -> dict:
    """What a card is to another machine's: rates both ways (bytes/s), round trip (us), the other's clock minus this
    one's (s), the part of the packets there that had to be sent again."""
    mtu = min([65535, *filter(None, (own["mtu"], other["mtu"]))])  # what an IP packet holds at most
    try:
        path_mtu = _path_mtu(own["address"], other["address"], other["udp_port"], secret, mtu)
        packet = path_mtu if path_mtu < mtu else 0
        with _connect(own["address"], other["address"], other["port"], secret, packet) as connection:
            trips, offsets = [], []
            for _ in range(PINGS):
                left = time.time_ns()
                connection.sendall(b"P")
                came, went = struct.unpack("!QQ", _receive(connection, 16))
                back = time.time_ns()
                trips.append((back - left - (went - came)) / 1e3)
                offsets.append(((came - left) + (went - back)) / 2e9)
            best = min(range(PINGS), key=trips.__getitem__)
            connection.sendall(b"S")
            _pour(connection, seconds)
            there = struct.unpack("!d", _receive(connection, 8))[0]
            sent, again = _segments(connection)
            connection.sendall(b"G" + struct.pack("!d", seconds))
            back_rate = _drain(connection)
    except OSError as error:
        return {"error": str(error) or type(error).__name__}
    return {
        "rate": there,
        "rate_back": back_rate,
        "trip_us": statistics.median(trips),
        "trip_us_min": trips[best],
        "clock": offsets[best],
        "clock_error": trips[best] / 2e6,
        "path_mtu": path_mtu,
        "mtu": mtu,
        "sent_again": again / sent if sent else 0.0,
    }


def handshake(other: dict) -> int:
    """The round trip in us by the function of a job that looks for regions; 0: not known."""
    try:
        return load.load_extension().round_trip(other["address"], other["port"])
    except ImportError:  # said by the rank's record
        return 0


def reaches(own: dict, other: dict, secret: bytes) -> str:
    """Why a connection cannot be made; empty: it can."""
    try:
        with _connect(own["address"], other["address"], other["port"], secret) as connection:
            connection.sendall(b"P")
            _receive(connection, 16)
    except OSError as error:
        return str(error) or type(error).__name__
    return ""
