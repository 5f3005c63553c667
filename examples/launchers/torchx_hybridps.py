"""torchx: ranks, and servers that sum for them, as two roles of one application.

    torchx run -s local_cwd examples/launchers/torchx_hybridps.py:job --script examples/train_ddp.py --machines 3 \\
        --servers 1 --token_file ~/token

The ranks' first replica keeps torch's Store. With a scheduler of several machines the servers' addresses are given
(--server_hosts), as is the host of the first machine (--host). An application ends when all of its roles do, and servers do
not end by themselves: `torchx cancel` when the ranks have.
"""

import torchx.specs as specs


def job(
    script: str,
    machines: int = 3,
    ranks: int = 1,
    servers: int = 1,
    server_port: int = 7000,
    server_hosts: str = "127.0.0.1",
    host: str = "127.0.0.1",
    port: int = 29500,
    token_file: str = "",
    image: str = "",
    emulate: bool = False,
) -> specs.AppDef:
    """Training on several machines with dedicated servers.

    Args:
        script: what each rank runs
        machines: agents of torchrun, one per machine
        ranks: ranks per machine
        servers: machines that only sum; server I listens on port server_port + I
        server_port: first port of the servers
        server_hosts: their hosts, separated by commas; one for all of them, or one each
        host: the host of the ranks' first replica, where torch's Store listens
        port: the Store's port
        token_file: secret of servers and ranks, a path that is there on all machines; needed unless all are this one
        image: image of the containers, for schedulers that use any
        emulate: all machines are this one: each replica is a node of its own
    """
    hosts = server_hosts.split(",") * (servers if "," not in server_hosts else 1)
    places = [f"{hosts[index]}:{server_port + index}" for index in range(servers)]
    secret = {"HYBRIDPS_TOKEN_FILE": token_file} if token_file else {}
    node = specs.macros.replica_id
    roles = [
        specs.Role(
            name=f"server{index}",
            image=image,
            entrypoint="hybridps-server",
            args=["--listen", place],
            env=secret | ({"HYBRIDPS_NODE": f"server{index}"} if emulate else {}),
            num_replicas=1,
        )
        for index, place in enumerate(places)
    ]
    # A static start: with c10d the Store takes a random port, which no firewall can let through.
    rendezvous = ["--node-rank", node, "--master-addr", host, "--master-port", str(port)]
    roles.append(
        specs.Role(
            name="ranks",
            image=image,
            entrypoint="torchrun",
            args=["--nnodes", str(machines), "--nproc-per-node", str(ranks), *rendezvous, script],
            env=secret
            | ({"HYBRIDPS_SERVERS": ",".join(places)} if places else {})
            | ({"HYBRIDPS_NODE": f"machine{node}"} if emulate else {}),
            num_replicas=machines,
            retry_policy=specs.RetryPolicy.APPLICATION,
        )
    )
    return specs.AppDef(name="hybridps", roles=roles)
