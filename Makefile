# Every target sets up what it needs in .venv: only git, make, Python 3.11+ and a package index are assumed.
#   make demo    the demonstration; installs the runtime dependencies only
#   make test    the checks, then every test, JOBS=4 at a time; `make test ARGS="-k claim"` runs some
#   make outages stops the database and the broker for a minute each, under load; the suite has a short form
#   make deploys replaces replicas under load, with each kind of change and earlier releases; the suite has a short form
#   make acceptance   every kill on SQLite, on PostgreSQL alone and with RabbitMQ; the suite runs each on one of them
#   make frameworks   kills replicas of each framework's agents at every point; the suite has a short form
#   make chaos   every fault at random, for MINUTES=20, and a ledger that must balance; the suite has a short form
#   make application   kills the services and replicas of examples/incident_analyst for MINUTES=2 on each backend
#   make fuzz    mutated messages on live replicas for MINUTES=10, with honest traffic next to them; the suite has a minute
#   make dashboard-check   the dashboard in Chromium: pictures, every action, axe-core, 100,000 tasks; needs chromium and npm
#   make model   the store's model at length, with new seeds; MESHPOINT_MODEL_EXAMPLES=1000 says how long
#   make sealed  the suites of stores and brokers with encryption; the suite searches for canaries
#   make letters  10,000 dead letters on every broker, of which one group is replayed; the suite has a short form
#   make simulation SEEDS=2000   the whole worker on a simulated loop, broker and store; SEED=17 replays one
#   make check   formatting, lint, types, layers
#   make fmt     format in place
#   make lowest  every test on the oldest versions that pyproject.toml allows
#   make dist    the sdist and the wheel, built and checked
#   make install-check   the wheel with each extra alone in a clean environment, and next to other frameworks; ARGS="core redis"
#   make coverage   every test, and how much of the code they run; writes htmlcov/ and coverage.xml
#   make bench   Meshpoint next to other systems, on private servers; `make bench ARGS="store --quick"`
#   make manifests   checks config/ with promtool (Debian: prometheus) and the schemas of Kubernetes
#   make docs    the documentation site in site/, checked; ARGS=--serve shows it at 127.0.0.1:8000
#   make since REV=v0.1.0   is the store as fast as it was in REV? Both side by side; ARGS=--system for the whole system

# `make test VENV=.venv-3.13 PYTHON=python3.13` runs on another interpreter.
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
STAMPS := $(VENV)/.installed
ARGS ?=
JOBS ?= 4
SEEDS ?= 200
MINUTES ?= 20

# The tests start many interpreters. Without bytecode files, each would recompile every module.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lowest coverage sealed acceptance letters outages deploys frameworks simulation chaos application dashboard-check fuzz bench since model docs manifests check fmt dist install-check clean
.DEFAULT_GOAL := test

demo: $(STAMPS)/runtime
	@$(BIN)/meshpoint demo $(ARGS)

# AFTER_TESTS is for .ci/run.
test: check
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS) $(AFTER_TESTS)

lowest:
	@$(MAKE) --no-print-directory VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt .venv-lowest/.installed/test
	@.venv-lowest/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

# Reports what ran even if a test fails. Tests start processes in other folders, hence the absolute path.
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: $(STAMPS)/dev
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal $(ARGS); status=$$?; \
	  $(BIN)/coverage combine --quiet && $(BIN)/coverage xml --quiet && $(BIN)/coverage html --quiet && \
	  $(BIN)/coverage report && exit $$status

acceptance: $(STAMPS)/dev
	@MESHPOINT_ALL_BACKENDS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/acceptance $(ARGS)

sealed: $(STAMPS)/dev
	@MESHPOINT_SEALED=1 $(BIN)/python -m pytest -n $(JOBS) -k Sealed tests/conformance $(ARGS)

letters: $(STAMPS)/dev
	@MESHPOINT_ALL_BACKENDS=1 MESHPOINT_LETTERS=10000 $(BIN)/python -m pytest -q -rP tests/acceptance/test_replayed_letters.py $(ARGS)

outages: $(STAMPS)/dev
	@MESHPOINT_OUTAGE_SECONDS=60 $(BIN)/python -m pytest tests/acceptance/test_outages.py $(ARGS)

deploys: $(STAMPS)/dev
	@MESHPOINT_ALL_BACKENDS=1 MESHPOINT_DEPLOYS=1 $(BIN)/python -m pytest tests/acceptance/test_deploy_matrix.py tests/acceptance/test_earlier_releases.py $(ARGS)

