"""What saves look at of older ones: damage to a group that generations share is found while its
rows are still here."""

from jaxreplay.checkpoint import verifying
from jaxreplay.checkpoint.files import Files
from jaxreplay.checkpoint.planning import Plan

_LITTLE = 8 * 2**20  # bytes that any save may read
_SAVES = 4  # after which a larger group is looked at, however little they wrote


class Rounds:
    """Whether groups that a new generation shares with older ones are still as they were written:
    one at a save, all in turn.

    A large one waits until as much was written as it has, or for the fourth save, so that a small
    save does not read it each time.
    """

    def __init__(self, store: Files):
        self._store = store
        # folders of groups; one that was looked at, or is new, comes last
        self._turns: list[str] = []
        self._num_saves = self._num_bytes = 0  # since one was

    def look(self, plan: Plan) -> dict[str, str]:
        """What is wrong with a group, by its folder; nothing, where it is whole, or none is read
        now."""
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
