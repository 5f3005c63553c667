"""Loads hybridps._C after torch, and UCX exactly once, when the extension asks for it: over our own TCP it never does."""

import ctypes
import glob
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading

_UCX_MAPPED = re.compile(rb"/libucp\.so(\.\d+)*$")
_UCX_SONAME = "libucp.so.0"

# UCX reads these while it is being loaded: without them it takes signal handlers that belong to the launcher, and logs
# every connection that a peer's end breaks, which the engine judges and reports itself. The user's own settings win.
_UCX_ENVIRONMENT = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_LOG_LEVEL": "fatal",
}

_MEMORY_EVENTS = "UCX_MEM_EVENTS"

PACKAGE = __package__.partition(".")[0]  # this file is also in the package hybridps_server

_lock = threading.Lock()
_extension = None


def build_info():
    """What the extension was built for, read without loading it."""
    try:
        return importlib.import_module(f"{PACKAGE}._build_info")
    except ModuleNotFoundError as error:
        raise ImportError(
            "hybridps is here as source only, its extension was never built; "
            "run scripts/setup in the checkout, or: pip install ."
        ) from error


def installed_from() -> str:
    """How hybridps came into this environment: a checkout, or files that stand for themselves."""
    from importlib.metadata import distribution

    found = distribution("hybridps")
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return f"editable, {origin['url'].removeprefix('file://')}"
    return "a wheel" if "+torch" in found.version else "built here"


def check_torch(built_for: str, torch_version: str) -> None:
    """Raise unless the running torch has the minor version that the extension was built for."""
    running = ".".join(torch_version.split(".")[:2])
    if running != built_for:
        raise ImportError(
            f"this build of hybridps is for torch {built_for}, but torch {torch_version} is running. "
            f"Install a hybridps built for torch {running} (its wheel ends in +torch{running}; or in a checkout, with "
            f"this environment: pip install --force-reinstall --no-deps .), or torch {built_for}.*"
        )


def check_cuda(built_with_cuda: bool, torch_cuda: str | None) -> None:
    """Raise where the extension needs the libraries of a torch for CUDA, and the running one is for the CPU only."""
    if built_with_cuda and not torch_cuda:
        raise ImportError(
            "this build of hybridps needs a torch with CUDA, but the running torch is for the CPU only. Install a "
            "hybridps for the CPU (its wheel ends in .cpu; or in a checkout, with this environment: "
            "pip install --force-reinstall --no-deps .), or install torch with CUDA"
        )


def mapped_ucx() -> list[str]:
    """Paths of every libucp.so that this process has mapped."""
    # Not dl_iterate_phdr(), which is quicker: its callback would wait for the interpreter with the loader's lock, for which an
    # import on another thread waits with the interpreter's.
    paths = []
    with open("/proc/self/maps", "rb") as maps:
        for line in maps.read().splitlines():
            if b"/libucp.so" in line and _UCX_MAPPED.search(path := line.split(maxsplit=5)[5]):
                paths.append(os.fsdecode(path))
    return list(dict.fromkeys(paths))


def ucx_version(path: str) -> tuple[int, int, int]:
    """The version that a libucp reports of itself."""
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    library = ctypes.CDLL(path, ctypes.RTLD_LOCAL)
    library.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    return major.value, minor.value, release.value


def _from_wheel() -> bool:
    # What libucx.load_library() does; importing it takes as long as the rest of it, to read its own version.
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        return False
    folder = os.path.join(found.submodule_search_locations[0], "lib")
    paths = [os.path.join(folder, f"lib{name}.so") for name in ("ucs", "ucs_signal", "uct", "ucp")]
    if all(os.path.isfile(path) for path in paths):
        for path in paths:
            ctypes.CDLL(path, ctypes.RTLD_LOCAL)
        return True
    import libucx

    return all(library is not None for library in libucx.load_library())


def _from_system(folder: str = "") -> bool:
    try:
        ctypes.CDLL(os.path.join(folder, _UCX_SONAME), ctypes.RTLD_LOCAL)
    except OSError:
        return False
    return True


def rdma_is_wanted(sysfs: str = "/sys") -> bool:
    """Whether this machine has an active RDMA port and the settings let data use it."""
    if os.environ.get("HYBRIDPS_DATA_TRANSPORT", "").strip() in ("tcp", "ucx"):
        return False
    for path in glob.glob(f"{sysfs}/class/infiniband/*/ports/*/state"):
        try:
            with open(path) as file:
                if "ACTIVE" in file.read():
                    return True
        except OSError:
            pass
    return False


def has_verbs(libucp: str) -> bool:
    """Whether this UCX has its module for RDMA, which the wheels lack."""
    folder = os.environ.get("UCX_MODULE_DIR") or os.path.join(os.path.dirname(os.path.realpath(libucp)), "ucx")
    return bool(glob.glob(os.path.join(glob.escape(folder), "libuct_ib.so*")))


