"""jaxreplay's drop-in for flashbax, `jaxreplay.compat.flashbax`, by the adapters of flashbax."""

import pathlib
import sys
from typing import ClassVar

from replay import loaded

import jaxreplay as jr
import jaxreplay.compat.flashbax as fbx

sys.modules["flashbax"] = fbx  # the one line that changes
theirs = loaded(pathlib.Path(__file__).with_name("flashbax.py"))

SLOTS = {"late_updates_change_no_other_step": "as flashbax's, an index is a slot"}
NAME = f"jaxreplay {jr.__version__}, compat.flashbax"


class Flat(theirs.Flat):
    """`fbx.make_flat_buffer`."""

    name = f"{NAME}, flat buffer"
    arguable: ClassVar = SLOTS


class Items(theirs.Items):
    """`fbx.make_item_buffer`."""

    name = f"{NAME}, item buffer"
    arguable: ClassVar = SLOTS | theirs.DUPLICATES


class Trajectories(theirs.Trajectories):
    """`fbx.make_trajectory_buffer`."""

    name = f"{NAME}, trajectory buffer"
    arguable: ClassVar = SLOTS | theirs.DUPLICATES
