"""Each wait and event of hybridps' device path taken away, one by one: is it noticed?

    python tests/simulated/mutations.py            # the table; some minutes
    python tests/simulated/mutations.py --sources  # faults of other kinds, in the sources: builds an extension

The simulated device knows each place of the extension that records an event, waits for one, writes a flag or waits for
one, by its address: a first run lists them, then each is run again without one. Noticed: a report of the device's book
of order, wrong bits, or a rank that gets stuck and says so. `hung` is the harness' limit.
"""

import glob
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "multiprocess"), os.path.join(os.path.dirname(HERE), "gpu")]

import harness  # noqa: E402
import on_device  # noqa: E402

DEVICE = "sim:0"
ROOT = os.path.dirname(os.path.dirname(HERE))
# name -> (file under csrc/hybridps, what is there, what is there instead where MUTATED is true)
SOURCES = {
    "tensors are let go when any stream has waited": (
        "pg/stream_work.cpp",
        "if (current.native == issued_on_.native) held_->let_go();",
        "if (MUTATED || current.native == issued_on_.native) held_->let_go();",
    ),
    "tensors are let go after the call": (
        "pg/issue_on_stream.cpp",
        "  work->enqueued();\n",
        "  if (MUTATED) held->let_go();\n  work->enqueued();\n",
    ),
    "strided tensors are filled on the caller's stream": (
        "pg/issue_on_stream.cpp",
        "const c10::StreamGuard guard(as_torch_stream(stream, device));",
        "const c10::OptionalStreamGuard guard("
        "MUTATED ? std::nullopt : std::optional(as_torch_stream(stream, device)));",
    ),
    "a strided output is let go when its copy is put on a stream": (
        "pg/tensors.cpp",
        "    hold(to);  // on a device",
        "    if (!MUTATED) hold(to);  // on a device",
    ),
    "the operation comes after another stream than the caller's": (
        "pg/issue_on_stream.cpp",
        "request.caller = current_stream(device);",
        "request.caller = MUTATED ? channels[i]->out_stream() : current_stream(device);",
    ),
    "a future is complete on the caller's stream": (
        "pg/stream_work.cpp",
        "const c10::StreamGuard guard(as_torch_stream(last, device_));",
        "const c10::OptionalStreamGuard guard("
        "MUTATED ? std::nullopt : std::optional(as_torch_stream(last, device_)));",
    ),
    "a future of several works stands for one": (
        "pg/stream_work.cpp",
        "if (work->channels_[i]->out_stream().native != last.native)",
        "if (!MUTATED && work->channels_[i]->out_stream().native != last.native)",
    ),
    "wait() waits for nothing": (
        "staging/staged.cpp",
        "  if (is_over()) return {};\n",
        "  if (MUTATED || is_over()) return {};\n",
    ),
    "a place of the ring is taken whose end is not on a stream yet": (
        "staging/channel.cpp",
        "  while (!open_ways_.empty() && open_ways_.front().number <= number)\n",
        "  while (!MUTATED && !open_ways_.empty() && open_ways_.front().number <= number)\n",
    ),
    "two places of the ring are taken before the stream has waited for them": (
        "staging/channel.cpp",
        "  free_until_ = freed_.front().until;\n",
        "  free_until_ = freed_.front().until + (MUTATED ? 2 : 0);\n",
    ),
    "a way out comes after one way in too few": (
        "staging/channel.cpp",
        "  if (!options_.one_stream && way.number > arrived_) {\n",
        "  if (!options_.one_stream && way.number > arrived_ + (MUTATED ? 1 : 0)) {\n",
    ),
    "a slice is done before the engine had it": (
        "staging/channel.cpp",
        "  if (Status status = device_->write_flag(in_, ready_, word_of(number)); !status.is_ok()) return status;\n",
        "  if (MUTATED) done_.word->store(word_of(number));\n"
        "  if (Status status = device_->write_flag(in_, ready_, word_of(number)); !status.is_ok()) return status;\n",
    ),
    "a slice is submitted before the device has come to it": (
        "staging/channel.cpp",
        "  if (Status status = device_->write_flag(in_, ready_, word_of(number)); !status.is_ok()) return status;\n",
        "  if (MUTATED) ready_.word->store(word_of(number));\n"
        "  if (Status status = device_->write_flag(in_, ready_, word_of(number)); !status.is_ok()) return status;\n",
    ),
}
# What reaches all of them: small rings (places are used again, rings grow), messages, batches, futures, failures.
ENVIRONMENT = {"HYBRIDPS_LIMITS": "staging_bytes=1M,slice_bytes=64K", "SIMULATED_PAUSE_US": "100"}


