"""hybridps: a PyTorch process-group backend. Scripts need no import: `init_process_group("hybridps")` finds it."""


def __getattr__(name: str):
    if name == "__version__":
        from importlib.metadata import version

        return version("hybridps")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
