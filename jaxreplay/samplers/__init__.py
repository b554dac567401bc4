"""Samplers: which drawable rows a batch is made of."""

from jaxreplay.samplers.episodes import UniformEpisodes
from jaxreplay.samplers.prioritized import Prioritized, PrioritizedState
from jaxreplay.samplers.queue import Queue
from jaxreplay.samplers.rank_based import RankBased
from jaxreplay.samplers.recent import Recent
from jaxreplay.samplers.sampler import ConsumingSampler, PrioritySampler, RankedSampler, Sampler
from jaxreplay.samplers.uniform import Uniform
from jaxreplay.samplers.without_replacement import WithoutReplacement

__all__ = [
    "ConsumingSampler",
    "Prioritized",
    "PrioritizedState",
    "PrioritySampler",
    "Queue",
    "RankBased",
    "RankedSampler",
    "Recent",
    "Sampler",
    "Uniform",
    "UniformEpisodes",
    "WithoutReplacement",
]
