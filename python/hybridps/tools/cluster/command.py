"""`hybridps doctor --cluster`."""

import json
import sys

from hybridps.backend import load
from hybridps.tools.cluster import show
from hybridps.tools.cluster.meeting import Complaint, examine, join
from hybridps.tools.cluster.record import record
from hybridps.tools.cluster.verdict import round_trips, verdict
from hybridps.tools.output import plot_complaint


def run(arguments, interfaces: list[tuple[str, str, str, str]]) -> int:
    """Prints on rank 0, whose exit status says whether a job can run. 1 on a rank that could not take part."""
    try:
        if arguments.picture:
            if complaint := plot_complaint():
                raise Complaint(f"--picture: {complaint}")
        meeting = join(arguments.timeout)
        result = examine(meeting, record(interfaces), arguments.seconds)
    except Complaint as error:
        print(f"hybridps doctor --cluster: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # of torch's Store: the rank that serves it has gone
        print(
            f"hybridps doctor --cluster: the Store of the job was lost: {str(error).splitlines()[0]}", file=sys.stderr
        )
        return 1
    if result is None:
        return 0
    try:
        result["region_of"] = load.load_extension().find_regions(round_trips(result))
    except ImportError:  # said by the rank's record
        result["region_of"] = []
    problems, notes = verdict(result)
    for line in show.report(result):
        print(line)
    for note in notes:
        print(f"note: {note}")
    for problem in problems:
        print(f"problem: {problem}")
    if arguments.json:
        try:
            with open(arguments.json, "w") as file:
                json.dump({**result, "problems": problems, "notes": notes}, file, indent=1)
        except OSError as error:
            problems.append(f"--json: {error}")
            print(f"problem: {problems[-1]}")
    if arguments.picture:
        show.picture(result, arguments.picture)
    print("not usable as it is" if problems else "ok")
    return 1 if problems else 0
