"""The values of a buffer's `autoreset`: what an env does when an episode ends, by library.

`"next_step"`
    The step after a done ignores its action, and returns the first observation of the next episode.
    So the observation that came with the done is the next row: the final observation.
`"same_step"`
    The env resets within the step that is done, and hands the final observation over beside the
    first one of the next episode. Each step brings it as `final_obs`.
`"same_step_no_final_obs"`
    The env resets within the step that is done, and the final observation is lost. A truncated
    episode gives up its last transition, rather than learn from a wrong one.

An env that you reset yourself is `"same_step"`; `final_obs` is what its `step` returned.

Each name below is the value for the library that it is named after.
"""

from typing import Any, get_args

from jaxreplay._util.aliases import Autoreset

GYMNASIUM: Autoreset = "next_step"  # vector envs of Gymnasium >= 1.0, unless made otherwise
ENVPOOL: Autoreset = "next_step"
GYMNAX: Autoreset = "same_step"  # >= 1.0: final_obs is info["final_observation"]
JUMANJI: Autoreset = "same_step"  # AutoResetWrapper(next_obs_in_extras=True): extras["next_obs"]
GYMNAX_BEFORE_1: Autoreset = "same_step_no_final_obs"
BRAX: Autoreset = "same_step_no_final_obs"  # its AutoResetWrapper, and MuJoCo Playground's
CRAFTAX: Autoreset = "same_step_no_final_obs"

FORMS: tuple[Autoreset, ...] = get_args(Autoreset)
# Gymnasium's AutoresetMode, by name: its enum is taken as it is.
_GYMNASIUM_MODES: dict[str, Autoreset] = {
    "NEXT_STEP": "next_step",
    "SAME_STEP": "same_step",
    "DISABLED": "same_step",  # the observation of a done is the final one
}


def of(envs: Any) -> Autoreset:
    """Return the value of `autoreset` for Gymnasium's vector envs.

    Args:
      envs: a `gymnasium.vector.VectorEnv`, whose metadata has its `autoreset_mode`.

    Raises:
      ValueError: the envs do not say what they do.

    Example:
      >>> import jaxreplay as jr, gymnasium
      >>> jr.autoreset.of(gymnasium.make_vec("CartPole-v1", num_envs=2))
      'next_step'
    """
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        raise ValueError(
            f"autoreset.of: a {type(envs).__name__} has no metadata['autoreset_mode']; only vector "
            "envs of Gymnasium >= 1.1 have. Name the library's value, such as jr.autoreset.GYMNAX"
        )
    return checked("autoreset.of", mode)


def checked(where: str, autoreset: Any) -> Autoreset:
    """Return one of `FORMS`, from one or from Gymnasium's enum.

    Raises:
      ValueError: it is missing, or none of these.
    """
    if type(autoreset).__name__ == "AutoresetMode":
        autoreset = _GYMNASIUM_MODES.get(autoreset.name, autoreset)
    if isinstance(autoreset, str) and autoreset in FORMS:
        return autoreset
    raise ValueError(
        f"{where}: autoreset={autoreset!r}, but it must say what your env does when an episode "
        "ends; a wrong answer corrupts targets silently:\n"
        '  "next_step"               the step after a done only hands over the final observation; '
        "the env resets then\n"
        "                            (Gymnasium >= 1.0 vector envs by default, EnvPool)\n"
        '  "same_step"               the env resets within the step, and hands the final '
        "observation beside it: Step.final_obs\n"
        "                            (gymnax >= 1.0, Jumanji, Gymnasium's AutoresetMode.SAME_STEP, "
        "envs that you reset yourself)\n"
        '  "same_step_no_final_obs"  the env resets within the step and the final observation is '
        "lost\n"
        "                            (Brax, Craftax, many pure-JAX wrappers; a truncated episode "
        "gives up its last transition)\n"
        "jaxreplay.autoreset has the value of each library, and autoreset.of(envs) that of "
        "Gymnasium's vector envs"
    )
