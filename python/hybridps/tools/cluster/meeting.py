"""All ranks together, through torch's Store: who measures when, and who did not come."""

import contextlib
import json
import os
import socket
import time
from datetime import timedelta

from hybridps.tools.cluster.probe import CONNECT_SECONDS, Listener, handshake, port_range, probe, reaches

PIECE = 400
PAIR_SECONDS = 10.0  # the most that a pair of cards takes beside its rates: a path that is shut, the search for its MTU


class Complaint(RuntimeError):
    """Why there is nothing to look at, for the user to read."""


class Meeting:
    """The ranks' records and results, through torch's Store. Every wait has an end, and names who did not come."""

    def __init__(self, store, rank: int, world: int, timeout: float):
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout

    def put(self, key: str, value: object) -> None:
        # In pieces that fit a small packet, one at a time: where large packets are lost the Store would hang on the
        # rest.
        data = json.dumps(value).encode()
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}/piece/{number}", piece)
            self.store.check([f"{key}/piece/{number}"])
        self.store.set(key, str(len(pieces)))

    def _take(self, key: str) -> dict:
        return json.loads(
            b"".join(self.store.get(f"{key}/piece/{number}") for number in range(int(self.store.get(key))))
        )

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
    """Which card talks to which: those of one network; a card that shares none, with that at its place or the first."""
    pairs = []
    for index, card in enumerate(own):
        same = [at for at, other in enumerate(others) if card["network"] and other["network"] == card["network"]]
        pairs += [(index, at) for at in same or ([index] if index < len(others) else [0] if others else [])]
    return pairs


def examine(meeting: Meeting, own: dict, seconds: float) -> dict | None:
    """The whole examination; what was found, on rank 0, else None."""
    meeting.put(f"record/{meeting.rank}", own)
    if meeting.rank == 0:
        records = meeting.collect("record", list(range(meeting.world)))
        machines: dict[str, list[int]] = {}
        for rank, one in enumerate(records):
            machines.setdefault(one["machine"], []).append(rank)
        most = max(len(one["cards"]) for one in records)
        meeting.put(
            "machines", {"ranks": list(machines.values()), "secret": os.urandom(16).hex(), "cards": max(1, most)}
        )
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
            "ranks": [
                {key: one[key] for key in ("host", "versions", "settings", "same", "problems", "cards")}
                for one in records
            ],
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
    ports = port_range(own["settings"].get("PORTS", ""))
    for card in own["cards"]:
        try:
            listeners.append(Listener(card["address"], secret, ports))
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
                    path["handshake_us"] = handshake(all_cards[other][b])  # first: the rates would make a queue
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
