"""Runs random programs.

    python tests/multiprocess/programs/runner.py --minutes 60            # seeds from --first on, until the time is up
    python tests/multiprocess/programs/runner.py --seed 17               # one, as it failed
    python tests/multiprocess/programs/runner.py --seed 17 --steps 40 --without functional,timeout
    python tests/multiprocess/programs/runner.py --seed 17 --shrink      # leaves out steps as long as it still fails
    python tests/multiprocess/programs/runner.py --seed 17 --show        # what it would do

Prints a line per program and ends with "N passed, N failed" and the seeds; the exit status is 0 when none failed.
"""

import argparse
import dataclasses
import os
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import harness  # noqa: E402

from programs import executor  # noqa: E402
from programs.generator import generate  # noqa: E402
from programs.steps import Limits  # noqa: E402

THIS = "tests/multiprocess/programs/runner.py"
LOGS = os.path.join(os.path.dirname(os.path.dirname(harness.HERE)), "build", "test-logs", "programs")
GROWTH_MOST = 3 << 20  # bytes from the second pass to the last
SECONDS_PER_STEP = 1.0  # beyond which a program counts as hanging, with the constant below
SECONDS_AT_LEAST = 120.0


class Servers:
    """Dedicated servers, started when a program first asks for them and kept for those that follow."""

    def __init__(self):
        self.running = []

    def settings(self, count):
        if not count:
            return {}
        import test_dedicated

        while len(self.running) < count:
            self.running.append(test_dedicated.Server())
        return test_dedicated.settings(self.running[:count])

    def stop(self):
        """Their last words, which say whether anything was left."""
        running, self.running = self.running, []
        return [server.stop() for server in running]


def command(seed, limits):
    """What a person types to run it again."""
    words = [f"python {THIS} --seed {seed}"]
    if limits.dialect == "gloo":
        words.insert(0, "HYBRIDPS_TEST_BACKEND=gloo")
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if value == field.default or field.name == "dialect":
            continue
        if field.name == "plain":
            words.append("--plain")
        else:
            text = ",".join(str(part) for part in value) if isinstance(value, tuple) else value
            words.append(f"--{field.name} {text}")
    return " ".join(words)


def _in_short(reports):
    """What each rank says, the first to fail first; that another rank is gone is an echo, if anybody says more."""
    lines = []
    ordered = sorted(reports, key=lambda report: report.failed_at_s)
    for report in ordered:
        told = report.error.rpartition("\nprograms.executor.Wrong: ")[2] or report.error
        if report.hung:
            shown = f"hung, {report.native_threads}\n{report.stacks[-3000:]}{report.output[-1500:]}"
        elif told:
            shown = told[:300] if lines and " is gone: it ended without goodbye" in told else told[-4000:]
        elif report.exit_code:
            shown = f"exit code {report.exit_code}\n{report.stacks[-3000:]}{report.output[-1500:]}"
        else:
            continue
        lines.append(f"-- rank {report.rank} after {report.failed_at_s:.1f} s: {shown.rstrip()}")
    if reports[0].leftovers:
        lines.append(f"-- processes that outlived their rank: {reports[0].leftovers}")
    return "\n".join(lines)


def run_program(seed, limits, servers):
    """Returns the program's results; raises what went wrong, with the command that repeats it."""
    program = generate(seed, limits)
    env = {**program.env, **servers.settings(program.servers)}
    functional = any(step.kind == "functional" for step in program.steps)
    try:
        results = harness.run_ranks(
            executor.run,
            program.nodes,
            args=(seed, limits),
            env=env,
            rank_env=program.rank_env,
            init=False,
            destroy=False,
            timeout=SECONDS_AT_LEAST + SECONDS_PER_STEP * len(program.steps) * program.passes,
            grace=20,
            # torch's compiler, which functional collectives import, takes seconds: one process has it already.
            fork_server=harness.framework_zygote if functional else harness.default_zygote,
        )
        if program.passes > 2:
            for rank, result in enumerate(results):
                grown = result["memory"][-1] - result["memory"][1]
                told = f"again: {command(seed, limits)}\nrank {rank} grew by {grown} bytes: {result['memory']}"
                assert grown <= GROWTH_MOST, told
    except harness.RanksFailed as error:
        os.makedirs(LOGS, exist_ok=True)
        path = os.path.join(LOGS, f"seed-{seed}.log")
        with open(path, "w") as file:
            print(program, *program.steps, command(seed, limits), error, sep="\n", file=file)
        told = _in_short(error.reports)
        raise AssertionError(f"again: {command(seed, limits)}\n{told}\nin full: {path}") from None
    return results


