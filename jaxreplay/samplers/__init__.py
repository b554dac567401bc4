"""Samplers choose which of the sampleable rows form a batch."""

from jaxreplay._util.random import words as words
from jaxreplay._util.struct import Node as Node
from jaxreplay._util.xla import after as after
from jaxreplay.samplers.blend import Blend as Blend
from jaxreplay.samplers.episodes import UniformEpisodes as UniformEpisodes
from jaxreplay.samplers.newest import Newest as Newest
from jaxreplay.samplers.online_queue import OnlineQueue as OnlineQueue
from jaxreplay.samplers.prioritized import Prioritized as Prioritized
from jaxreplay.samplers.queue import Queue as Queue
from jaxreplay.samplers.recent import Recent as Recent
from jaxreplay.samplers.sampler import Draw as Draw, Sampler as Sampler
from jaxreplay.samplers.sum_tree import SumTree as SumTree, SumTreeState as SumTreeState
from jaxreplay.samplers.uniform import Uniform as Uniform
from jaxreplay.samplers.without_replacement import WithoutReplacement as WithoutReplacement
from jaxreplay.storage.layout import Layout as Layout
from jaxreplay.storage.sampleable import Sampleable as Sampleable
from jaxreplay.storage.writes import WriteEffect as WriteEffect
