"""The public path of hybridps.training.compress."""

from hybridps.training.compress import *  # noqa: F403