def shrink(seed, limits, servers, tries):
    """The fewest steps that still fail, by leaving out ever smaller parts; each part is tried `tries` times."""
    numbers = sorted({step.number for step in generate(seed, limits).steps})

    def fails(kept):
        attempt = dataclasses.replace(limits, numbers=tuple(kept))
        for _ in range(tries):
            try:
                run_program(seed, attempt, servers)
            except AssertionError:
                return True
        return False

    size = max(1, len(numbers) // 2)
    while True:
        at, shorter = 0, False
        while at < len(numbers) and len(numbers) > 1:
            kept = numbers[:at] + numbers[at + size :]
            if kept and fails(kept):
                numbers, shorter = kept, True
                print(f"{len(numbers)} steps: {numbers}", flush=True)
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2) if not shorter or size > 1 else 1
    return dataclasses.replace(limits, numbers=tuple(numbers))


def run_many(seeds, limits, servers, until=float("inf"), shown=sys.stdout):
    """Runs programs until the seeds or the time are through. Returns (passed, failed): seeds."""
    passed, failed = [], []
    for seed in seeds:
        if time.monotonic() > until:
            break
        start = time.monotonic()
        try:
            results = run_program(seed, limits, servers)
            cases = sum(result["cases"] for result in results)
            passed.append(seed)
            said = f"ok, {cases} comparisons"
        except AssertionError as error:
            failed.append(seed)
            said = f"FAILED, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores\n{error}"
        except Exception:
            failed.append(seed)
            said = f"FAILED\nagain: {command(seed, limits)}\n{traceback.format_exc()}"
        print(f"{generate(seed, limits)}: {time.monotonic() - start:.1f} s, {said}", file=shown, flush=True)
    return passed, failed


def _words(text):
    return tuple(word for word in text.split(",") if word)


def _numbers(text):
    numbers = []
    for part in _words(text):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=_numbers, help="one, or several: 3,7-9")
    parser.add_argument("--first", type=int, default=0, help="the first of many")
    parser.add_argument("--minutes", type=float, help="how long to go on with new seeds")
    parser.add_argument("--repeat", type=int, default=1, help="how often each of --seed runs")
    parser.add_argument("--nodes", default="", help="instead of the seed's node map: 2+1")
    parser.add_argument("--steps", type=int, default=0, help="instead of the seed's number of steps")
    parser.add_argument("--without", type=_words, default=(), help="kinds or words like timeout, brief, strided")
    parser.add_argument("--only", type=_words, default=(), help="these alone")
    parser.add_argument("--numbers", type=_numbers, default=(), help="steps that stay: 3,17-20")
    parser.add_argument("--plain", action="store_true", help="default settings, no servers, one pass")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--tries", type=int, default=2, help="how often --shrink runs each part that passes")
    parser.add_argument("--show", action="store_true", help="print the steps instead")
    asked = parser.parse_args()
    names = ["nodes", "steps", "without", "only", "numbers", "plain"]
    limits = Limits(**{name: getattr(asked, name) for name in names}, dialect="gloo" if harness.IS_GLOO else "hybridps")
    if asked.seed and asked.show:
        for seed in asked.seed:
            program = generate(seed, limits)
            print(program, *program.steps, sep="\n  ")
        return 0
    servers = Servers()
    try:
        if asked.seed and asked.shrink:
            for seed in asked.seed:
                print("again:", command(seed, shrink(seed, limits, servers, asked.tries)))
            return 1
        until = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
        new = range(asked.first, sys.maxsize if asked.minutes else asked.first + 10)
        seeds = asked.seed * asked.repeat if asked.seed else new
        passed, failed = run_many(seeds, limits, servers, until)
    finally:
        for words in servers.stop():
            print(words.strip().splitlines()[-1] if words.strip() else "")
    print(f"{len(passed)} passed, {len(failed)} failed" + (f": {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
