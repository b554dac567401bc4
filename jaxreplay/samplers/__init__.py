"""Samplers: which drawable rows a batch is made of."""

from jaxreplay.samplers.sampler import (
    ConsumingSampler as ConsumingSampler,
    PrioritySampler as PrioritySampler,
    RankedSampler as RankedSampler,
    Sampler as Sampler,
)
