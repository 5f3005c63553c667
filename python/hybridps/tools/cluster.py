"""`hybridps doctor --cluster`: what the machines of a job are to each other, before a job is tried on them.

    torchrun --nnodes 4 ... -m hybridps doctor --cluster

Every rank says what it is made of and what its settings come to (as `hybridps doctor` does); the first rank of each machine
opens plain TCP and UDP sockets on the network cards that a job would use and tries those of all others. So it needs torch's
Store and nothing that hybridps connects: it works where a job does not start.

Pairs take turns: in each round every machine is in one pair at most, so that no card is measured twice at a time; n machines
need n - 1 rounds (n where n is odd). Round trips and clocks are from one connection's shortest and median exchanges, a rate is
what arrives over one connection, its first quarter left out: beyond some 20 Gbit/s it says what one core can do in Python.
The path's MTU is the largest datagram that arrives without being cut up.
"""

import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import struct
import sys
import threading
import time
from datetime import timedelta

from hybridps.tools.output import plot_complaint, table

PINGS = 50
FRAME = 1 << 20
PIECE = 400
CONNECT_SECONDS = 2.0
PAIR_SECONDS = 10.0  # the most that a pair of cards takes beside its rates: a path that is shut, the search for its MTU
UDP_SECONDS = 0.15
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: never cut up, and do not believe what was learned
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP
SLOW = 0.7  # a card or path that carries less than this part of the others' median is said to be slow
# What may differ from machine to machine by its meaning, and is no matter for a note.
OF_ONE_MACHINE = {"NODE", "INTERFACE", "DATA_INTERFACES", "NIC_GBPS", "TOKEN", "TOKEN_FILE", "STATS_FILE", "LOG_LEVEL"}


class Complaint(RuntimeError):
    """Why there is nothing to look at, for the user to read."""


def _read(path: str, default: str = "?") -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return default


def machine_identity() -> str:
    """Ranks with the same one are of one machine: HYBRIDPS_NODE, else the boot and the network namespace."""
    given = os.environ.get("HYBRIDPS_NODE", "").strip()
    if given:
        return f"node {given}"
    namespace = "?"
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{_read('/proc/sys/kernel/random/boot_id', socket.gethostname())} {namespace}"


def _mtu(card: str) -> int:
    text = _read(f"/sys/class/net/{card}/mtu", "0")
    return int(text) if text.isdigit() else 0


def record(interfaces: list[tuple[str, str, str, str]]) -> dict:
    """What this rank is, and what its settings come to. `interfaces`: name, state, address, MTU of each."""
    from hybridps.backend import load

    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a job raises the soft limit
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found: dict = {
        "host": socket.gethostname(),
        "machine": machine_identity(),
        "pid": os.getpid(),
        "versions": {"python": platform.python_version(), "kernel": platform.release()},
        "cores": len(os.sched_getaffinity(0)),
        "nofile": nofile if nofile != resource.RLIM_INFINITY else 1 << 30,
        "memlock": memlock if memlock != resource.RLIM_INFINITY else -1,
        "settings": {},
        "same": [],
        "problems": [],
        "cards": [],
        "rdma": False,
        "descriptors": {"own": 0, "remote": 0, "local": 0},  # of a rank: without others; for each on another machine, and on its own
    }
    try:
        import torch

        info = load.build_info()
        found["versions"] |= {
            "torch": torch.__version__,
            "hybridps": info.VERSION,
            "hybridps for torch": info.TORCH_MINOR,
        }
        extension = load.load_extension()
        try:
            found["versions"]["UCX"] = ".".join(map(str, load.ucx_version(load.load_ucx(info))))
        except ImportError:
            found["versions"]["UCX"] = "none"  # check_settings() says where that is a problem
        for row in extension.config_table()[0]:
            name = row["name"].removeprefix("HYBRIDPS_")
            if row["source"] != "default" and row["value"]:
                found["settings"][name] = "(secret)" if name == "TOKEN" else row["value"]
            if "same on all ranks" in row["doc"] or name == "GRANT_CHUNKS":
                found["same"].append(name)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        first = int(os.environ.get("RANK", "0")) == 0
        checked = [extension.check_settings(rank, ranks, first and rank == 0) for rank in range(ranks)]
        found["problems"] += dict.fromkeys(problem for one in checked for problem in one["problems"])
        found["rdma"] = any(one["rdma"] for one in checked)
        ways = max(one["data_ways"] for one in checked)
        own = extension.descriptors_needed(0, 0, ways)
        found["descriptors"] = {
            "own": own,
            "remote": extension.descriptors_needed(1, 0, ways) - own,
            "local": extension.descriptors_needed(0, 1, ways) - own,
        }
        cards = {nic["name"]: nic for one in checked for nic in one["nics"] if nic["address"]}
        if not cards and checked[0]["control"]:  # RDMA ports have no address of their own
            name = checked[0]["control"]
            address = next((row[2] for row in interfaces if row[0] == name), "-")
            if address != "-":
                cards = {name: {"name": name, "address": address, "network": "", "gbps": 0.0}}
        found["cards"] = [{**nic, "mtu": _mtu(name)} for name, nic in cards.items()]
    except ImportError as error:
        found["problems"].append(str(error))
    return found