frameworks: $(STAMPS)/dev
	@MESHPOINT_ALL_BACKENDS=1 MESHPOINT_FRAMEWORKS=1 $(BIN)/python -m pytest tests/acceptance/test_frameworks.py tests/frameworks $(ARGS)

bench: $(STAMPS)/benchmarks $(STAMPS)/rivals
	@PYTHONPATH=tests:tests/frameworks $(BIN)/python -m benchmarks $(ARGS)

since: $(STAMPS)/benchmarks
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.since $(REV) $(ARGS)

chaos: $(STAMPS)/benchmarks
	@PYTHONPATH=tests $(BIN)/python -m chaos --minutes $(MINUTES) $(ARGS)

application: MINUTES = 2
application: $(STAMPS)/dev
	@PYTHONPATH=tests $(BIN)/python -m application --minutes $(MINUTES) $(ARGS)

fuzz: MINUTES = 10
fuzz: $(STAMPS)/dev
	@PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(ARGS)

dashboard-check: $(STAMPS)/browser
	@PYTHONPATH=tests $(BIN)/python -m dashboard --axe $(VENV)/axe/package/axe.min.js $(ARGS)

model: $(STAMPS)/dev
	@MESHPOINT_MODEL_EXAMPLES=$${MESHPOINT_MODEL_EXAMPLES:-1000} $(BIN)/python -m pytest tests/machines --timeout=0 $(ARGS)

simulation: $(STAMPS)/dev
	@cd tests && ../$(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

docs: $(STAMPS)/docs
	@$(BIN)/python docs/build.py $(ARGS)

manifests: $(STAMPS)/manifests
	@promtool check config config/prometheus.yml
	@for name in agents metrics migrate; do \
	  $(BIN)/kubernetes-validate --strict config/kubernetes/$$name.yaml || exit 1; \
	done

check: $(STAMPS)/dev
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: $(STAMPS)/dev
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

dist: $(STAMPS)/release
	@rm -rf dist
	@$(BIN)/python -m build . >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@$(BIN)/twine check --strict dist/*

install-check: dist
	@PYTHONPATH=tests $(BIN)/python -m installation dist/*.whl $(ARGS)

clean:
	rm -rf $(VENV) .venv-lowest build dist site .cache src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage* coverage.xml htmlcov

$(STAMPS)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    $$python -m venv $(VENV) && mkdir -p $(STAMPS) && touch $@ && exit 0; exit 1; \
	  fi; \
	done; echo "Meshpoint needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1

$(STAMPS)/runtime: $(STAMPS)/python pyproject.toml src/meshpoint/_version.py $(CONSTRAINTS)
	@echo "installing Meshpoint into $(VENV)"
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[all]'
	@touch $@

# Dependency groups need pip 25.1. `test` leaves out the linters, which need newer libraries than Meshpoint.
$(STAMPS)/dev $(STAMPS)/test $(STAMPS)/docs $(STAMPS)/manifests: $(STAMPS)/runtime
	@echo "installing the $(@F) tools into $(VENV)"
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --constraint $(CONSTRAINTS) --group $(@F)
	@touch $@

$(STAMPS)/benchmarks: $(STAMPS)/dev
	@echo "installing what the benchmarks compare with into $(VENV)"
	@$(PIP) install --constraint $(CONSTRAINTS) --group benchmarks
	@touch $@

AXE := 4.14.1
$(STAMPS)/browser: $(STAMPS)/dev
	@echo "installing what checks the dashboard into $(VENV)"
	@$(PIP) install --constraint $(CONSTRAINTS) --group browser
	@mkdir -p $(VENV)/axe && cd $(VENV)/axe && npm pack --silent axe-core@$(AXE) >/dev/null && tar xzf axe-core-$(AXE).tgz
	@touch $@

$(STAMPS)/release: $(STAMPS)/dev
	@echo "installing what builds and checks a release into $(VENV)"
	@$(PIP) install --constraint $(CONSTRAINTS) --group release
	@touch $@

$(STAMPS)/rivals: $(STAMPS)/python pyproject.toml benchmarks/rivals/constraints.txt
	@echo "installing others who do the same job into $(VENV)/rivals"
	@$(BIN)/python -m venv $(VENV)/rivals
	@$(VENV)/rivals/bin/python -m pip --quiet --disable-pip-version-check install --upgrade 'pip>=25.1'
	@$(VENV)/rivals/bin/python -m pip --quiet --disable-pip-version-check install \
	  --constraint benchmarks/rivals/constraints.txt --group rivals
	@touch $@
