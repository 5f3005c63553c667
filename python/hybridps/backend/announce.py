"""Tells the other ranks of a group that this one cannot load the extension, which would tell them itself.

The bytes are those of csrc/hybridps/bootstrap/rendezvous.cpp (`failed`), the key that of incarnation.cpp.
"""

import contextlib
import hmac
import os
import re
import socket
import struct
import threading
import time

_MAGIC = 0x67535048
_CODE_CLOSED = 7  # core::Code::kClosed
_attempts: dict[str, int] = {}


def printable(text: str) -> str:
    r"""Text from outside may be no UTF-8, and Python holds its bytes as lone surrogates: what core::printable() makes
    of the same bytes, "\xff"."""
    return re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def failed(text: str, wall_ms: int, rank: int) -> bytes:
    body = printable(text).encode()[:4096]
    return struct.pack("<IBQII", _MAGIC, _CODE_CLOSED, wall_ms, rank, len(body)) + body + struct.pack("<I", 0)


def is_encrypted() -> bool:
    """As csrc/hybridps/core/config.cpp reads the environment: gloo's certificates are enough where gloo is asked for TLS."""

    def has(name: str) -> str:
        return os.environ.get(name, "").strip()

    files = "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT"
    as_gloo = has("GLOO_DEVICE_TRANSPORT").upper() == "TCP_TLS" and all(map(has, files))
    return has("HYBRIDPS_SECURITY") == "tls" or (not has("HYBRIDPS_SECURITY") and as_gloo)


def _token() -> bytes:
    if token := os.environ.get("HYBRIDPS_TOKEN", "").strip():
        return os.fsencode(token)
    with open(os.path.expanduser(os.environ["HYBRIDPS_TOKEN_FILE"]), "rb") as file:
        return file.readline().strip()


def sealed(key: str, value: bytes) -> bytes:
    """What csrc/hybridps/tls/sealed_store.cpp makes of the value, with HYBRIDPS_SECURITY=tls."""
    if not is_encrypted():
        return value
    try:
        token = _token()
    except (KeyError, OSError):
        return value  # the others show what it says, and that it has no seal
    if len(token) < 16:
        return value
    own = hmac.digest(token, b"hybridps store seal 1", "sha256")
    return b"HPSs" + hmac.digest(own, key.encode() + b"\0" + value, "sha256") + value


def _set(store, key: str, value: bytes) -> None:
    with contextlib.suppress(Exception):
        store.set(key, sealed(key, value))


def tell_of_failed_start(dist_backend_opts, why: str) -> None:
    """Never raises: `why` is about to be raised."""
    name, rank = dist_backend_opts.group_id, dist_backend_opts.group_rank
    attempt = _attempts.get(name, 0)
    _attempts[name] = attempt + 1
    if dist_backend_opts.group_size <= 1:
        return
    run_id = printable(os.environ.get("TORCHELASTIC_RUN_ID") or "none")
    text = f"rank {rank} on {socket.gethostname()} (pid {os.getpid()}) could not join it: {why}"
    try:
        key = f"hybridps/{name}/{run_id}.{attempt}/failed"
        value = failed(text, int(time.time() * 1000), rank)
        tell = threading.Thread(target=_set, args=(dist_backend_opts.store, key, value), daemon=True)
        tell.start()
        tell.join(2)  # of a Store that stands still the call never comes back
    except Exception:
        return
    if rank == 0:  # perhaps the Store's host: others must have read it before this process ends
        time.sleep(0.3)
