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
# Names of flashbax's modules that ours do not have.
_ARGUMENTS = "checks arguments of another function, which here does so itself"
_STATE = "takes a state and the sizes, which here are those of the buffer: use its methods"
_TREE = "works on flashbax's tree: jaxreplay.samplers.SumTree is ours"
FLASHBAX_NAMES = {
    "buffers.*.validate_*": _ARGUMENTS,
    "buffers.*.create_*": "makes a buffer from checked arguments: use make_*",
    "buffers.*trajectory_buffer.*add": _STATE,
    "buffers.*trajectory_buffer.*can_sample": _STATE,
    "buffers.*trajectory_buffer.*init": _STATE,
    "buffers.*trajectory_buffer.*sample": _STATE,
    "buffers.trajectory_queue.[a-z]*": _STATE,
    "buffers.prioritised_trajectory_buffer.get_*": _TREE,
    "buffers.prioritised_trajectory_buffer.set_priorities": _STATE,
    "buffers.prioritised_trajectory_buffer.S*": _TREE,
    "buffers.prioritised_trajectory_buffer.sum_tree": _TREE,
    "buffers.sum_tree.*": _TREE,
    "buffers.mixer.*_mixer_fn": _STATE,
    "buffers.mixer.*[tT]ypes": "lists the types that a mixer's annotations may have",
    "buffers.*.utils": "a module that is imported: import jaxreplay.compat.flashbax.utils",
    "buffers.prioritised_trajectory_buffer.trajectory_buffer": "the same",
    "buffers.*.make_*trajectory_buffer": "a function of another module that is imported",
    "*.add_dim_to_args": "adds an axis to the arguments of a function: use jnp.expand_dims",
    "vault.*": "jaxreplay.checkpoint saves buffers",
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
    "test_n_step_replay::test_n_steps_warns_with_custom_replay_buffer_class[NStep": (
        "gives no gamma, which several steps need"
    ),
}
