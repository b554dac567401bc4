"""Samplers: which drawable rows a batch is made of."""

from jaxreplay.samplers.prioritized import Prioritized, PrioritizedState
from jaxreplay.samplers.sampler import PrioritySampler, Sampler
from jaxreplay.samplers.uniform import Uniform

__all__ = ["Prioritized", "PrioritizedState", "PrioritySampler", "Sampler", "Uniform"]