# The probes ----------------------------------------------------------------------------------------------------------


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


def _pour(connection: socket.socket, seconds: float) -> None:
    frame = struct.pack("!I", FRAME) + bytes(FRAME)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection.sendall(frame)
    connection.sendall(struct.pack("!I", 0))


class Listener:
    """Answers the probes that come to one card: threads of its own, until close()."""

    def __init__(self, address: str, secret: bytes):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret
        self._tcp = socket.create_server((address, 0), family=family, backlog=64)
        self.port: int = self._tcp.getsockname()[1]
        self._udp = socket.socket(family, socket.SOCK_DGRAM)
        self._udp.bind((address, 0))
        self.udp_port: int = self._udp.getsockname()[1]
        for function in (self._accept, self._echo):
            threading.Thread(target=function, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._tcp.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _echo(self) -> None:
        while True:
            try:
                data, sender = self._udp.recvfrom(1 << 16)
                if data[:16] == self._secret:
                    self._udp.sendto(data[16:24], sender)
            except OSError:
                return

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, 16) != self._secret:
                return
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

    def close(self) -> None:
        for one in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # else accept() keeps waiting
            one.close()


def _path_mtu(source: str, to: str, port: int, secret: bytes, mtu: int) -> int:
    """The largest packet that arrives uncut, `mtu` at most; 0: none came back, so nothing is known (UDP may be barred)."""
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
    """What a card is to another machine's: rates both ways (bytes/s), round trip (us), the other's clock minus this one's (s)."""
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
    }


