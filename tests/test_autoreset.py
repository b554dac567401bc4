"""What an env does when an episode ends: said in each library's words, and what a wrong answer
leaves behind."""

import gymnasium
import pytest

import jaxreplay as jr

Mode = gymnasium.vector.AutoresetMode
SIZES = {"capacity": 64, "num_envs": 2, "batch_size": 4}


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        (Mode.NEXT_STEP, "next_step"),
        (Mode.SAME_STEP, "same_step"),
        (Mode.DISABLED, "same_step"),
    ],
)
def test_gymnasiums_modes_are_taken_as_they_are(mode, form):
    assert jr.uniform(**SIZES, autoreset=mode) == jr.uniform(**SIZES, autoreset=form)
    assert jr.rollout(length=4, num_envs=2, autoreset=mode).autoreset == form
    envs = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": mode},
    )
    assert jr.autoreset.of(envs) == form


@pytest.mark.parametrize("wrong", [None, "same", "SAME_STEP", 1, True])
def test_any_other_value_is_answered_with_all_forms_and_libraries(wrong):
    for make in (
        lambda: jr.uniform(**SIZES, autoreset=wrong),
        lambda: jr.rollout(length=4, num_envs=2, autoreset=wrong),
    ):
        with pytest.raises(ValueError, match="what your env does when an episode ends") as caught:
            make()
        for word in (*jr.autoreset.FORMS, "Gymnasium", "gymnax", "Brax", "autoreset.of(envs)"):
            assert word in str(caught.value)


def test_envs_that_do_not_say_are_refused():
    with pytest.raises(ValueError, match=r"a dict has no metadata\['autoreset_mode'\]"):
        jr.autoreset.of({})


def test_each_library_has_one_of_the_values():
    named = {name: getattr(jr.autoreset, name) for name in dir(jr.autoreset) if name.isupper()}
    libraries = {name for name, value in named.items() if value in jr.autoreset.FORMS}
    assert libraries == {
        *("GYMNASIUM", "ENVPOOL", "GYMNAX", "JUMANJI", "GYMNAX_BEFORE_1", "BRAX", "CRAFTAX")
    }
