"""Values of a buffer's `autoreset`: how an env behaves when an episode ends.

`"next_step"`
    The step after a done ignores its action, and returns the first observation of the next episode.
    The observation returned with the done is the episode's final one, and becomes the next row.
`"same_step"`
    The env resets within the step that is done. That step returns the final observation as well as
    the next episode's first one. Pass the final observation as `Step.final_obs`.
`"same_step_no_final_obs"`
    The env resets within the step that is done, and the final observation is lost. The last
    transition of a truncated episode is dropped, because its next observation is unknown.

If you reset the env yourself, use `"same_step"`; `final_obs` is the observation that its `step`
returned.

Each constant is the value for the library in its name.
"""

import sys
from typing import Any, get_args

from jaxreplay._util.aliases import Autoreset

GYMNASIUM: Autoreset = "next_step"  # default of vector envs, Gymnasium >= 1.0
ENVPOOL: Autoreset = "next_step"
GYMNAX: Autoreset = "same_step"  # >= 1.0: final_obs is info["final_observation"]
JUMANJI: Autoreset = "same_step"  # AutoResetWrapper(next_obs_in_extras=True): extras["next_obs"]
GYMNAX_BEFORE_1: Autoreset = "same_step_no_final_obs"
BRAX: Autoreset = "same_step_no_final_obs"  # its AutoResetWrapper
CRAFTAX: Autoreset = "same_step_no_final_obs"
JAXMARL: Autoreset = "same_step_no_final_obs"
MANISKILL: Autoreset = "same_step"  # final_obs is infos["final_observation"], once an env ended
ISAAC_LAB: Autoreset = "same_step_no_final_obs"
MJLAB: Autoreset = "same_step_no_final_obs"  # "same_step" if auto_reset=False: you reset it
PLAYGROUND: Autoreset = "same_step_no_final_obs"  # MuJoCo Playground
PETTINGZOO: Autoreset = "same_step"  # you reset it; final_obs is what its `step` returned

FORMS: tuple[Autoreset, ...] = get_args(Autoreset)
# Values by the names of Gymnasium's `AutoresetMode`, so that buffers accept the enum.
_GYMNASIUM_MODES: dict[str, Autoreset] = {
    "NEXT_STEP": "next_step",
    "SAME_STEP": "same_step",
    "DISABLED": "same_step",  # the step that is done returns the final observation
}


def of(envs: Any) -> Autoreset:
    """Return the value of `autoreset` for Gymnasium's vector envs.

    Args:
      envs: A `gymnasium.vector.VectorEnv` with `autoreset_mode` in its metadata; or one of
        Gymnasium 1.0's own, which has none.

    Returns:
      "next_step", "same_step" or "same_step_no_final_obs".

    Raises:
      ValueError: The metadata has no `autoreset_mode`.

    Example:
      >>> import jaxreplay as jr, gymnasium
      >>> jr.autoreset.of(gymnasium.make_vec("CartPole-v1", num_envs=2))
      'next_step'
    """
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is None and _is_of_gymnasium_1_0(envs):
        return GYMNASIUM
    if mode is None:
        raise ValueError(
            f"autoreset.of: a {type(envs).__name__} has no metadata['autoreset_mode'], which only "
            "vector envs of Gymnasium >= 1.1 have. Pass a library's value, such as "
            "autoreset=jr.autoreset.GYMNAX"
        )
    return checked("autoreset.of", mode)


def _is_of_gymnasium_1_0(envs: Any) -> bool:
    """Return whether vector envs are Gymnasium 1.0's own: all of them reset in the next step."""
    version = getattr(sys.modules.get("gymnasium"), "__version__", "")
    modules = {one.__module__ for one in type(getattr(envs, "unwrapped", envs)).__mro__}
    own = {name for name in modules if name.startswith("gymnasium.")}
    return version.startswith("1.0.") and bool(own - {"gymnasium.vector.vector_env"})


def checked(where: str, autoreset: Any) -> Autoreset:
    """Check a value of `autoreset`, and convert Gymnasium's enum.

    Args:
      where: Name of the caller, for the error.
      autoreset: One of `FORMS`, or a `gymnasium.vector.AutoresetMode`.

    Returns:
      One of `FORMS`.

    Raises:
      ValueError: `autoreset` is missing or none of these.
    """
    if type(autoreset).__name__ == "AutoresetMode":
        autoreset = _GYMNASIUM_MODES.get(autoreset.name, autoreset)
    if isinstance(autoreset, str) and autoreset in FORMS:
        return autoreset
    raise ValueError(
        f"{where}: autoreset={autoreset!r}, but it must say what your env does when an episode "
        "ends; a wrong value corrupts targets silently:\n"
        '  "next_step"               the env resets in the step after a done, which ignores its '
        "action\n"
        "                            (Gymnasium >= 1.0 vector envs by default, EnvPool)\n"
        '  "same_step"               the env resets within the step that is done, and also returns '
        "the final observation: Step.final_obs\n"
        "                            (gymnax >= 1.0, Jumanji, Gymnasium's AutoresetMode.SAME_STEP, "
        "envs that you reset yourself)\n"
        '  "same_step_no_final_obs"  the env resets within the step that is done, and the final '
        "observation is lost\n"
        "                            (Brax, Craftax, many pure-JAX wrappers; a truncated episode's "
        "last transition is dropped)\n"
        "Use a library's constant, such as jr.autoreset.BRAX, or jr.autoreset.of(envs) for "
        "Gymnasium's vector envs"
    )
