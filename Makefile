# SPDX-License-Identifier: Apache-2.0
# Every target sets itself up from a fresh clone. It needs Python 3.10 to 3.13 with venv:
# `make test PYTHON=python3.12` chooses which one the environment is made from.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo docs package test test-real lint format bench families fuzz clean

install: $(INSTALLED)

# bin/pip is the last file that venv writes: without it, the environment is missing or half made.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(None if (3, 10) <= v <= (3, 13) else "onebasin needs Python 3.10 to 3.13: make PYTHON=python3.12")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/onebasin demo -o demo

# Three workers with one thread each keep two cores busy: two workers wait for processes that they start and for the
# disk a third of the time. Each keeps to its share, and with it to the models that tests of one file share, until it
# has nothing left to do.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal tests

test-real: $(INSTALLED)
	$(BIN)/python -m pytest -m real tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict onebasin

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Results as JSON in build/bench. The last two need 4 GB on disk for a while.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.full --layers 2 --layers 4 --level full --level invertible
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.solvers
	$(BIN)/python -m benchmarks.progressive --layers 2
	$(BIN)/python -m benchmarks.learning
	$(BIN)/python -m benchmarks.disk --kind fine-tuned --workers 1,2
	$(BIN)/python -m benchmarks.disk --kind independent --workers 1,2

# What is inferred for every model type of transformers, and whether that is all there is, in build/families.json, and
# beside the tables by hand, in docs/by_hand.json: hours; goes on where it stopped.
families: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.complete -o build/families.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.by_hand

# 2,000 cases of bad input, kills and full disks (docs/reliability.md). One again: make fuzz FUZZ="--case kill-0-3"
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --workers 2 $(FUZZ)

# The site, in build/site. --strict: a broken link or reference fails it.
docs: $(INSTALLED)
	$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || \
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Wheel and sdist in dist/, and the wheel tried in an environment with the base dependencies alone.
package: $(INSTALLED)
	rm -rf dist build/fresh
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m venv build/fresh
	build/fresh/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	cd build && fresh/bin/onebasin env && fresh/bin/onebasin demo -o fresh/demo --models 2
	$(BIN)/mypy --strict --python-executable build/fresh/bin/python --config-file= tests/user_program.py

# Leaves .venv, which is slow to make again.
clean:
	rm -rf demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find onebasin tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