def exercise(rank, world, device):
    """Returns the call sites."""
    import datetime

    import bodies
    import random_programs
    import sim
    import torch
    import torch.distributed as dist

    module = torch.get_device_module(device)
    # As many operations as the ring has no place for, each slower than the next one's call.
    tensors = [torch.full((300_000,), float(rank + i), device=device) for i in range(6)]
    for turn in range(2):
        module.busy(5)
        works = [dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True) for t in tensors]
        for work in works:
            work.wait()
    for i, t in enumerate(tensors):
        bodies.equal("all_reduce", t, torch.full((300_000,), float(world - 1 + i)))
    bodies.mixed_group(rank, world, device)
    bodies.freed_at_once(rank, world, device, 3)
    bodies.strided_and_dropped(rank, world, device, 2)
    # Two works of different channels in one future, and strided tensors: what comes after on the out stream.
    after, before = (rank + 1) % world, (rank - 1) % world
    got = torch.zeros(70_000, device=device)
    given = torch.full((70_000,), float(rank), device=device)
    messages = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(messages):
        work.get_future().wait()
    bodies.equal("coalesced messages", got, torch.full((70_000,), float(before)))
    random_programs.run(rank, world, device, 1, 12, 12, 100)
    # A failure: the tensor of an operation that fails while its stream has not come to it.
    group = dist.new_group()
    slow = torch.ones(70_000, device=device)
    dist.all_reduce(slow, group=group)
    module.synchronize()
    dist.barrier()
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=0.5)
        backend = group._get_backend(torch.device(device))
        failing = torch.ones(70_000, device=device)
        work = backend.allreduce([failing], options)
        try:
            work.wait(datetime.timedelta(seconds=30))
        except RuntimeError:
            pass
        module.synchronize()
    dist.barrier()
    module.synchronize()
    return sim.native().sites()


def try_one(drop, limit_s=60, **more):
    environment = dict(ENVIRONMENT, SIMULATED_DROP=drop, **more)
    results = harness.run_ranks(
        on_device.on_simulated,
        "1+1",
        args=("mutations:exercise", DEVICE),
        env=environment,
        init=False,
        check=False,
        timeout=limit_s,
        pg_timeout=10,
        grace=5,
    )
    if not results.failure:
        return "NOT NOTICED", results
    text = "\n".join(report.error + report.output for report in results.reports)
    for sign, word in (
        ("without order", "no order"),
        ("instead of", "wrong bits"),
        ("Error", "an error"),
    ):
        if sign in text:
            return word, results
    return ("hung" if any(report.hung for report in results.reports) else "crashed"), results


def build_mutated():
    """The extension with all of SOURCES, each switched on by its name. Edits the working tree, and puts it back."""
    texts = {}
    for number, (file, old, new) in enumerate(SOURCES.values()):
        path = os.path.join(ROOT, "csrc", "hybridps", file)
        if path not in texts:
            with open(path) as source:
                texts[path] = [source.read()] * 2
        original, text = texts[path]
        assert old in text, f"{file} has changed: {old}"
        asked = 'std::getenv("SIMULATED_MUTATION")'
        test = f"({asked} != nullptr && std::atoi({asked}) == {number})"
        # Its line may be in another's replacement, which keeps it.
        texts[path] = [original, text.replace(old, new.replace("MUTATED", test), 1)]
    (folder,) = glob.glob(os.path.join(ROOT, "build", f"cp{sys.version_info[0]}{sys.version_info[1]}-*"))
    try:
        for path, (_, text) in texts.items():
            with open(path, "w") as source:
                source.write("#include <cstdlib>\n#include <cstring>\n#include <optional>\n" + text)
        subprocess.run(["cmake", "--build", folder, "-j2", "--target", "_C"], check=True, stdout=subprocess.DEVNULL)
        (made,) = glob.glob(os.path.join(folder, "python", "hybridps", "_C.*.so"))
        os.makedirs(os.path.join(ROOT, "build", "mutated"), exist_ok=True)
        return shutil.copy(made, os.path.join(ROOT, "build", "mutated"))
    finally:
        for path, (original, _) in texts.items():
            with open(path, "w") as source:
                source.write(original)


def sources():
    extension = build_mutated()
    missed = 0
    for number, name in enumerate(SOURCES):
        how, results = try_one("", SIMULATED_EXTENSION=extension, SIMULATED_MUTATION=str(number))
        missed += how == "NOT NOTICED"
        print(f"{name:64} {how}", flush=True)
    print(f"{len(SOURCES)} faults, {missed} not noticed")
    return missed


def main():
    if "--sources" in sys.argv:
        return sources()
    how, results = try_one("")
    if how != "NOT NOTICED":
        print(results.failure)
        raise SystemExit("without a mutation it must pass")
    sites = {}
    for value in results:
        for site, count in value.items():
            sites[site] = sites.get(site, 0) + count
    missed = 0
    for site in sorted(sites):
        if len(sys.argv) > 1 and site not in sys.argv[1:]:
            continue
        how, results = try_one(site)
        missed += how == "NOT NOTICED"
        print(f"{site:24} {sites[site]:6} calls  {how}", flush=True)
    print(f"{len(sites)} places, {missed} not noticed")
    return missed


if __name__ == "__main__":
    sys.exit(main() != 0)
