# make demo      trains an agent and leaves a plot in out/
# make quick     lint, and a few tests of two buffers: for each change (half a minute)
# make test      a test of each promise, and a program with the oldest JAX (8 minutes on two cores)
# make test-all PART=NAME  the same checks over more buffers, forms and seeds, docstrings and the oldest JAX: for each night; PART=list names them
# make docs      builds the docs into out/docs, and runs every code cell
# make pages     looks at the built docs in headless Chromium, which is to be installed: nothing is cut
# make examples  runs every example in full (20 minutes)
# make recipes   runs the steps, and compares the stacked frames, of env libraries that are not among the tests' own (Brax, Jumanji, Craftax, EnvPool)
# make datasets  reads what TensorFlow Datasets, flashbax and zarr write, beside OGBench's own loader
# make conformance  holds other libraries, each in an environment of its own, and this one to the same properties (REPLAY=ours: one)
# make matrix    installs this library beside LeRobot, Isaac Lab, TorchRL and others, one at a time, and tests it there; writes a table of docs/install.md (NEIGHBOUR=brax: one)
# make compat    older and newer JAX and Python; the tests of flashbax, Brax and Stable-Baselines3 over our buffers (20 minutes)
# make soak PART=NAME    the same checks at full size, a part of at most 20 minutes
# make mutations  breaks the package one line at a time, which a test must notice each time
# make mutants FILE=storage/writes.py SAMPLE=40  changes a module in 40 ways at random, most of which a test must notice
# make aot DEVICE=NAME   compiles for a TPU or GPU that is not there, and checks what comes out; writes benchmarks/ACCELERATORS.md
# make gpu       GPU tests and figures, on a GPU; writes benchmarks/GPU.md and TORCH_LOOP_GPU.md
# make dist      builds both distributions of a clean clone, and runs the README's programs from the wheel
# make workflows checks the workflows of .github
# make bench     side by side with flashbax, NumPy, orbax and Stable-Baselines3; writes benchmarks/*.md
#
# The tests keep compiled programs in ~/.cache/jaxreplay/xla; JAXREPLAY_CACHE=off compiles everything anew.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# A new environment, whose pip knows the groups of pyproject.toml: $(call environment,FOLDER,PYTHON)
environment = $(or $(2),$(PYTHON)) -m venv $(1) && $(1)/bin/pip --disable-pip-version-check -q install "pip>=25.1,<26.2"
PYTEST := -m pytest -q -n 2 --dist loadgroup
# gymnax 1.0.1 declares jax < 0.12 but runs on it, so that it is installed without its dependencies, and these are named here. Minari 0.5.4 needs Pillow.
EXAMPLES := flax optax matplotlib tqdm six gymnasium seaborn "minari[hdf5]" pillow

.PHONY: demo docs pages dist workflows matrix datasets examples ruff lint quick oldest test test-all test-oldest mutants mutations compat conformance soak recipes bench gpu aot clean
$(VENV)/installed: Makefile pyproject.toml constraints.txt
	$(call environment,$(VENV))
	$(PIP) install -c constraints.txt --group test --group dev -e ".[torch,sb3,checkpoint,lerobot,ray]" $(EXAMPLES)
	$(PIP) install -c constraints.txt --no-deps gymnax
	touch $@

# A server that speaks as S3 does, on this machine.
$(VENV)/soak: $(VENV)/installed
	$(PIP) install -c constraints.txt "moto[s3]" flask flask-cors
	touch $@

# Of TorchRL the memory map and actors are measured, which run with a newer tensordict than it asks for.
$(VENV)/bench: $(VENV)/installed
	$(PIP) install -c constraints.txt flashbax tensordict "moto[s3]" flask flask-cors
	$(PIP) install --no-deps torchrl==0.13.3
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/dqn.py

# Every code cell runs, some beside flashbax and Stable-Baselines3. Warnings are errors.
DOCS := .venv-docs
$(DOCS)/installed: Makefile pyproject.toml constraints.txt
	$(call environment,$(DOCS))
	$(DOCS)/bin/pip --disable-pip-version-check -q install -c constraints.txt --group docs -e ".[torch,sb3,checkpoint]" $(EXAMPLES) flashbax tensordict
	$(DOCS)/bin/pip --disable-pip-version-check -q install -c constraints.txt --no-deps gymnax
	touch $@

docs: $(DOCS)/installed
	rm -rf docs/api/names  # pages of names that went
	$(DOCS)/bin/python -m sphinx -b html -q -E -W --keep-going docs out/docs

pages: $(DOCS)/installed
	$(DOCS)/bin/python docs/check_pages.py

