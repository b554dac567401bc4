"""Actors in processes, threads or on a Ray cluster, that fill a `jaxreplay.Replay`."""

from jaxreplay.actors.actor import Actor as Actor
from jaxreplay.actors.actors import Actors as Actors
from jaxreplay.actors.cluster import ray as ray
from jaxreplay.actors.feed import Feed as Feed
from jaxreplay.actors.processes import local as local
from jaxreplay.actors.threads import threads as threads
