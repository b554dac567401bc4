"""Each form of this library holds the properties of `benchmarks/conformance` that it offers."""

import pytest

from tests.conftest import thorough
from tests.support.conformance import FOLDER, PROPERTIES, NotOffered, adapters_of

FORMS = adapters_of(FOLDER / "adapters" / "ours.py")
FORMS |= adapters_of(FOLDER / "adapters" / "ours_sb3.py")
FORMS |= adapters_of(FOLDER / "adapters" / "one_file.py")
# In each run other tests hold what the others do, of the pure functions.
QUICK = {
    ("Jitted", "bad_priorities_do_no_lasting_harm"),
    ("Jitted", "late_updates_change_no_other_step"),
    ("Jitted", "late_updates_leave_windows_whole"),
    ("DropIns", "importance_weights"),
}
THREADS = "adds_and_samples_of_two_threads"
OF_REPLAY = {"jit_scan_and_vmap_agree"}
SAVES = {name for name in PROPERTIES if "_save_" in name or "_resume_" in name}
SEQUENCES = {"sequences_stay_in_episodes", "recurrent_states_belong_to_the_first_step"}
NOT_OFFERED = {
    "Jitted": {THREADS},
    "OnDevice": OF_REPLAY,
    "OnHost": OF_REPLAY,
    "InFiles": OF_REPLAY,
    "DropIns": OF_REPLAY
    | SEQUENCES
    | {
        "the_largest_priority_can_fall",
        "true_final_observation_with_next_step",
        "no_false_target_without_final_observation",
        "masked_turns_are_no_steps",
        "narrow_dtypes_are_kept",
        "a_save_restores_to_another_capacity",
        "a_save_restores_to_another_n_step",
        THREADS,
    },
    "OneFile": SAVES | SEQUENCES | {"goals_are_of_the_same_episode", THREADS},
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (form, name) if (form, name) in QUICK else thorough(form, name)
        for form in FORMS
        for name in PROPERTIES
    ],
)
def test_a_form_holds_a_property(form, name):
    if name in NOT_OFFERED[form]:
        with pytest.raises(NotOffered):
            PROPERTIES[name](FORMS[form])
    else:
        PROPERTIES[name](FORMS[form])
