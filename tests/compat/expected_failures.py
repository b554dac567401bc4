"""Tests of other libraries that cannot pass over our buffers, by the beginning of their names, and
the reasons."""

_FUNCTION = "calls a private function of flashbax that computes indices of its tree"

FLASHBAX = {
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
BRAX = {
    "replay_buffers_test::testInvalidStateShape": (
        "replaces the state's data, which is computed from the stored rows here"
    )
}
_EMPTY = "samples a buffer to which nothing was added, by setting its flag full"
_DISPLACED = (
    "asks for the oldest of 10 transitions in a buffer of 10, whose place a final observation took"
)
SB3 = {
    "test_buffers::test_buffer_dtypes": _EMPTY,
    "test_n_step_replay::test_nstep_early_termination[0-": _DISPLACED,
    "test_n_step_replay::test_nstep_early_truncation[0-": _DISPLACED,
    "test_n_step_replay::test_nstep_no_terminations": "writes into dones, which is a copy",
}
