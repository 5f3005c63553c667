"""The public path of hybridps.training.direct."""

from hybridps.training.direct import *  # noqa: F403
