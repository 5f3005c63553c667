"""Each wait and event of hybridps' device path taken away, one by one: is it noticed?

    python tests/simulated/mutations.py            # the table; some minutes

The simulated device knows each place of the extension that records an event, waits for one, writes a flag or waits for one, by
its address: a first run lists them, then each is run again without one. Noticed: a report of the device's book of order, wrong
bits, or a rank that gets stuck and says so. `hung` is the harness' limit.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "multiprocess"), os.path.join(os.path.dirname(HERE), "gpu")]

import harness  # noqa: E402
import on_device  # noqa: E402

DEVICE = "sim:0"
# What reaches all of them: small rings (places are used again, rings grow), messages, batches, futures, failures.
ENVIRONMENT = {"HYBRIDPS_STAGING_BYTES": "1M", "HYBRIDPS_SLICE_BYTES": "64K", "SIMULATED_PAUSE_US": "100"}


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
    # Two works of different channels in one future, and strided tensors: what comes after on the out stream.
    after, before = (rank + 1) % world, (rank - 1) % world
    got = torch.zeros(70_000, device=device)
    given = torch.full((70_000,), float(rank), device=device)
    messages = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, given, after)]
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


def try_one(drop, limit_s=60):
    environment = dict(ENVIRONMENT, SIMULATED_DROP=drop)
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


def main():
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
