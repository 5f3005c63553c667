"""One rank of benchmarks/tuner: all-reduces upon each line of stdin, "COUNT"; their seconds as JSON."""

import json
import os
import sys
import time


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("hybridps")
    from hybridps import _C

    own = torch.arange(int(sys.argv[1]) // 4, dtype=torch.float32) % 1000 + dist.get_rank()
    world = dist.get_world_size()
    expected = (own - dist.get_rank()) * world + sum(range(world))
    tensor = torch.empty_like(own)
    print("READY", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            tensor.copy_(own)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - began)
            assert torch.equal(tensor, expected)
        stats = _C.stats()
        print("RESULT " + json.dumps({"seconds": seconds} | {k: stats[k] for k in ("tuner_trials", "tuner_kept")}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
