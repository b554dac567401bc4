"""Draw mutants of a module at random, and run the tests that hold its promises until one fails:
`python tests/mutants.py FILE [--sample 40] [--seed 0]`. cosmic-ray makes the mutants.

What it prints of a survivor is its change; the exit status is 1 where fewer than 85 % are killed.
"""

import argparse
import ast
import collections
import concurrent.futures
import difflib
import random
import sys

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins

from tests.mutations import ROOT, run_tests

LEAST = 0.85
ORACLE = "storage/test_oracle_streams.py"
# files of tests of each module, those that tell most first
TESTS = {
    "storage/writes.py": f"{ORACLE} buffers/test_contract.py storage/test_newest_row.py "
    "checkpoint/test_checkpoint.py::test_each_write_leaves_a_stamp_of_its_own",
    "storage/relayout.py": "buffers/test_adopt.py checkpoint/test_changed_buffer.py",
    "storage/sampleable.py": f"{ORACLE} samplers/test_uniform.py buffers/test_contract.py",
    "buffers/replay_buffer.py": f"{ORACLE} buffers/test_contract.py buffers/test_state_check.py "
    "buffers/test_errors.py buffers/test_newcomer_errors.py samplers/test_queue.py",
    "samplers/joined.py": "samplers/test_blend.py buffers/test_newcomer_errors.py "
    "buffers/test_adopt.py",
    "samplers/shares.py": "samplers/test_blend.py buffers/test_newcomer_errors.py",
    "samplers/sum_tree.py": "samplers/test_sum_tree.py samplers/test_prioritized.py "
    "storage/test_platforms.py",
    "views": f"{ORACLE} views/test_views.py views/test_transitions.py buffers/test_rewards.py",
    "actors": "actors/test_protocol.py actors/test_blocks.py actors/test_processes.py "
    "actors/test_actors.py",
    "datasets/episodes.py": "test_datasets.py test_dataset_files.py",
    "storage/file_rows.py": "buffers/test_tiered_kills.py buffers/test_tiered_files.py "
    "sb3/test_sb3_rows.py",
    "storage/array_files.py": "buffers/test_tiered_files.py buffers/test_tiered_kills.py",
    "buffers/tiered.py": "buffers/test_tiered.py buffers/test_tiered_files.py "
    "buffers/test_tiered_kills.py stateful/test_rows_of_others.py sb3/test_sb3_rows.py",
    "buffers/verbs.py": "buffers/test_verbs.py buffers/test_donation.py buffers/test_map_rows.py "
    "distributed/test_distributed.py",
    "distributed": "buffers/test_verbs.py distributed/test_distributed.py",
    "checkpoint/reader.py": "checkpoint/test_opened.py checkpoint/test_checkpoint.py "
    "inspection/test_inspect.py checkpoint/test_checkpoint_damage.py",
    "stateful/places.py": "buffers/test_tiered.py stateful/test_rows_of_others.py "
    "stateful/test_stateful.py stateful/test_staging.py sb3/test_sb3_rows.py",
    "stateful/owner.py": "stateful/test_staging.py stateful/test_rows_of_others.py "
    "stateful/test_stateful.py buffers/test_tiered.py buffers/test_tiered_files.py",
}


def _annotations(text):
    """Return the range of lines and columns of each annotation and decorator."""
    found = []
    for node in ast.walk(ast.parse(text)):
        found += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        found += getattr(node, "decorator_list", [])
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in found if n]


def mutants(path):
    """Return the changes that cosmic-ray knows of each place of a module, annotations left out."""
    found = collections.defaultdict(list)
    text, tree = path.read_text(), cosmic_ray.ast.get_ast_from_path(path)
    left_out = _annotations(text)
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        places = (
            start
            for node in cosmic_ray.ast.ast_nodes(tree)
            for start, _ in operator.mutation_positions(node)
        )
        for occurrence, start in enumerate(places):
            if not any(first <= start < end for first, end in left_out):
                found[start].append((path, operator, occurrence))
    return list(found.values())


def is_killed(mutant, tests):
    path, operator, occurrence = mutant
    text = path.read_text()
    try:
        changed = cosmic_ray.mutating.mutate_code(text, operator, occurrence)
    except AttributeError:  # it cannot replace an exception whose name has a dot
        return None
    failed = run_tests(path.relative_to(ROOT / "jaxreplay"), changed, tests, num_processes=0)
    if not failed:
        lines = difflib.unified_diff(text.splitlines(), changed.splitlines(), lineterm="", n=1)
        print(f"SURVIVED {path.name}", *list(lines)[2:], sep="\n", flush=True)
    return bool(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", choices=TESTS)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target, tests = ROOT / "jaxreplay" / options.file, TESTS[options.file]
    paths = [target] if target.is_file() else sorted(target.glob("*.py"))
    places, rng = [place for path in paths for place in mutants(path)], random.Random(options.seed)
    if failed := run_tests(paths[0].relative_to(ROOT / "jaxreplay"), paths[0].read_text(), tests):
        sys.exit(f"{failed} fails without a change")
    drawn = [rng.choice(place) for place in rng.sample(places, min(options.sample, len(places)))]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda mutant: is_killed(mutant, tests), drawn)]
    killed, num = found.count(True), len(found) - found.count(None)
    print(f"{options.file}: {killed} of {num} mutants killed, of {len(places)} places")
    sys.exit(killed < LEAST * num)


if __name__ == "__main__":
    main()