examples: $(VENV)/installed
	set -e; for example in dqn_minimal sharded_dqn multihost_dqn dqn ppo sac atari_frame_stack r2d2 her offline_to_online purejaxrl_dqn torch_dqn fast_sac_torch actors_dqn batched_inference robot sb3_dict_sac resume steps laplacian dreamer_replay rlpd recurrent_ppo vdn grpo plr; do echo "== $$example"; $(BIN)/python examples/$$example.py; done; $(BIN)/python examples/rlpd.py --framework torch

ruff: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: ruff
	$(BIN)/pyright --pythonpath $(BIN)/python

# The oldest JAX and NumPy: an environment of all pinned versions, outside of the clone, where it is made once for all of them.
OLDEST := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxreplay/oldest-$(firstword $(shell cksum constraints-oldest.txt))
$(OLDEST)/installed:
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/pip --disable-pip-version-check -q install -r constraints-oldest.txt
	touch $@

FEW := tests/buffers/test_contract.py tests/storage/test_oracle_streams.py tests/checkpoint/test_checkpoint.py
# Contracts of two buffers, a checkpoint, and the oracle of three configurations, as on a CPU, a GPU and a TPU.
QUICK := test_contract and (items] or steps]) or goes_on_to_the_last_bit or test_layers or config9- or config6- or config3-
quick: ruff $(OLDEST)/installed
	PYTHONPATH=$(CURDIR) $(OLDEST)/bin/python -W error -c "import jaxreplay"
	$(BIN)/python $(PYTEST) -k "$(QUICK)" $(FEW) tests/test_layers.py

oldest: $(OLDEST)/installed
	@echo "the oldest versions are in $(OLDEST)"
	PYTHONPATH=$(CURDIR) $(OLDEST)/bin/python -W error tests/oldest.py

# Types are checked beside the tests: pyright has one core to itself for 40 seconds otherwise.
test: ruff oldest
	$(BIN)/pyright --pythonpath $(BIN)/python > $(VENV)/types & types=$$!; \
	$(BIN)/python $(PYTEST) --durations=15 --budget; tests=$$?; \
	wait $$types || { cat $(VENV)/types; exit 1; }; exit $$tests

mutations: $(VENV)/installed
	$(BIN)/python tests/mutations.py

$(VENV)/mutants: $(VENV)/installed
	$(PIP) install cosmic-ray
	touch $@

mutants: $(VENV)/mutants
	$(BIN)/python -m tests.mutants $(FILE) --sample $(or $(SAMPLE),40)

# The main buffers with the oldest JAX that they run with.
OLDEST_TESTS := (next_step] or items] or steps]) and (reused_and_gone or probabilities_give) or extend_equals or config9- or goes_on_to_the_last_bit
test-oldest: $(OLDEST)/installed
	PYTHONPATH=$(CURDIR) $(OLDEST)/bin/python $(PYTEST) -k "$(OLDEST_TESTS)" $(FEW)

# A part of the tests with the oldest JAX that works, one in the middle, and the newest with Python 3.12 and 3.13; and other
# libraries' own tests over our buffers.
MIDDLE := .venv-middle
$(MIDDLE)/installed: Makefile pyproject.toml
	$(call environment,$(MIDDLE))
	$(MIDDLE)/bin/pip --disable-pip-version-check -q install jax==0.6.2 jaxlib==0.6.2 --group test -e ".[checkpoint]"
	touch $@

NEWEST := .venv-python3.12 .venv-python3.13
.venv-python%/installed: Makefile pyproject.toml constraints.txt
	$(call environment,.venv-python$*,python$*)
	.venv-python$*/bin/pip --disable-pip-version-check -q install -c constraints.txt --group test -e ".[checkpoint]"
	touch $@

COMPAT_TESTS := $(OLDEST_TESTS) or (next_step] or items] or steps]) and in_place or as_probable and uniform or those_of_a_list or split_programs or tiered_files or eight_devices or test_targets
compat: $(OLDEST)/installed $(MIDDLE)/installed $(NEWEST:=/installed) $(VENV)/installed
	set -e; for env in $(OLDEST) $(MIDDLE) $(NEWEST); do $$env/bin/python -c "import sys, jax; print('== Python', sys.version.split()[0], 'jax', jax.__version__)"; \
	PYTHONPATH=$(CURDIR) JAXREPLAY_CACHE=off $$env/bin/python $(PYTEST) -k "$(COMPAT_TESTS)" $(FEW) tests/buffers/test_in_place.py tests/samplers/test_laws.py tests/storage/test_split_programs.py tests/buffers/test_tiered_files.py tests/distributed/test_distributed.py tests/test_targets.py tests/compat; done
	$(BIN)/python -m tests.compat.peers flashbax
	$(BIN)/python -m tests.compat.peers brax
	XLA_FLAGS=--xla_force_host_platform_device_count=2 $(BIN)/python -m tests.compat.peers brax
	$(BIN)/python -m tests.compat.peers sb3

