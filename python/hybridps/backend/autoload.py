"""Entry point that every `import torch` runs: tiny, and it never raises.

From 2.14 on torch finds the backend by name (entry-point group torch.distributed.backends), and there is work here
only when HYBRIDPS_AS asks hybridps to stand in for another backend, and in the rank of a job: there the name is told at
once, for torch would look through every package that is installed, which takes longer than all else of a rank's start
in Python. torch 2.11 to 2.13 learn the name here.
"""

import os


def _may_have_driver() -> bool:
    return any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")))


def autoload() -> None:
    try:
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        # Where there may be a driver, it is loaded to see; that is for those who use the backend.
        if (major, minor) < (2, 14) or ("WORLD_SIZE" in os.environ and not _may_have_driver()):
            from hybridps.backend.register import register

            register()
    except Exception:  # a failure here would make `import torch` fail
        pass
    if os.environ.get("HYBRIDPS_AS"):
        try:
            from hybridps.backend.stand_in import install

            install()
        except Exception as error:
            # Said, since the job would run, and on another backend than it was told to.
            import sys

            print(f"hybridps[{os.getpid()}] error: cannot stand in as HYBRIDPS_AS asks: {error}", file=sys.stderr)
