"""Samplers: which sampleable rows a batch is made of."""

from jaxreplay.samplers.sampler import (
    ConsumingSampler as ConsumingSampler,
    Draw as Draw,
    PrioritySampler as PrioritySampler,
    Sampler as Sampler,
)
