"""Each form of this library holds the properties of `benchmarks/conformance` that it offers."""

import pytest

from tests.conftest import thorough
from tests.support.conformance import FOLDER, PROPERTIES, NotOffered, adapters_of

FORMS = adapters_of(FOLDER / "adapters" / "ours.py")
FORMS |= adapters_of(FOLDER / "adapters" / "ours_sb3.py")
FORMS |= adapters_of(FOLDER / "adapters" / "one_file.py")
# Other processes, a million updates, seconds: each holds of all forms, or of none.
LONG = {
    "a_kill_in_a_save_leaves_one",
    "a_save_needs_little_memory",
    "an_add_costs_no_copy",
    "sums_do_not_drift",
}
OF_REPLAY = {"jit_scan_and_vmap_agree", "the_largest_priority_can_fall"}
NOT_OFFERED = {
    "Jitted": {"adds_and_samples_of_two_threads", "the_largest_priority_can_fall"},
    "OnDevice": OF_REPLAY,
    "OnHost": OF_REPLAY,
    "InFiles": OF_REPLAY,
    "DropIns": set(),
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (form, name) if form == "Jitted" and name not in LONG else thorough(form, name)
        for form in FORMS
        for name in PROPERTIES
    ],
)
def test_a_form_holds_a_property(form, name):
    try:
        PROPERTIES[name](FORMS[form])
    except NotOffered:
        assert name in NOT_OFFERED[form]
