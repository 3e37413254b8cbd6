# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# One thread a rank: two ranks fill two cores.
export OMP_NUM_THREADS ?= 1

.PHONY: venv demo sweep test fuzz soak lint bench tables docs clean

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,examples]'
	touch $@

# Train a small GPT on two ranks. ARGS='--optimizer muon --steps 100' passes options on.
demo: venv
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)

# Run the learning-rate sweep of examples/README.md again.
sweep: venv
	$(BIN)/python examples/sweep.py $(ARGS)

test: venv
	$(BIN)/python -m pytest $(ARGS)

# Random models on random meshes against one process, and random plans; about a quarter of an hour.
fuzz: venv
	$(BIN)/python tests/fuzz.py 500 --plans 20000 $(ARGS)

# Thousands of parameters and steps, and long training; about half an hour. ARGS='curves' is a part.
soak: venv
	$(BIN)/python tests/soak.py $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Measure everything in docs/performance.md again. ARGS='--dion PATH' takes microsoft/dion along.
bench: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/run.py $(ARGS)

# Write docs/numerics.md, docs/scale.md and docs/step.svg again.
tables: venv
	$(BIN)/python benchmarks/numerics.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/step_figure.py

docs: venv mkdocs.yml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs site dist .pytest_cache .mypy_cache .ruff_cache
