"""The public path of hybridps.training.local_steps."""

from hybridps.training.local_steps import *  # noqa: F403
