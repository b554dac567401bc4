"""A sampler and a view from outside the library pass the tests that every buffer passes."""

import dataclasses
import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr
from tests.buffers import test_contract, test_in_place
from tests.checkpoint import test_changed_buffer, test_checkpoint
from tests.conftest import ALL, thorough
from tests.samplers import test_laws
from tests.support.buffers import Case, everything, jitted

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "extending.md"
CELLS = re.findall(r"```{code-cell}\n(.*?)```", PAGE.read_text(), re.DOTALL)
(CELL,) = (cell for cell in CELLS if "class LeastLearned" in cell)
NAMES = {"jax": jax, "jnp": jnp, "jr": jr, "__name__": __name__}
exec(compile(CELL, PAGE.name, "exec"), NAMES)
LeastLearned = NAMES["LeastLearned"]


def test_a_sampler_with_a_state_is_short_and_needs_no_private_name():
    its_own = CELL[: CELL.index("buffer = ")]
    assert len(its_own.splitlines()) < 60
    assert not re.search(r"(?<!self)\._", its_own)
    assert NAMES["buffer"].get(NAMES["state"], np.arange(3)).probability.tolist() == (
        pytest.approx([1 / 9, 4 / 9, 4 / 9])
    )


class Delta(jr.samplers.Node):
    obs: Any
    effect: Any  # change to the next observation, or 0 where the episode ended


class DeltaView(jr.views.View):
    window = jr.views.Window(after=1)

    def read(self, reader):
        obs, has_next = reader.obs(0), ~reader.is_terminated(0)
        difference = jax.tree.map(
            lambda after, before: jnp.where(has_next, after - before, 0), reader.obs(1), obs
        )
        return Delta(obs, difference)


CASE = Case(
    "least learned deltas",
    lambda shared: jr.ReplayBuffer(
        **shared, sampler=LeastLearned(), view=DeltaView(), autoreset="same_step_no_final_obs"
    ),
    is_plain=False,
)


def calls_are_in_place(case):
    for form in ("alone", "scan", "population"):
        test_in_place.check(form, functools.partial(test_in_place.of_case, case))


def draws_are_as_probable(case):
    test_laws.check_draws(case.replay().sampler)


CHECKS = (
    test_contract.test_a_state_and_items_keep_their_structure_and_dtypes,
    test_contract.test_a_donated_state_is_reused_and_gone,
    test_contract.test_weights_are_those_that_the_probabilities_give,
)
if ALL:
    CHECKS += (
        test_contract.test_an_abstract_example_is_enough,
        test_contract.test_equal_configurations_share_one_trace,
        test_contract.test_an_empty_buffer_is_flagged,
        test_contract.test_jit_equals_eager,
        test_contract.test_extend_equals_add_for_each_step,
        calls_are_in_place,
        draws_are_as_probable,
    )
name_of = lambda check: check.__name__.removeprefix("test_")


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_it_holds_outside_of_the_library(check):
    check(CASE)


def a_larger_buffer_restores_what_it_adopts(case, path):
    old = case.replay()
    new = dataclasses.replace(old, capacity=2 * old.capacity)
    test_changed_buffer.check_adopts(path, old, new, case.filled(old), case.example())


SAVES = (
    test_checkpoint.test_a_restored_state_goes_on_to_the_last_bit,
    thorough(a_larger_buffer_restores_what_it_adopts),
)


@pytest.mark.parametrize("check", SAVES, ids=name_of)
def test_it_is_saved(check, tmp_path):
    check(CASE, tmp_path)


def test_what_was_learned_from_comes_less_often():
    buffer = CASE.replay()
    state, get = CASE.filled(buffer), everything(buffer)
    rows = np.flatnonzero(get(state, 0).is_valid)
    chosen = np.resize([rows[0], rows[0], rows[1]], 8)  # rows[0] 6 times, rows[1] twice
    index = jax.tree.map(lambda leaf: np.asarray(leaf)[chosen], get(state, 0).index)
    state = jitted(buffer, "update_priorities")(state, index, np.ones(8, np.float32))
    expected = np.ones(len(rows))
    expected[:2] = 1 / 7, 1 / 3
    found = np.asarray(get(state, 0).probability)[rows]
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)


