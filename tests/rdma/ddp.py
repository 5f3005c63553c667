"""A rank that trains a small network with DistributedDataParallel: python3 ddp.py ddp RANK WORLD FOLDER.

Prints what guest.py reads of every rank: OP lines with losses and a digest of the parameters, and DONE.
"""

import hashlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from hybridps.backend.register import register

rank, world, folder = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
register()  # this copy has no entry point by which torch would
torch.set_num_threads(1)
torch.manual_seed(0)
store = dist.FileStore(f"{folder}/torch", world)
dist.init_process_group("hybridps", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 10))
net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.25)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = torch.Generator().manual_seed(1 + rank)
for step in range(5):
    x, y = torch.randn(16, 256, generator=data), torch.randint(10, (16,), generator=data)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"OP loss {step} {total.item().hex()}", flush=True)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
print(f"OP parameters {digest}", flush=True)
dist.destroy_process_group()
print("DONE", flush=True)
