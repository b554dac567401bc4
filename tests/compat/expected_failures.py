"""Tests of other libraries that cannot pass over our buffers, by the beginning of their names, and
the reasons."""

_FUNCTION = "calls a private function of flashbax that computes indices of its tree"

FLASHBAX: dict[str, str] = {
    "prioritised_flat_buffer_test::test_adjust_priorities": (
        "sets priorities of pairs when one step is stored, so that there is no pair: ours ignores "
        "them"
    ),
    "prioritised_trajectory_buffer_test::test_add_and_can_sample_prioritised": (
        "calls prioritised_init with a length that is no multiple of the period, which the public "
        "function rounds down"
    ),
    "prioritised_trajectory_buffer_test::test_human_case_1": _FUNCTION,
    "prioritised_trajectory_buffer_test::test_human_case_2": _FUNCTION,
    "prioritised_trajectory_buffer_test::test_human_case_3": _FUNCTION,
}
BRAX: dict[str, str] = {
    "replay_buffers_test::testInvalidStateShape": (
        "replaces the state's data, which is computed from the stored rows here"
    )
}
SB3: dict[str, str] = {}