class Scaled(jr.views.View):
    """A view whose `read` calls a jitted method of its own."""

    takes = ("scale",)
    needs_steps = False

    @jax.jit
    def scaled(self, item):
        return jax.tree.map(lambda leaf: leaf * self.given["scale"], item)

    def read(self, reader):
        return self.scaled(reader.item())


def test_a_jitted_method_of_a_view_has_the_values_of_each_call():
    make = lambda: jr.ReplayBuffer(capacity=8, batch_size=2, sampler=jr.Uniform(), view=Scaled())
    buffer = jr.jit(make())
    state = buffer.extend(buffer.init({"x": np.float32(0)}), {"x": np.ones((3, 1), "f")})
    draw = lambda scale: make().sample(state, jax.random.key(0), scale=scale).experience["x"]
    assert jax.jit(draw)(2.0).tolist() == [2.0, 2.0]
    assert jax.jit(lambda: draw(5.0))().tolist() == [5.0, 5.0]
    both = jax.jit(lambda scale: (draw(scale).sum(), draw(3 * scale).sum()))
    assert both(2.0) == (4.0, 12.0)
    assert make() == make() != make().with_given({"scale": 2.0})


@dataclasses.dataclass(frozen=True)
class Times:
    """A function whose equality leaves its array out."""

    factor: Any = dataclasses.field(compare=False)

    def times(self, item, key=None):
        return {"x": item["x"] * self.factor}

    __call__ = times


def nested(factor):
    product = jax.jit(lambda x: x * factor)
    return lambda item, key=None: {"x": product(item["x"])}


FUNCTIONS = {
    "lambda": lambda factor: lambda item, key=None: {"x": item["x"] * factor},
    "partial": lambda factor: functools.partial(Times.times, Times(factor)),
    "nested jit": nested,
    "jit": lambda factor: jax.jit(Times(factor).times),
    "bound method": lambda factor: Times(factor).times,
    "dataclass": Times,
}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("dataclass", "jitted"),
        ("nested jit", "host"),
        *(thorough(kind, rows) for kind in FUNCTIONS for rows in ("device", "host")),
    ],
)
def test_functions_that_differ_only_in_an_array_are_not_mistaken_for_each_other(kind, rows):
    """Given to `map_rows`, and in a buffer's configuration."""
    items = jr.items(capacity=4, batch_size=2, allow_write=True)
    one = {"x": np.ones(1, np.float32)}
    for factor in (2.0, 5.0):
        function = FUNCTIONS[kind](np.full(1, factor, np.float32))
        buffer = jr.transform(items, function)
        if rows == "jitted":
            plain = jr.jit(items)
            state = plain.add(plain.init(one), {"x": np.ones((1, 1), np.float32)})
            state = plain.map_rows(state, function)
            found = [x.sample(state, jax.random.key(0)) for x in (plain, jr.jit(buffer))]
        else:
            found = []
            for each in (items, buffer):
                replay = jr.Replay(each, rows=rows, example=one)
                replay.add({"x": np.ones((1, 1), np.float32)})
                replay.map_rows(function)
                found.append(replay.sample())
        assert [np.unique(x.experience["x"]) for x in found] == [factor, factor**2]
        assert buffer == jr.transform(items, function)  # the same object: no new compilation


class Each(jr.views.View):
    """A view of an item after each of several functions."""

    functions: tuple[Any, ...]
    needs_steps = False

    def read(self, reader):
        return [function(reader.item()) for function in self.functions]


def test_functions_in_a_tuple_are_not_mistaken_for_each_other():
    for factor in (2.0, 5.0):
        view = Each(functions=(Times(np.full(1, factor, np.float32)),))
        buffer = jr.jit(jr.ReplayBuffer(capacity=4, batch_size=2, sampler=jr.Uniform(), view=view))
        state = buffer.add(buffer.init({"x": np.float32(0)}), {"x": np.ones(1, np.float32)})
        (found,) = buffer.sample(state, jax.random.key(0)).experience
        assert np.unique(found["x"]) == factor
        assert view == Each(functions=view.functions)
