"""Tells torch how to make the backend. Loads neither the extension nor UCX: the first process group does."""

import ctypes
import os
import time


def refuse_in_clear(dist_backend_opts) -> None:
    """Raises where the environment asks gloo for encryption: what the job takes for encrypted would go in clear."""
    asked = os.environ.get("GLOO_DEVICE_TRANSPORT", "")
    if asked.upper() != "TCP_TLS":
        return
    from hybridps.backend.announce import is_encrypted, tell_of_failed_start

    if is_encrypted():
        return
    problem = (
        f"GLOO_DEVICE_TRANSPORT={asked!r} asks for encryption, and hybridps sends in clear. What to do: set "
        "HYBRIDPS_SECURITY=tls and HYBRIDPS_TOKEN_FILE, or gloo's certificates (docs/security.md); or unset "
        "GLOO_DEVICE_TRANSPORT where the network is trusted or encrypts by itself (WireGuard or IPsec)."
    )
    tell_of_failed_start(dist_backend_opts, problem)
    raise RuntimeError(problem)


def _create(dist_backend_opts, pg_options):
    called_at = time.monotonic()  # the timeout counts from here: with RDMA, loading UCX takes half a second
    refuse_in_clear(dist_backend_opts)
    from hybridps.backend.load import load_extension

    try:
        extension = load_extension()
    except Exception as error:
        from hybridps.backend.announce import tell_of_failed_start

        tell_of_failed_start(dist_backend_opts, str(error))
        raise
    backend = extension.create_backend(dist_backend_opts, pg_options, called_at)
    if path := os.environ.get("HYBRIDPS_ADVISE"):
        from hybridps.backend.watch import watch

        watch(path)
    return backend


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def register() -> None:
    """Register "hybridps" with torch.distributed; harmless when done twice."""
    from torch.distributed.distributed_c10d import Backend

    # A build without CUDA leaves the device out, so that torch says that nothing is there for it. So does a machine
    # without a driver: in groups with such a device torch's flight recorder asks CUDA for a stream at each barrier, and
    # the exception that it gets there takes longer than the barrier.
    from hybridps._build_info import CUDA

    if "HYBRIDPS" not in Backend._plugins:
        devices = ["cpu", "cuda"] if CUDA and _has_driver() else ["cpu"]
        Backend.register_backend("hybridps", _create, extended_api=True, devices=devices)