def reaches(own: dict, other: dict, secret: bytes) -> str:
    """Why a connection cannot be made; empty: it can."""
    try:
        with _connect(own["address"], other["address"], other["port"], secret) as connection:
            connection.sendall(b"P")
            _receive(connection, 16)
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair (lower, higher) once, in rounds in which nobody is twice: the circle method of tournaments."""
    places = [*range(count), *([-1] if count % 2 else [])]
    made = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        made.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return made


def card_pairs(own: list[dict], others: list[dict]) -> list[tuple[int, int]]:
    """Which card talks to which: those of one network; a card that shares none, with the one at its place, or the first."""
    pairs = []
    for index, card in enumerate(own):
        same = [at for at, other in enumerate(others) if card["network"] and other["network"] == card["network"]]
        pairs += [(index, at) for at in same or ([index] if index < len(others) else [0] if others else [])]
    return pairs


# Together ------------------------------------------------------------------------------------------------------------


class Meeting:
    """The ranks' records and results, through torch's Store. Every wait has an end, and names who did not come."""

    def __init__(self, store, rank: int, world: int, timeout: float):
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout

    def put(self, key: str, value: object) -> None:
        # In pieces that fit a small packet, one at a time: where large packets are lost the Store would hang on the rest.
        data = json.dumps(value).encode()
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}/piece/{number}", piece)
            self.store.check([f"{key}/piece/{number}"])
        self.store.set(key, str(len(pieces)))

    def _take(self, key: str) -> dict:
        return json.loads(b"".join(self.store.get(f"{key}/piece/{number}") for number in range(int(self.store.get(key)))))

    def get(self, key: str, who: str) -> dict:
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
        except Exception as error:  # DistStoreError, of a type that torch does not export
            raise Complaint(f"{who} did not answer within {self.timeout:g} s ({str(error).splitlines()[0]})") from None
        return self._take(key)

    def collect(self, what: str, ranks: list[int], more: float = 0.0) -> list[dict]:
        """Of all of them; `more`: seconds that their work takes, beside the time in which a rank has to come."""
        patience = self.timeout + more
        deadline = time.monotonic() + patience
        missing = list(ranks)
        while missing:
            missing = [rank for rank in missing if not self.store.check([f"{what}/{rank}"])]
            if missing and time.monotonic() > deadline:
                raise Complaint(f"ranks {missing} of {self.world} did not come within {patience:g} s ({what})")
            if missing:
                time.sleep(0.02)
        return [self._take(f"{what}/{rank}") for rank in ranks]


def join(timeout: float) -> Meeting:
    """Meets the others as init_process_group() would."""
    import torch.distributed as dist

    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise Complaint(
            f"doctor --cluster is run by a launcher on all machines, and {', '.join(missing)} is not set here: "
            "torchrun --nnodes 2 --node-rank 0 --master-addr HOST -m hybridps doctor --cluster"
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # As torch's rendezvous makes it, but that it does not wait for all: who is missing is to be named.
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(host, int(port), world, serves, timedelta(seconds=timeout), wait_for_workers=False)
    except Exception as error:
        raise Complaint(f"torch's Store at {host}:{port} cannot be reached: {str(error).splitlines()[0]}") from error
    return Meeting(dist.PrefixStore("hybridps/doctor", store), rank, world, timeout)


def examine(meeting: Meeting, own: dict, seconds: float) -> dict | None:
    """The whole examination; what was found, on rank 0, else None."""
    meeting.put(f"record/{meeting.rank}", own)
    if meeting.rank == 0:
        records = meeting.collect("record", list(range(meeting.world)))
        machines: dict[str, list[int]] = {}
        for rank, one in enumerate(records):
            machines.setdefault(one["machine"], []).append(rank)
        most = max(len(one["cards"]) for one in records)
        meeting.put("machines", {"ranks": list(machines.values()), "secret": os.urandom(16).hex(), "cards": max(1, most)})
    plan = meeting.get("machines", "rank 0")
    ranks, secret = plan["ranks"], bytes.fromhex(plan["secret"])
    leaders = [members[0] for members in ranks]
    result = None
    if meeting.rank in leaders:
        _measure(meeting, own, leaders, secret, seconds)
    if meeting.rank == 0:
        cards = [one["cards"] for one in meeting.collect("cards", leaders)]
        measured = meeting.collect("measured", leaders)  # rank 0 is one of them, and has been through all rounds
        result = {
            "nodes": [
                {
                    "ranks": members,
                    **{key: records[members[0]][key] for key in ("host", "cores", "versions", "rdma", "descriptors")},
                    "nofile": min(records[rank]["nofile"] for rank in members),
                    "memlock": min(records[rank]["memlock"] for rank in members),
                    "cards": cards[index],
                    "servers": measured[index]["servers"],
                }
                for index, members in enumerate(ranks)
            ],
            "ranks": [{key: one[key] for key in ("host", "versions", "settings", "same", "problems", "cards")} for one in records],
            "paths": [path for one in measured for path in one["paths"]],
        }
        meeting.put("done", {})
        with contextlib.suppress(Complaint):  # who has died meanwhile is no news of the network
            Meeting(meeting.store, 0, meeting.world, 10).collect("gone", list(range(1, meeting.world)))
    else:
        meeting.timeout += 60 + 2 * len(leaders) * plan["cards"] ** 2 * (2 * seconds + PAIR_SECONDS)
        meeting.get("done", "rank 0")
        meeting.put(f"gone/{meeting.rank}", {})  # rank 0 may be the one that serves the Store
    return result


def _measure(meeting: Meeting, own: dict, leaders: list[int], secret: bytes, seconds: float) -> None:
    listeners, cards, errors = [], [], []
    for card in own["cards"]:
        try:
            listeners.append(Listener(card["address"], secret))
            cards.append({**card, "port": listeners[-1].port, "udp_port": listeners[-1].udp_port})
        except OSError as error:
            errors.append({"card": card["name"], "error": f"nothing can listen on {card['address']}: {error}"})
    try:
        meeting.put(f"cards/{meeting.rank}", {"cards": cards})
        all_cards = [one["cards"] for one in meeting.collect("cards", leaders)]
        me, paths = leaders.index(meeting.rank), []
        # A round lasts as long as the two machines of it with the most pairs of cards take.
        most = max((len(card_pairs(a, b)) for a in all_cards for b in all_cards), default=0)
        longest = most * (2 * seconds + PAIR_SECONDS)
        for number, pairs in enumerate(rounds(len(leaders))):
            mine = next((pair for pair in pairs if me in pair), None)
            if mine:
                first = mine[0] == me
                other = mine[1] if first else mine[0]
                for a, b in card_pairs(cards, all_cards[other]):
                    path = {"from": me, "to": other, "card": cards[a]["name"], "to_card": all_cards[other][b]["name"]}
                    if first:
                        found = probe(cards[a], all_cards[other][b], secret, seconds)
                    else:  # the first one measures both ways; that they can connect is not the same both ways
                        found = {"error": reaches(cards[a], all_cards[other][b], secret)}
                    paths.append(path | found)
            meeting.put(f"round/{number}/{meeting.rank}", {})
            meeting.collect(f"round/{number}", leaders, longest)
        servers = {}
        for place in filter(None, (part.strip() for part in own["settings"].get("SERVERS", "").split(","))):
            host, _, port = place.rpartition(":")
            begin = time.monotonic()
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
                servers[place] = {"ms": (time.monotonic() - begin) * 1e3}
            except (OSError, ValueError) as error:
                servers[place] = {"error": str(error) or type(error).__name__}
        for entry in errors:
            paths.append({"from": me, "to": me, "to_card": "", **entry})
        meeting.put(f"measured/{meeting.rank}", {"paths": paths, "servers": servers})
        meeting.collect("measured", leaders)  # nobody stops listening before all are done
    finally:
        for listener in listeners:
            listener.close()


# What it means -------------------------------------------------------------------------------------------------------


def directed(result: dict) -> dict[tuple[tuple[int, str], tuple[int, str]], dict]:
    """(node, card) to (node, card): the path in that direction: rate, trip_us, or error."""
    found = {}
    for path in result["paths"]:
        here, there = (path["from"], path["card"]), (path["to"], path["to_card"])
        if path.get("error"):
            found[here, there] = {"error": path["error"]}
        elif "rate" in path:
            shared = {key: path[key] for key in ("trip_us", "path_mtu", "mtu")}
            found[here, there] = {**shared, "rate": path["rate"], "clock": path["clock"], "clock_error": path["clock_error"]}
            back = {**shared, "rate": path["rate_back"], "clock": -path["clock"], "clock_error": path["clock_error"]}
            found.setdefault((there, here), back)
    return found


def _differing(values: dict[str, list[str]]) -> str:
    """ "2.15.0 on boxa; 2.14.1 on boxb, boxc"."""
    return "; ".join(f"{value} on {', '.join(dict.fromkeys(hosts))}" for value, hosts in values.items())


def verdict(result: dict) -> tuple[list[str], list[str]]:
    """(problems, notes): what keeps a job from starting or being right, and what makes it slow or is worth knowing."""
    problems: list[str] = []
    notes: list[str] = []
    nodes, paths = result["nodes"], directed(result)

    def name(end: tuple[int, str]) -> str:
        node, card = end
        address = next((one["address"] for one in nodes[node]["cards"] if one["name"] == card), "")
        return f"{nodes[node]['host']} ({card}{' ' + address if address else ''})"

    for rank, one in enumerate(result["ranks"]):
        for problem in one["problems"]:
            problems.append(f"rank {rank} on {one['host']}: {problem}")
    for index, node in enumerate(nodes):
        if not node["cards"] and not result["ranks"][node["ranks"][0]]["problems"]:
            problems.append(f"{node['host']}: no network card with an address was found (node {index})")

    # Versions and settings.
    for what in ("hybridps", "hybridps for torch", "torch", "UCX", "python"):
        values: dict[str, list[str]] = {}
        for one in result["ranks"]:
            values.setdefault(one["versions"].get(what, "none"), []).append(one["host"])
        if len(values) > 1:
            serious = what.startswith("hybridps")
            advice = ": install the same on all machines, builds of different versions refuse each other" if serious else ""
            (problems if serious else notes).append(f"{what} differs{advice}: {_differing(values)}")
    same = {setting for one in result["ranks"] for setting in one["same"]}
    for setting in sorted({key for one in result["ranks"] for key in one["settings"]} - OF_ONE_MACHINE):
        values = {}
        for one in result["ranks"]:
            if one["cards"]:  # else its settings were not read
                values.setdefault(one["settings"].get(setting, "the default"), []).append(one["host"])
        if len(values) > 1:
            text = f"HYBRIDPS_{setting} differs: {_differing(values)}"
            if setting in same:
                problems.append(f"{text}; it must be the same on all ranks")
            elif setting != "SERVERS" or nodes[0]["servers"]:
                notes.append(text)

    # Who reaches whom.
    for (here, there), path in paths.items():
        if path.get("error") and here[0] == there[0]:
            problems.append(f"{name(here)}: {path['error']}")
        elif path.get("error"):
            problems.append(
                f"{name(here)} cannot reach {name(there)}: {path['error']}. A firewall or no route: let TCP through between the "
                "machines, or choose cards that reach each other with HYBRIDPS_INTERFACE and HYBRIDPS_DATA_INTERFACES"
            )

    # MTU.
    told = set()
    for (here, there), path in paths.items():
        if 0 < path.get("path_mtu", 0) < path.get("mtu", 0) and frozenset((here, there)) not in told:
            told.add(frozenset((here, there)))
            problems.append(
                f"between {name(here)} and {name(there)} packets of more than {path['path_mtu']} bytes are lost, though the cards "
                f"allow {path['mtu']}: connections will hang. Set both cards' MTU to {path['path_mtu']}, or mend what is between"
            )
    mtus: dict[str, list[str]] = {}
    for node in nodes:
        for card in node["cards"]:
            mtus.setdefault(str(card["mtu"]), []).append(f"{node['host']} ({card['name']})")
    if len(mtus) > 1:
        notes.append(f"the cards' MTU differs: {_differing(mtus)}")

    # Rates: a card that sends or receives less than the others, else a path.
    rates = {ends: path["rate"] for ends, path in paths.items() if path.get("rate")}
    if len(rates) > 2:
        usual = statistics.median(rates.values())
        slow_cards = set()
        for end in dict.fromkeys(end for ends in rates for end in ends):
            for way, at in (("sends", 0), ("receives", 1)):
                own = [rate for ends, rate in rates.items() if ends[at] == end]
                if own and max(own) < SLOW * usual:
                    slow_cards.add(end)
                    notes.append(
                        f"{name(end)} {way} {max(own) * 8e-9:.3g} Gbit/s at most, where {usual * 8e-9:.3g} are usual here: look at its "
                        "link, or let it own less (HYBRIDPS_NIC_GBPS; from 3 nodes on hybridps finds it while it runs)"
                    )
        for (here, there), rate in rates.items():
            if rate < SLOW * usual and not {here, there} & slow_cards:
                notes.append(f"{name(here)} to {name(there)}: {rate * 8e-9:.3g} Gbit/s, where {usual * 8e-9:.3g} are usual here")
    for index, node in enumerate(nodes):
        for card in node["cards"]:
            best = max((rate for ends, rate in rates.items() if ends[0] == (index, card["name"])), default=0)
            if card["gbps"] and best and best * 8e-9 < 0.5 * card["gbps"]:
                notes.append(
                    f"{name((index, card['name']))}: one connection carries {best * 8e-9:.3g} of {card['gbps']:g} Gbit/s; "
                    "where a job is as slow, try HYBRIDPS_DATA_SOCKETS=4"
                )

    # Clocks, servers, limits.
    for index, (offset, error) in clocks(result).items():
        if abs(offset) > 1 + error:
            notes.append(f"the clock of {nodes[index]['host']} is {offset:+.1f} s off that of {nodes[0]['host']}: logs will not fit together")
    for node in nodes:
        for place, found in node["servers"].items():
            if found.get("error"):
                problems.append(f"{node['host']} cannot reach the dedicated server {place}: {found['error']}")
    ranks = sum(len(node["ranks"]) for node in nodes)
    for node in nodes:
        if ranks_allowed(node) < ranks:
            problems.append(
                f"{node['host']}: {node['nofile']} file descriptors (ulimit -Hn) are enough for jobs of about {ranks_allowed(node)} "
                f"ranks, {len(node['ranks'])} of them here, and this one has {ranks}: raise the limit"
            )
        if node["rdma"] and 0 <= node["memlock"] < 1 << 30:
            problems.append(
                f"{node['host']}: {node['memlock'] >> 10} KiB may be locked (ulimit -l), RDMA needs more: set it to unlimited"
            )
    return problems, notes


def ranks_allowed(node: dict) -> int:
    """Of how many ranks a job may be with its limit of descriptors and as many ranks there as now."""
    of, here = node["descriptors"], len(node["ranks"])
    free = node["nofile"] - of["own"] - (here - 1) * of["local"]
    return here + max(0, free) // max(1, of["remote"]) if free >= 0 else 0


def clocks(result: dict) -> dict[int, tuple[float, float]]:
    """Of each node but the first, where known: (its clock minus the first's, error of that), in seconds."""
    found = {}
    for (here, there), path in directed(result).items():
        if here[0] == 0 and there[0] != 0 and "clock" in path:
            best = found.get(there[0], (0.0, float("inf")))
            if path["clock_error"] < best[1]:
                found[there[0]] = (path["clock"], path["clock_error"])
    return found


# Shown ---------------------------------------------------------------------------------------------------------------

MATRIX_MAX = 16  # ends; above, --json and --picture have it


def matrix(result: dict, value: str, scale: float) -> tuple[list[str], list[list[float | None]]]:
    """(names of the cards, value from each to each)."""
    ends = [(index, card["name"]) for index, node in enumerate(result["nodes"]) for card in node["cards"]]
    paths = directed(result)
    names = [f"{result['nodes'][node]['host']}:{card}" for node, card in ends]
    if len(set(names)) != len(names):  # emulated nodes of one host
        names = [f"{node}:{card}" for node, card in ends]
    rows = []
    for here in ends:
        cells = [paths.get((here, there), {}).get(value) for there in ends]
        rows.append([None if cell is None else cell * scale for cell in cells])
    return names, rows


def report(result: dict) -> list[str]:
    nodes = result["nodes"]
    offsets = clocks(result)
    rows = [["NODE", "HOST", "RANKS", "CARDS", "MTU", "CORES", "TORCH", "HYBRIDPS", "CLOCK", "RANKS BY ulimit -Hn"]]
    for index, node in enumerate(nodes):
        clock = "0" if index == 0 else "?"
        if index in offsets:
            clock = f"{offsets[index][0] * 1e3:+.2f} ms +-{offsets[index][1] * 1e3:.2f}"
        rows.append(
            [
                str(index),
                node["host"],
                ",".join(map(str, node["ranks"])) if len(node["ranks"]) <= 8 else f"{node['ranks'][0]}...{node['ranks'][-1]}",
                ", ".join(f"{card['name']} {card['address']}" for card in node["cards"]) or "-",
                ", ".join(str(card["mtu"]) for card in node["cards"]) or "-",
                str(node["cores"]),
                node["versions"].get("torch", "-"),
                node["versions"].get("hybridps", "-"),
                clock,
                str(ranks_allowed(node)),
            ]
        )
    lines = [table(rows), ""]
    for title, value, scale, digits in (
        ("Gbit/s from the row's card to the column's, one connection", "rate", 8e-9, ".3g"),
        ("round trip in us", "trip_us", 1, ".0f"),
        ("largest packet that arrives, bytes (0: not known)", "path_mtu", 1, ".0f"),
    ):
        names, values = matrix(result, value, scale)
        known = [cell for row in values for cell in row if cell is not None]
        if not known:
            continue
        if len(names) <= MATRIX_MAX:
            grid = [["", *names]]
            for name, row in zip(names, values, strict=True):
                grid.append([name, *("-" if cell is None else format(cell, digits) for cell in row)])
            lines += [title, table(grid), ""]
        else:
            span = f"{min(known):{digits}} to {max(known):{digits}}, median {statistics.median(known):{digits}}"
            lines += [f"{title}: {span}", ""]
    places = {place for node in nodes for place in node["servers"]}
    if places:
        grid = [["SERVER", *(node["host"] for node in nodes)]]
        for place in sorted(places):
            found = [node["servers"].get(place, {"error": "not asked"}) for node in nodes]
            grid.append([place, *(one.get("error") or f"{one['ms']:.1f} ms" for one in found)])
        lines += [table(grid), ""]
    return lines


def picture(result: dict, path: str) -> None:
    """The matrices of rates and round trips, as one image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 2, figsize=(11, 5))
    for place, (title, value, scale) in zip(
        places, (("Gbit/s, one connection", "rate", 8e-9), ("round trip, us", "trip_us", 1)), strict=True
    ):
        names, values = matrix(result, value, scale)
        image = place.imshow([[float("nan") if cell is None else cell for cell in row] for row in values], cmap="viridis")
        place.set_xticks(range(len(names)), names, rotation=45, ha="right")
        place.set_yticks(range(len(names)), names)
        place.set_xlabel("to")
        place.set_ylabel("from")
        place.set_title(title)
        if len(names) <= MATRIX_MAX:
            for y, row in enumerate(values):
                for x, cell in enumerate(row):
                    if cell is not None:
                        color = "black" if image.norm(cell) > 0.6 else "white"
                        place.text(x, y, f"{cell:.3g}", ha="center", va="center", color=color, fontsize=8)
        figure.colorbar(image, ax=place, shrink=0.8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(arguments, interfaces: list[tuple[str, str, str, str]]) -> int:
    """The command; prints on rank 0, whose exit status says whether a job can run. 1 on a rank that could not take part."""
    try:
        if arguments.picture:
            if complaint := plot_complaint():
                raise Complaint(f"--picture: {complaint}")
        meeting = join(arguments.timeout)
        result = examine(meeting, record(interfaces), arguments.seconds)
    except Complaint as error:
        print(f"hybridps doctor --cluster: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # of torch's Store: the rank that serves it has gone
        print(f"hybridps doctor --cluster: the Store of the job was lost: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    if result is None:
        return 0
    problems, notes = verdict(result)
    for line in report(result):
        print(line)
    for note in notes:
        print(f"note: {note}")
    for problem in problems:
        print(f"problem: {problem}")
    if arguments.json:
        try:
            with open(arguments.json, "w") as file:
                json.dump({**result, "problems": problems, "notes": notes}, file, indent=1)
        except OSError as error:
            problems.append(f"--json: {error}")
            print(f"problem: {problems[-1]}")
    if arguments.picture:
        picture(result, arguments.picture)
    print("not usable as it is" if problems else "ok")
    return 1 if problems else 0