def system_ucx() -> list[str]:
    """Every libucp.so.0 that the loader would find, in its order."""
    paths = [os.path.join(folder, _UCX_SONAME) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            cache = os.fsdecode(subprocess.run([program, "-p"], capture_output=True, timeout=30).stdout)
        except (OSError, subprocess.SubprocessError):
            continue
        paths += re.findall(rf"^\s*{re.escape(_UCX_SONAME)} .*=> (\S+)$", cache, re.MULTILINE)
        break
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _version_apart(path: str) -> tuple[int, int, int]:
    """ucx_version() in a process of its own, so that looking at a copy does not load it here; (0, 0, 0): unusable."""
    code = (
        "import ctypes, sys\nn = [ctypes.c_uint() for _ in range(3)]\n"
        "ctypes.CDLL(sys.argv[1]).ucp_get_version(*map(ctypes.byref, n))\nprint(*(i.value for i in n))"
    )
    try:
        done = subprocess.run([sys.executable, "-I", "-c", code, path], capture_output=True, timeout=60)
        major, minor, release = map(int, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0, 0, 0
    return major, minor, release


def ucx_for_rdma(needed: tuple[int, ...]) -> str:
    """The first UCX of the system that has verbs and is new enough; empty where RDMA is not wanted or there is none."""
    if not rdma_is_wanted():
        return ""
    for path in system_ucx():
        if has_verbs(path) and _version_apart(path)[:2] >= needed:
            return path
    return ""


def needs_memory_events() -> bool:
    """Whether UCX has to see each mmap and munmap of this process, for its caches of memory that RDMA or a GPU knows.

    To see them it patches the C library while it is being loaded, which takes UCX 1.22 0.4 s: nine tenths of the start
    of a rank over TCP, where none of it is needed.
    """
    own = [f"{prefix}{name}" for prefix in ("UCX_", "HYBRIDPS_UCX_") for name in ("TLS", "NET_DEVICES")]
    gpu = os.environ.get("HYBRIDPS_GPUDIRECT", "").strip().lower() not in ("", "0", "off", "false", "no")
    return gpu or any(os.environ.get(name) for name in own) or rdma_is_wanted()


def load_ucx(info) -> str:
    """Make one libucp.so.0 available to the extension and return its path.

    A libucp that something else has mapped (MPI, NIXL) is used, for two copies in one process would mix. Else, where
    there is an RDMA device, the system's if it has verbs; else the kind that the extension was built with comes first.
    RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY asks for the system's.
    """
    for name, value in _UCX_ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    needed = tuple(int(part) for part in info.UCX_VERSION.split(".")[:2])
    already = mapped_ucx()
    if not already:
        given = os.environ.get(_MEMORY_EVENTS)
        if given is None and not needs_memory_events():
            os.environ[_MEMORY_EVENTS] = "n"
        wish = os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower()
        wheel_first = not info.UCX_ORIGIN.startswith(("path", "system")) and wish in ("false", "0", "")
        rdma = ucx_for_rdma(needed) if wheel_first else ""
        if rdma:
            loaded = _from_system(os.path.dirname(rdma))
        elif info.UCX_ORIGIN.startswith("path"):
            loaded = _from_system(info.UCX_LIB_DIR) or _from_system() or _from_wheel()
        elif wheel_first:
            loaded = _from_wheel() or _from_system()
        else:
            loaded = _from_system() or _from_wheel()
        if given is None:  # read by now, and a child of this process may need them
            os.environ.pop(_MEMORY_EVENTS, None)
        if not loaded:
            raise ImportError(
                f"UCX was not found: hybridps needs {_UCX_SONAME} {info.UCX_VERSION} or newer; "
                "pip install libucx-cu13, or install the system's libucx-dev"
            )

    mapped = mapped_ucx()
    if len(mapped) != 1:
        raise ImportError(f"this process has two copies of UCX, which would corrupt each other: {', '.join(mapped)}")
    version = ucx_version(mapped[0])
    if version[:2] < needed:
        found = ".".join(map(str, version))
        origin = "was already loaded by something else in this process" if already else "was found"
        raise ImportError(
            f"UCX {found} ({mapped[0]}) {origin}, but hybridps was built with UCX {info.UCX_VERSION} "
            f"from {info.UCX_ORIGIN}. Load the newer UCX first, or build hybridps against the older one "
            "(-DHYBRIDPS_UCX_ROOT=PREFIX)"
        )
    return mapped[0]


class _AfterExitHandlers:
    """Calls `do` when the interpreter has run all exit handlers, also those that were registered before this one: atexit then
    drops what it holds, this object with it, and Python code still runs. As a handler it does nothing."""

    def __init__(self, do):
        self._do = do

    def __call__(self):
        pass

    def __del__(self):
        self._do()


def load_extension():
    """Return hybridps._C, loading it on the first call."""
    global _extension
    with _lock:
        if _extension is None:
            import torch
            import torch.distributed  # binds the base classes that the extension derives from

            info = build_info()
            check_torch(info.TORCH_MINOR, torch.__version__)
            check_cuda(info.CUDA, torch.version.cuda)
            extension = importlib.import_module(f"{PACKAGE}._C")
            extension.load_ucx_by(lambda: os.fsencode(load_ucx(info)))

            # Without destroy_process_group neither shutdown nor a destructor runs at exit.
            import atexit

            atexit.register(_AfterExitHandlers(extension.at_exit))
            _extension = extension
        return _extension
