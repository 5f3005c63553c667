"""The public path of hybridps.training.cross_barrier."""

from hybridps.training.cross_barrier import *  # noqa: F403
