"""RDMA, tested without RDMA hardware: two hosts with Soft-RoCE devices in an emulated machine.

    tests/rdma/run --ucx PATH                    makes the machine, runs all checks, removes the machine
    tests/rdma/run --ucx PATH --machine DIR      keeps the machine in DIR, and uses what is there already

PATH is a source tree of UCX 1.22 or newer. The last line is "N passed, N failed"; the exit status is 0 when nothing
failed, 1 when something did, 2 when the checks could not run, and then the last line says why.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import machine

DISK_GIB_MIN = 8
MEMORY_MIB = 4096


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/rdma/run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--ucx", type=Path, required=True, metavar="PATH", help="UCX's source tree")
    option("--machine", type=Path, metavar="DIR", help="where the machine is, and stays")
    option("--mirror", default=machine.debian_mirror(), metavar="URL", help="of Debian (default: %(default)s)")
    option("--torch", action="store_true", help="also a DDP run: 1.2 GiB more, and minutes to build the extension")
    option("--jobs", type=int, default=os.cpu_count(), metavar="N", help="compile jobs")
    option("--only", action="append", default=[], metavar="NAME", help="a check of guest.py; may be repeated")
    option("--limit", type=float, default=3000, metavar="S", help="most seconds for the checks")
    arguments = parser.parse_args()

    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    lacks = machine.missing() + ([] if arguments.mirror else ["a Debian mirror (--mirror URL)"])
    if lacks:
        print(f"cannot run: this host lacks {', '.join(lacks)}")
        return 2
    folder = arguments.machine or Path(tempfile.mkdtemp(prefix="hybridps-rdma-", dir="/var/tmp"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the machine is removed then, too
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free >> 30
        if not (folder / "root.ext4").exists() and free < DISK_GIB_MIN:
            print(f"cannot run: {DISK_GIB_MIN} GiB are needed in {folder}, {free} are free (--machine DIR elsewhere)")
            return 2
        host = machine.Machine(folder, arguments.ucx, arguments.mirror, arguments.jobs, say, arguments.torch)
        host.prepare()
        say(f"the machine is there: kernel {host.kernel}, UCX {host.ucx_version}")
        result = host.share / "result.txt"
        result.unlink(missing_ok=True)
        guest = f"python3 -u /src/tests/rdma/guest.py {' '.join(map(shlex.quote, arguments.only))}"
        code = host.boot(f"set -o pipefail; {guest} 2>&1 | tee /share/result.txt", arguments.limit, MEMORY_MIB)
        print(result.read_text(errors="replace"), end="")
        say(f"exit status {code}")
        lines = result.read_text(errors="replace").splitlines()
        print(lines[-1] if lines else "0 passed, 1 failed")
        return 1 if code else 0
    except (machine.Failed, OSError) as error:
        print(f"cannot run: {error}")
        return 2
    finally:
        if arguments.machine is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
