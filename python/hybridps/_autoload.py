"""Entry point that every `import torch` runs: tiny, and it never raises.

From 2.14 on torch finds the backend by name (entry-point group torch.distributed.backends), and there is work here
only when HYBRIDPS_AS asks hybridps to stand in for another backend. torch 2.11 to 2.13 learn the name here.
"""

import os


def autoload() -> None:
    try:
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if (major, minor) < (2, 14):
            from hybridps._register import register

            register()
    except Exception:  # a failure here would make `import torch` fail
        pass
    if os.environ.get("HYBRIDPS_AS"):
        try:
            from hybridps._stand_in import install

            install()
        except Exception as error:
            # Said, since the job would run, and on another backend than it was told to.
            import sys

            print(f"hybridps[{os.getpid()}] error: cannot stand in as HYBRIDPS_AS asks: {error}", file=sys.stderr)
