"""`hybridps doctor --cluster`: whether the machines of a job reach each other, and how fast, before a job is tried.

    torchrun --nnodes 4 ... -m hybridps doctor --cluster

Every rank says its versions and what its settings come to (as `hybridps doctor` does). The first rank of each machine
opens plain TCP and UDP sockets on the network cards that a job would use, and tries those of all others. This needs
torch's Store and no connection of hybridps: it works where a job does not start.

Pairs take turns: in each round every machine is in one pair at most, so that no card is measured twice at a time. n
machines need n - 1 rounds (n if n is odd). Round trips and clocks are from one connection's shortest and median
exchanges. A rate is what arrives over one connection, without its first quarter. Beyond some 20 Gbit/s the rate says
what one core can do in Python. The path's MTU is the largest datagram that arrives without being cut up.
"""
