# Everything a fresh machine needs is installed by `make setup` (Python 3.11, git and a package index assumed).
# The other targets call it by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt
NODES ?= 2
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1
# empty is off: what is compiled once is kept, which each of pytest's workers would else do again for 3 s
export PYTHONDONTWRITEBYTECODE :=

LAB_PACKAGES := openssh-server rsync iproute2 iptables util-linux procps

.PHONY: setup demo browser test test-fast lab soak lint format clean

setup: $(STAMP)

# torch first and pinned: where a CPU build of this version is at hand pip takes it, elsewhere the CUDA build works too.
# sglang without its dependencies: they are several GB of CUDA packages; requirements-cpu.txt has what a CPU start imports.
$(STAMP): pyproject.toml constraints.txt requirements-cpu.txt Makefile
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "make: $(PYTHON) is not Python 3.11 or newer; install it or give PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) --requirement requirements-cpu.txt --editable ".[gp,dev]"
	$(PIP) --no-deps sglang==0.5.20 xgrammar==0.2.1 compressed-tensors==0.18.0
	touch $@

# The main job for real: SGLang 0.5.20 with EAGLE-3 on the CPU, two Ray nodes, Parquet, a verdict.
demo: setup
	$(BIN)/raytune-eagle run search_spaces/tiny_cpu.yaml --cluster local --nodes $(NODES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Without Ray, SGLang, Chromium and tests marked slow or alone. Three at once on two cores: they wait for servers half of the time.
test-fast: setup
	$(BIN)/python -m pytest -m "not lab and not ray and not sglang and not browser and not alone and not slow" --numprocesses 3 --dist loadfile

# What the browser tests drive: Debian's Chromium, where there is none yet (half a minute, as root).
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	test "$$(id -u)" = 0 || { echo "make: no Chromium here: install it (Debian: apt-get install chromium)" >&2; exit 1; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null

# What owns the whole machine (Ray, a browser) or looks at all of it runs alone; all else on two cores at once: first what
# starts no SGLang, then what does, each of which is a start of 15 s on one core.
test: lint browser
	$(BIN)/python -m pytest -m "not lab and not ray and not sglang and not browser and not alone" --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m "sglang and not ray and not alone" --numprocesses 2
	$(BIN)/python -m pytest -m "ray or browser or alone"

# Three hosts made of namespaces, the real `ray up` on them, and the faults of docs/reliability.md.
# Needs root, and Debian for the packages that it installs. Not part of `make test`; `.ci/run` runs both.
lab: setup
	@test "$$(id -u)" = 0 || { echo "make lab: needs root, for namespaces and a bridge of its own" >&2; exit 1; }
	@dpkg --status $(LAB_PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(LAB_PACKAGES); } || { echo "make lab: install $(LAB_PACKAGES)" >&2; exit 1; }
	$(BIN)/python -m pytest -m lab tests/lab

# 2,000 simulated trials on 64 nodes, and the driver's memory meanwhile; figures are in docs/reliability.md.
soak: setup
	$(BIN)/python benchmarks/soak.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache
