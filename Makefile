# make demo      trains an agent and leaves a plot in out/
# make examples  runs every example in full (6 minutes)
# make test      every check, sized for two cores
# make soak      the same checks at full size (long)
# make aot       compiles for TPUs and GPUs that are not there, and checks what comes out; writes benchmarks/ACCELERATORS.md
# make bench     side by side with flashbax, NumPy, orbax and Stable-Baselines3; writes benchmarks/*.md
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Over states that are laid out for a GPU or a TPU, on whatever device there is.
AS_ON_A_GPU := $(addprefix tests/test_,oracle_streams.py laws.py)
AS_ON_A_TPU := $(addprefix tests/test_,oracle_streams.py laws.py checkpoint_arrays.py)
MORE_AS_ON_ONE := $(addprefix tests/test_,contract.py in_place.py resize.py views.py uniform.py prioritized.py $(CHECKPOINTS))
CHECKPOINTS := checkpoint.py checkpoint_damage.py checkpoint_faults.py checkpoint_hostile.py checkpoint_rewind.py checkpoint_unwritten.py
PIP := $(BIN)/pip --disable-pip-version-check -q
# gymnax 1.0.1 declares jax < 0.12 but runs on it, so that it is installed without its dependencies, and these are named here.
EXAMPLES := optax matplotlib tqdm six gymnasium seaborn

.PHONY: demo examples test soak bench aot lint clean
$(VENV)/installed: Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e ".[test,dev,torch,sb3,tensordict,checkpoint,minari]" $(EXAMPLES)
	$(PIP) install -c constraints.txt --no-deps gymnax
	touch $@

# A server that speaks as S3 does, on this machine.
$(VENV)/soak: $(VENV)/installed
	$(PIP) install -c constraints.txt "moto[s3]" flask flask-cors
	touch $@

$(VENV)/bench: $(VENV)/installed
	$(PIP) install -c constraints.txt flashbax
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/dqn.py

examples: $(VENV)/installed
	set -e; for example in dqn ppo recall bit_flip laplacian torch_dqn sb3_dict_sac resume; do echo "== $$example"; $(BIN)/python examples/$$example.py; done

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal
	JAXREPLAY_PLATFORM=gpu $(BIN)/python -m pytest -n 2 --dist worksteal $(AS_ON_A_GPU)
	JAXREPLAY_PLATFORM=tpu $(BIN)/python -m pytest -n 2 --dist worksteal $(AS_ON_A_TPU)

soak: $(VENV)/soak
	JAXREPLAY_SOAK=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	JAXREPLAY_PLATFORM=gpu $(BIN)/python -m pytest -n 2 --dist worksteal $(AS_ON_A_GPU) $(MORE_AS_ON_ONE)
	JAXREPLAY_PLATFORM=tpu $(BIN)/python -m pytest -n 2 --dist worksteal $(AS_ON_A_TPU) $(MORE_AS_ON_ONE)

bench: $(VENV)/bench
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/sb3_returns.py

# The compilers are 2.5 GB, in an environment of their own.
AOT := .venv-aot
$(AOT)/installed: Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/pip --disable-pip-version-check -q install -c constraints.txt -e ".[test]" flashbax libtpu jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
	touch $@

aot: $(AOT)/installed
	JAXREPLAY_AOT=libtpu,cuda $(AOT)/bin/python -m pytest -q -p no:cacheprovider tests/aot
	$(AOT)/bin/python benchmarks/accelerators.py

clean:
	rm -rf $(VENV) $(AOT) out
