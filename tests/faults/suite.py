"""The fault suite: each fault on real processes, what happened as a table.

    scripts/faults                         every fault once or a few times, and gloo beside it
    scripts/faults --only "kill*" --runs 10
    scripts/faults --long                  100 kills, 100 re-inits, minutes of packet loss
    scripts/faults --list

Writes faults.json and faults.md into --out (default build/faults), prints the table, and ends with 1 when a bar is
missed. tests/faults/test_faults.py runs the same functions.
"""

import argparse
import fnmatch
import json
import os
import platform
import sys
import time
from dataclasses import asdict

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
for folder in [HERE, os.path.join(ROOT, "tests", "multiprocess"), os.path.join(ROOT, "scripts")]:
    if folder not in sys.path:
        sys.path.insert(0, folder)

import faults  # noqa: E402
import outcome  # noqa: E402


def main():
    outcome.SLACK_S = 0.0
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", help="names or patterns; may be repeated")
    parser.add_argument("--runs", type=int, help="how often each fault happens")
    parser.add_argument("--long", action="store_true", help="the numbers of the long mode (an hour)")
    parser.add_argument("--no-gloo", action="store_true", help="hybridps alone")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "faults"))
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(faults.FAULTS))
        return 0
    chosen = [
        name for name in faults.FAULTS if not arguments.only or any(fnmatch.fnmatch(name, p) for p in arguments.only)
    ]
    if not chosen:
        parser.error("no fault has such a name; see --list")
    table = []
    for name in chosen:
        for backend in ["hybridps"] + (["gloo"] if faults.FAULTS[name].gloo and not arguments.no_gloo else []):
            runs = arguments.runs or (faults.FAULTS[name].long_runs if arguments.long else 1)
            start = time.monotonic()
            row = faults.run(name, backend, runs if backend == "hybridps" else 1, arguments.long)
            table.append(row)
            said = (
                f"skipped: {row.skipped}" if row.skipped else f"{row.detection}; {row.culprit}; {row.left}; {row.note}"
            )
            print(f"{name} [{backend}, {time.monotonic() - start:.0f} s]: {said}", flush=True)
            for sentence in row.bad:
                print("    bar missed: " + sentence.replace("\n", "\n    "), flush=True)
    os.makedirs(arguments.out, exist_ok=True)
    with open(os.path.join(arguments.out, "faults.json"), "w") as file:
        machine = {"cores": os.cpu_count(), "kernel": platform.release()}
        json.dump({"machine": machine, "rows": [asdict(row) for row in table]}, file, indent=1)
    with open(os.path.join(arguments.out, "faults.md"), "w") as file:
        file.write(outcome.markdown(table))
    print("\n" + outcome.markdown(table))
    return 1 if any(row.bad for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
