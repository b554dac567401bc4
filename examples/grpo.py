"""GRPO on a toy task with `jr.Groups`: a learner beside actors that are behind it.

    python examples/grpo.py   # 15 seconds on two CPU cores; writes out/grpo.png

Copy `loss` and the calls of `GROUPS`. A prompt is a digit; a completion is right where it repeats
the digit, and stops at the end token. Actors hold a policy that is up to `--lag` updates old, and
their completions of a prompt come in parts, mixed with those of others. The learner takes complete
groups alone, none older than `--max-staleness` updates, and each at most twice.

References:
  Shao et al., "DeepSeekMath" (2024), https://arxiv.org/abs/2402.03300, section 4. Here without a
  penalty to a reference policy.
"""

import sys

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxreplay as jr

DIGITS, END, LENGTH, SIZE = 10, 10, 8, 8  # the end token is the eleventh
NUM_PROMPTS = 16  # of an update
NUM_COMPLETIONS = NUM_PROMPTS * SIZE
GROUPS = jr.Groups(
    group_size=SIZE, capacity=256, batch_size=NUM_PROMPTS, max_uses=2, strategy="variance"
)
OPTIMIZER = optax.adam(3e-2)


def logits_of(params, prompt, last):
    """Return the logits of the next token: float32[..., 11]."""
    return params["prompt"][prompt] + params["last"][last]


@jax.jit
def act(params, key, prompt):
    """Return completions of prompts int32[N]: leaves [N, ...]."""

    def step(carry, key):
        last, goes_on = carry
        logits = logits_of(params, prompt, last)
        token = jax.random.categorical(key, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
        return (token, goes_on & (token != END)), (token, log_prob, goes_on)

    start = jnp.full(prompt.shape, END), jnp.ones(prompt.shape, bool)
    _, found = jax.lax.scan(step, start, jax.random.split(key, LENGTH))
    token, log_prob, mask = (jnp.moveaxis(leaf, 0, 1) for leaf in found)
    reward = ((token == prompt[:, None]) & mask).mean(axis=1)
    return {"prompt": prompt, "token": token, "log_prob": log_prob, "mask": mask, "reward": reward}


def loss(params, batch):
    """Return the clipped loss of groups, leaves [B, G, ...], over the tokens in their masks."""
    t = batch.experience
    advantage = t["reward"] - t["reward"].mean(axis=1, keepdims=True)
    advantage = advantage / (t["reward"].std(axis=1, keepdims=True) + 1e-6)
    last = jnp.concatenate([jnp.full_like(t["token"][..., :1], END), t["token"][..., :-1]], axis=-1)
    log_probs = jax.nn.log_softmax(logits_of(params, t["prompt"][..., None], last))
    log_prob = jnp.take_along_axis(log_probs, t["token"][..., None], axis=-1)[..., 0]
    ratio = jnp.exp(log_prob - t["log_prob"])
    gain = jnp.minimum(
        ratio * advantage[..., None], jnp.clip(ratio, 0.8, 1.2) * advantage[..., None]
    )
    return -jr.masked_mean(gain, t["mask"])  # the mask is False where a group is not valid


@jax.jit
def update(params, opt_state, state, key, version, max_staleness):
    state, batch = GROUPS.pop(state, key, version=version, max_staleness=max_staleness)
    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(params, batch), opt_state)
    return optax.apply_updates(params, updates), opt_state, state, batch


def train(args, seed):
    """Return the mean reward and the staleness of each update."""
    key, random = jax.random.key(seed), np.random.default_rng(seed)
    params = {"prompt": jnp.zeros((DIGITS, 11)), "last": jnp.zeros((11, 11))}
    opt_state, versions, groups = OPTIMIZER.init(params), [params], jr.jit(GROUPS)
    example = jax.eval_shape(act, params, key, jnp.zeros(1, jnp.int32))
    state = groups.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), example))
    waiting, rewards, staleness = [], [], []  # completions: number, version, leaves
    for version in range(args.steps // NUM_COMPLETIONS):
        # the policy that acts is a few updates old
        prompt = random.integers(0, DIGITS, NUM_PROMPTS)
        lag = int(random.integers(0, args.lag + 1))
        acted_with = max(version - lag, 0)
        key, act_key, pop_key = jax.random.split(key, 3)
        made = jax.device_get(act(versions[acted_with], act_key, np.repeat(prompt, SIZE)))
        rewards.append(made["reward"].mean())
        numbers = np.repeat(NUM_PROMPTS * version + np.arange(NUM_PROMPTS), SIZE)
        waiting += [
            (n, acted_with, jax.tree.map(lambda x, k=k: x[k], made)) for k, n in enumerate(numbers)
        ]
        random.shuffle(waiting)
        sent, waiting = (
            waiting[:NUM_COMPLETIONS],
            waiting[NUM_COMPLETIONS:],
        )  # the rest comes with later ones
        number, made_with, leaves = zip(*sent, strict=True)
        items = jax.tree.map(lambda *x: np.stack(x), *leaves)
        state = groups.add(state, items, np.int32(number), np.int32(made_with))
        params, opt_state, state, batch = update(
            params, opt_state, state, pop_key, version, args.max_staleness
        )
        staleness += (version - np.asarray(batch.version))[np.asarray(batch.is_valid)].tolist()
        versions.append(params)
    return np.array(rewards), np.array(staleness)


def main(argv=None):
    parser = common.parser(__doc__, out="out/grpo.png", steps=150 * NUM_COMPLETIONS, seeds=3)
    parser.add_argument("--lag", type=int, default=3, help="most updates that an actor is behind")
    parser.add_argument("--max-staleness", type=int, default=4, help="of a group, in updates")
    args = parser.parse_args(argv)
    runs = [train(args, args.seed + nth) for nth in range(args.seeds)]
    rewards = np.stack([reward for reward, _ in runs], axis=1)
    curves = {"reward": (np.arange(len(rewards)), rewards)}
    common.plot(args.out, {"title": "Right tokens", "ylabel": "part", "curves": curves})
    last, oldest = float(rewards[-10:].mean()), max(int(stale.max()) for _, stale in runs)
    return common.report(
        last >= 0.9 and oldest <= args.max_staleness,
        reward_at_first=round(float(rewards[0].mean()), 3),
        reward_at_last=round(last, 3),
        largest_staleness=oldest,
        groups_used=sum(len(stale) for _, stale in runs),
        plot=str(args.out),
    )


if __name__ == "__main__":
    sys.exit(0 if main()["reached"] else "not reached: the policy is wrong, or groups were too old")
