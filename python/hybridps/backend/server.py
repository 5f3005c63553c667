"""The command `hybridps-server`: starts the program of that name with UCX's folder on the loader's path.

This file and load.py are also in the package hybridps_server, which has no torch: they name their package nowhere.
"""

import importlib.util
import os
import sys

from . import load


def program() -> str:
    """Path of the compiled program; ImportError when this installation has none."""
    spec = importlib.util.find_spec(f"{load.PACKAGE}._build_info")  # an editable install keeps what is built elsewhere
    if spec is not None and spec.origin:
        path = os.path.join(os.path.dirname(spec.origin), "bin", "hybridps-server")
        if os.access(path, os.X_OK):
            return path
    raise ImportError("this installation of hybridps has no hybridps-server; build it again with UCX (scripts/setup)")


def environment() -> dict[str, str]:
    """What the program needs beyond this process's environment; UCX's own settings of the user win."""
    try:
        path = load.load_ucx(load.build_info())  # also sets UCX's defaults in os.environ
    except ImportError:  # over TCP it is not needed; where it is, the server says so
        return dict(os.environ)
    folder = os.path.dirname(path)
    before = os.environ.get("LD_LIBRARY_PATH")
    events = {} if load.needs_memory_events() else {"UCX_MEM_EVENTS": "n"}
    return {**events, **os.environ, "LD_LIBRARY_PATH": folder + (os.pathsep + before if before else "")}


def main(arguments: list[str] | None = None) -> int:
    """Replace this process by the server: signals and the exit code are its own."""
    try:
        path, variables = program(), environment()
    except ImportError as error:
        print(f"hybridps-server: {error}", file=sys.stderr)
        return 1
    sys.stdout.flush()
    os.execve(path, [path, *(sys.argv[1:] if arguments is None else arguments)], variables)
