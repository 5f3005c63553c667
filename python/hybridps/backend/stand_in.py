"""Lets hybridps answer to the name of another backend, for programs that hard-code one.

Environment, read at `import torch` (`hybridps run` sets it):
    HYBRIDPS_AS   names, separated by commas: whoever asks torch for one of them gets hybridps. With
                  leave-side-groups among them, groups that name their backend in new_group() get torch's own

torch looks a backend up by its name when a group is made, so it is enough to replace what the name stands for. The
name itself, its devices and its type stay as they were: get_backend() says "gloo", and a program that takes the
default backend of the CPU has asked for "gloo" too.
"""

import os
import sys

_C10D = "torch.distributed.distributed_c10d"
LEAVE_SIDE_GROUPS = "leave-side-groups"
_told = False
# What torch's gloo takes for GLOO_DEVICE_TRANSPORT and sends in clear over TCP, as hybridps does.
_CLEAR = ("", "TCP", "LINUX", "UV")


def asked_for() -> tuple[list[str], bool]:
    """The names to stand in for, and whether groups that name their backend in new_group() keep it."""
    words = [word.strip().lower() for word in os.environ.get("HYBRIDPS_AS", "").split(",")]
    names = [word for word in words if word not in ("", "hybridps", LEAVE_SIDE_GROUPS)]
    return names, LEAVE_SIDE_GROUPS in words


def say(level: str, text: str) -> None:
    """One line in the form of the extension's log, which may not be loaded here."""
    print(f"hybridps[{os.getpid()}] {level}: {text}", file=sys.stderr, flush=True)


def _named_by_the_caller() -> bool:
    """Whether the group in the making is one that new_group() was given a backend for.

    The creator cannot see that: new_group fills in the parent's name where the caller gave none. Its frame can.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "new_group" and frame.f_globals.get("__name__") == _C10D:
            return bool(frame.f_locals.get("backend"))
        frame = frame.f_back
    return False


def _not_as_gloo() -> str:
    """What the environment asks of gloo and hybridps does not do, and what to do then; empty: nothing."""
    from hybridps.backend.announce import is_encrypted

    asked = os.environ.get("GLOO_DEVICE_TRANSPORT", "")
    if asked in _CLEAR or (asked.upper() == "TCP_TLS" and is_encrypted()):
        return ""
    what = f"GLOO_DEVICE_TRANSPORT={asked!r} asks gloo for"
    if asked.upper() == "TCP_TLS":
        what += " encryption, and hybridps sends in clear"
        without = (
            "to have hybridps encrypt, set HYBRIDPS_SECURITY=tls and HYBRIDPS_TOKEN_FILE, or gloo's certificates; where "
            "the network is trusted or encrypts by itself (WireGuard or IPsec), unset GLOO_DEVICE_TRANSPORT"
        )
    else:
        what += " a transport that hybridps does not know"
        without = "to use hybridps' own (HYBRIDPS_DATA_TRANSPORT), unset GLOO_DEVICE_TRANSPORT"
    gloo = "to use torch's gloo, start the job without --as gloo (HYBRIDPS_AS)"
    return f"hybridps cannot stand in for gloo: {what}. What to do: {gloo}; {without}."


def _creator(name: str, own, leave_side_groups: bool):
    def create(dist_backend_opts, pg_options):
        global _told
        if leave_side_groups and _named_by_the_caller():
            if own.extended_api:
                return own.creator_fn(dist_backend_opts, pg_options)
            of = dist_backend_opts
            return own.creator_fn(of.store, of.group_rank, of.group_size, of.timeout)
        if name == "gloo" and (problem := _not_as_gloo()):
            from hybridps.backend.announce import tell_of_failed_start

            tell_of_failed_start(dist_backend_opts, problem)
            raise RuntimeError(problem)
        from torch._C._distributed_c10d import Backend

        from hybridps.backend.register import _create

        # The program's are for the backend that it asked for; what they say of timeouts the call says, too.
        if isinstance(pg_options, Backend.Options) and not type(pg_options).__module__.startswith("hybridps"):
            pg_options = None
        if not _told:
            _told = True
            if dist_backend_opts.group_rank == 0 and os.environ.get("HYBRIDPS_LOG_LEVEL", "").lower() != "error":
                left = f"; groups that name {name} in new_group are left to torch's" if leave_side_groups else ""
                size = dist_backend_opts.group_size
                say("info", f"stands in for {name} ({size} rank{'s' * (size != 1)}, HYBRIDPS_AS){left}")
        return _create(dist_backend_opts, pg_options)

    return create


def install() -> None:
    """Puts hybridps behind the names of HYBRIDPS_AS. Loads neither the extension nor UCX."""
    from torch.distributed import distributed_c10d as c10d

    backend = c10d.Backend
    if not hasattr(backend, "_ensure_backend_registered"):
        raise RuntimeError("torch 2.14 or newer is needed")
    names, leave_side_groups = asked_for()
    owns = {}
    for name in names:
        backend._ensure_backend_registered(name)  # torch's own goes first, or it would replace ours later
        owns[name] = backend._plugins.get(name.upper())
        if owns[name] is None:
            raise RuntimeError(f"torch knows no backend {name!r}; HYBRIDPS_AS takes backends and {LEAVE_SIDE_GROUPS}")
    for name, own in owns.items():
        backend._plugins[name.upper()] = backend._BackendPlugin(_creator(name, own, leave_side_groups), True)
        # Without this the flight recorder trusts the backend of that name to record itself.
        getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard(name)
