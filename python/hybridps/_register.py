"""Tells torch how to make the backend. Loads neither the extension nor UCX: the first process group does."""

import time


def _create(dist_backend_opts, pg_options):
    called_at = time.monotonic()  # the timeout counts from here: loading UCX takes about half a second
    from hybridps._load import load_extension

    return load_extension().create_backend(dist_backend_opts, pg_options, called_at)


def register() -> None:
    """Register "hybridps" with torch.distributed; harmless when done twice."""
    from torch.distributed.distributed_c10d import Backend

    # A build without CUDA leaves the device out, so that torch says that nothing is there for it.
    from hybridps._build_info import CUDA

    if "HYBRIDPS" not in Backend._plugins:
        Backend.register_backend("hybridps", _create, extended_api=True, devices=["cpu", "cuda"] if CUDA else ["cpu"])
