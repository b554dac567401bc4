"""Checks of older groups at each save: damage to a group that checkpoints share is found while the
buffer still has its rows."""

from jaxreplay.checkpoint import verifying
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.planning import Plan

_LITTLE = 8 * 2**20  # bytes that any save may read
_SAVES = 4  # saves after which a larger group is checked, even if they wrote little


class Rounds:
    """Check of the groups that a new checkpoint shares with older ones: one at a save, in turn.

    A large group waits until as many bytes were written as it has, or for the fourth save. So small
    saves do not read large groups each time.
    """

    def __init__(self, store: Files):
        self._store = store
        # folders of groups; a checked or new group goes to the end
        self._turns: list[str] = []
        self._num_saves = self._num_bytes = 0  # since the last check

    def look(self, plan: Plan) -> dict[str, str]:
        """Return the problem of a damaged group, by its folder: empty if the checked group is
        intact or no group is due."""
        groups = {group.folder: group for group in plan.kept if group.folder not in plan.again}
        if not groups:
            return {}
        before = [folder for folder in self._turns if folder in groups]
        self._turns = [*before, *sorted(groups.keys() - set(before))]
        group = groups[self._turns[0]]
        self._num_saves, self._num_bytes = self._num_saves + 1, self._num_bytes + plan.num_bytes
        if (
            self._num_saves < _SAVES
            and max(self._num_bytes, _LITTLE) < group.num_rows * plan.row_bytes
        ):
            return {}
        self._num_saves = self._num_bytes = 0
        self._turns = [*self._turns[1:], group.folder]
        problem = verifying.problem_of_group(self._store, group)
        return {group.folder: problem} if problem else {}
