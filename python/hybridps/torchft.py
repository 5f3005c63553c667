"""The public path of hybridps.backend.torchft."""

from hybridps.backend.torchft import *  # noqa: F403
