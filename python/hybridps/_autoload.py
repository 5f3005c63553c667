"""Entry point of torch 2.11 to 2.13, run by every `import torch`: tiny, and it never raises.

From 2.14 on torch finds the backend by name (entry-point group torch.distributed.backends), and this does nothing.
"""


def autoload() -> None:
    try:
        import torch

        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        if (major, minor) < (2, 14):
            from hybridps._register import register

            register()
    except Exception:  # a failure here would make `import torch` fail
        pass
