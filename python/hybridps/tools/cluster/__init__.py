"""`hybridps doctor --cluster`: what the machines of a job are to each other, before a job is tried on them.

    torchrun --nnodes 4 ... -m hybridps doctor --cluster

Every rank says what it is made of and what its settings come to (as `hybridps doctor` does); the first rank of each
machine opens plain TCP and UDP sockets on the network cards that a job would use and tries those of all others. So it
needs torch's Store and nothing that hybridps connects: it works where a job does not start.

Pairs take turns: in each round every machine is in one pair at most, so that no card is measured twice at a time; n
machines need n - 1 rounds (n where n is odd). Round trips and clocks are from one connection's shortest and median
exchanges, a rate is what arrives over one connection, its first quarter left out: beyond some 20 Gbit/s it says what
one core can do in Python. The path's MTU is the largest datagram that arrives without being cut up.
"""
