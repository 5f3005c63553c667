"""hybridps-server without hybridps: the program, and what finds UCX for it. `hybridps-server --help` explains it."""