# Over states that are laid out for a GPU or a TPU, on whatever device there is.
TESTS = $(foreach name,$(1),$(wildcard tests/test_$(name).py tests/*/test_$(name).py))
AS_ON_A_GPU := oracle_streams laws
AS_ON_ONE_CORE := contract in_place uniform prioritized views
AS_ON_ONE_REST := changed_buffer checkpoint checkpoint_damage checkpoint_faults checkpoint_hostile checkpoint_machine

# Each file of tests is in one part.
PART_core := types words signatures verbs autoreset docstrings package newcomer_errors contract in_place layers laws uniform prioritized sum_tree queue blend mixture map_rows permutation errors x64 ecosystem
PART_distributed := distributed
PART_samplers := adopt end_streams extension recent plr without_replacement targets donation plan state_check transitions
PART_oracle := oracle_streams
PART_views := views rewards agents groups split_programs tiered tiered_files tiered_kills
PART_rollouts := rollout rollout_episodes trajectories datasets dataset_files dataset_peers lerobot inspect torch
PART_platforms := platforms newest_row
PART_replay := rows_of_others stateful staging threads interrupts transfers
PART_actors := blocks actors processes protocol
PART_sb3 := sb3 sb3_rows sb3_saves sb3_hindsight sb3_interrupts sb3_priorities
PART_checkpoint := checkpoint golden bundle checkpoint_manifests checkpoint_stores
PART_damage := extras checkpoint_damage checkpoint_faults checkpoint_machine
PART_hostile := checkpoint_hostile
PART_disk := checkpoint_writers tiered_disk
PART_signals := checkpoint_interrupts
PART_resize := changed_buffer opened
PART_examples := examples one_file
PART_conformance := conformance
PART_compat := flashbax brax orbax neighbours
PART_gpu := oracle_streams laws $(AS_ON_ONE_CORE)
PART_gpu_more := $(AS_ON_ONE_REST)
PART_tpu := oracle_streams laws bundle $(AS_ON_ONE_CORE)
PART_tpu_more := $(AS_ON_ONE_REST)
PARTS := $(sort $(patsubst PART_%,%,$(filter PART_%,$(.VARIABLES))))
PLATFORM := $(patsubst %_more,%,$(filter gpu% tpu%,$(PART)))

ifneq ($(filter $(PARTS),$(PART)),)
soak: $(VENV)/soak
	JAXREPLAY_$(if $(PLATFORM),PLATFORM=$(PLATFORM),TESTS=soak) $(BIN)/python $(PYTEST) --durations=15 $(call TESTS,$(PART_$(PART)))

test-all: $(VENV)/installed
	JAXREPLAY_TESTS=all JAXREPLAY_PLATFORM=$(PLATFORM) $(BIN)/python $(PYTEST) --durations=15 $(call TESTS,$(PART_$(PART)))
else ifeq ($(PART),doctests)
test-all: $(VENV)/installed
	$(BIN)/python $(PYTEST) --durations=15 jaxreplay
else ifeq ($(PART),oldest)
test-all: test-oldest
else
soak test-all:
	@echo "make $@ PART=NAME, of: $(PARTS)$(if $(filter test-all,$@), doctests oldest)"
	@[ "$(PART)" = list ]
endif

# Env libraries bring much with them, so that they have an environment of their own.
RECIPES := .venv-recipes
$(RECIPES)/installed: Makefile pyproject.toml constraints.txt
	$(call environment,$(RECIPES))
	$(RECIPES)/bin/pip --disable-pip-version-check -q install -c constraints.txt --group test -e . gymnasium six seaborn brax jumanji craftax envpool jaxmarl "pettingzoo[butterfly]"
	$(RECIPES)/bin/pip --disable-pip-version-check -q install -c constraints.txt --no-deps gymnax
	touch $@

recipes: $(RECIPES)/installed
	$(RECIPES)/bin/python -m pytest -q tests/test_examples.py -k of_each_library
	$(RECIPES)/bin/python examples/steps.py

PEERS := .venv-datasets
$(PEERS)/installed: Makefile pyproject.toml constraints.txt
	$(call environment,$(PEERS))
	$(PEERS)/bin/pip --disable-pip-version-check -q install -c constraints.txt --group test -e ".[checkpoint,lerobot]" flashbax "minari[hdf5]" tensorflow-datasets importlib_resources ogbench zarr
	touch $@

datasets: $(PEERS)/installed
	$(PEERS)/bin/python -m pytest -q tests/test_dataset_peers.py tests/test_dataset_files.py tests/test_lerobot.py

$(VENV)/matrix: $(VENV)/installed
	$(PIP) install uv
	touch $@

matrix: $(VENV)/matrix
	$(BIN)/python -m tests.compat.matrix $(if $(NEIGHBOUR),"$(NEIGHBOUR)")

conformance: $(VENV)/matrix
	$(BIN)/python benchmarks/conformance/run.py $(REPLAY)

bench: $(VENV)/bench
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/sb3_returns.py
	$(BIN)/python benchmarks/tiers.py
	$(BIN)/python benchmarks/actors.py
	$(BIN)/python benchmarks/torch_loop.py

# Each TorchRL is built for one torch, and wants an older tensordict: an environment of its own.
GPU := .venv-gpu
$(GPU)/installed: Makefile pyproject.toml constraints.txt
	$(call environment,$(GPU))
	$(GPU)/bin/pip --disable-pip-version-check -q install --group test -e ".[torch,checkpoint]" "jax[$(CUDA)]" flashbax tqdm torch==2.14.1 torchrl==0.14.1
	touch $@

# CUDA=cuda13 for newer drivers, CUDA=cpu to try it without a GPU.
CUDA ?= cuda12
gpu: $(GPU)/installed
	$(GPU)/bin/python -m pytest -q -p no:cacheprovider -m gpu tests
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU)/bin/python -m pytest -q -p no:cacheprovider -n 4 $(call TESTS,$(AS_ON_A_GPU))
	$(GPU)/bin/python benchmarks/gpu.py $(if $(filter cpu,$(CUDA)),--quick)
	$(GPU)/bin/python benchmarks/torch_loop.py $(if $(filter cpu,$(CUDA)),--quick)

# The compilers are 2.5 GB, in an environment of their own.
AOT := .venv-aot
$(AOT)/installed: Makefile pyproject.toml constraints.txt
	$(call environment,$(AOT))
	$(AOT)/bin/pip --disable-pip-version-check -q install -c constraints.txt --group test -e . flashbax libtpu jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
	touch $@

# As a release has them: RELEASING.md. TAG=v0.1.0 compares a tag with the version. The wheel alone is in an environment of its own.
VERSION := v$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' jaxreplay/_version.py)
$(VENV)/dist: $(VENV)/installed
	$(PIP) install -c constraints.txt twine zizmor
	touch $@

dist: $(VENV)/dist
	test -z "$$(git status --porcelain)" || { echo "dist: there are changes that are not committed"; exit 1; }
	test "$${TAG:-$(VERSION)}" = "$(VERSION)" || { echo "dist: the tag $$TAG is not the version $(VERSION)"; exit 1; }
	rm -rf out/dist out/wheel
	$(BIN)/python -m build --outdir out/dist
	$(BIN)/python -m twine check --strict out/dist/*
	$(PYTHON) -m venv out/wheel
	out/wheel/bin/pip --disable-pip-version-check -q install -c constraints.txt out/dist/*.whl pytest
	awk '/^```/ {n++; next} n == 1' README.md | (cd out && wheel/bin/python -)
	cd out && wheel/bin/python -m jaxreplay info
	cd out && wheel/bin/python -m pytest -q -p no:cacheprovider --doctest-modules $(foreach part,samplers views buffers targets types,--pyargs jaxreplay.$(part))
	JAXREPLAY_TESTS=all $(BIN)/python -m pytest -q tests/test_package.py

workflows: $(VENV)/dist
	$(BIN)/zizmor --offline .github

# One device at a time. All are in the table, some are tested; BUFFER=uniform tests one buffer, and leaves the table.
TESTED := v5e H100
DEVICES := $(TESTED) v5p v6e A100
COMPILERS := libtpu,cuda
ifneq ($(filter $(DEVICES),$(DEVICE)),)
aot: $(AOT)/installed
	$(if $(filter $(TESTED),$(DEVICE)),JAXREPLAY_AOT=$(COMPILERS) $(AOT)/bin/python -m pytest -q -p no:cacheprovider tests/aot -k "$(DEVICE)$(if $(BUFFER), and $(BUFFER))")
	$(if $(BUFFER),,$(AOT)/bin/python benchmarks/accelerators.py $(DEVICE))
else
aot:
	@echo "make aot DEVICE=NAME, of: $(DEVICES)"; false
endif

clean:
	rm -rf $(VENV) $(AOT) $(GPU) $(MIDDLE) $(NEWEST) $(RECIPES) $(DOCS) out
