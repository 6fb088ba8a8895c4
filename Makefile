# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets.
SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The interpreter of the command line and the tests (3.11 or newer), and that of the start path (3.9 or newer).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
START_PYTHON ?= /usr/bin/python3
OUR_VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gpuruntime/__init__.py)
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find cdi gpuruntime hooks -name '*.py')

# For the tests; see test-kubernetes.
export KUBERNETES
# make test SHORT=1: without the tests of what a release needs (tests/release_tests.py), and their packages.
export GPURUNTIME_TEST_SHORT := $(SHORT)
# Set by `make -s`: the scripts then print nothing but errors.
export QUIET := $(findstring s,$(filter-out --%,$(firstword -$(MAKEFLAGS))))
SAY = @[ -n '$(QUIET)' ] || echo >&2

.PHONY: help setup packages demo-packages programs needs-root demo check test test-all lint style types imports prepared compiled unit conformance perf bench fuzz races mutants record \
  test-kubernetes test-newer-engines test-switch test-vm clean protos driver-root image-packages install uninstall deb test-install \
  bundle wheel image release

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
	  printf '  make %-19s %s\n' "$$target" "$$text"; done

setup: packages programs ## install missing Debian packages, make .venv with all commands, compile the launcher

packages:
	@PYTHON='$(PYTHON)' scripts/setup demo test$(if $(SHORT),, release)$(if $(KUBERNETES), kubernetes)

# The build and the demo need few packages; a machine for the tests needs all of them.
demo-packages:
	@PYTHON='$(PYTHON)' scripts/setup demo

programs: $(BIN)/gpuruntime $(BIN)/gpu-container-runtime $(BIN)/gpu-container-runtime-hook $(BIN)/gpu-cdi-hook build/bytecode

$(BIN)/gpuruntime: requirements/dev.txt pyproject.toml | demo-packages
	@[ -n '$(PYTHON)' ] || { echo 'setup: no Python 3.11 or newer with venv was found' >&2; echo 'hint: run: make setup PYTHON=/path/to/python3' >&2; exit 1; }
	$(SAY) 'setup: making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
	$(SAY) 'setup: installing the Python packages of requirements/dev.txt'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Freestanding and static: no C library reads the image's environment before we discard it.
LAUNCHER_FLAGS = -std=c11 -Wall -Wextra -Wconversion -Wshadow -Werror -Os -nostdlib -static -ffreestanding \
  -fno-pie -no-pie -fno-stack-protector -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns \
  -Wl,-z,noexecstack -Wl,-z,noseparate-code -Wl,--build-id=none -s \
  $(if $(filter x86_64%,$(shell $(CC) -dumpmachine 2>/dev/null)),-fcf-protection=none) \
  $(LAUNCHER_MORE)

build/launcher: $(wildcard gpuruntime/launcher/*.[ch]) gpuruntime/__init__.py Makefile | demo-packages
	@mkdir -p build
	@$(CC) $(LAUNCHER_FLAGS) '-DLIBDIR="$(CURDIR)"' '-DPYTHON="$(START_PYTHON)"' \
	  '-DCLI_PYTHON="$(CURDIR)/$(BIN)/python"' '-DVERSION="$(OUR_VERSION)"' -o $@ gpuruntime/launcher/launcher.c

$(BIN)/gpu-container-runtime $(BIN)/gpu-container-runtime-hook $(BIN)/gpu-cdi-hook: build/launcher | $(BIN)/gpuruntime
	@ln -sf ../../build/launcher $@

# The start path imports from bytecode; without it each start compiles the modules again.
build/bytecode: $(SOURCES) | demo-packages
	@$(START_PYTHON) -m compileall -q cdi gpuruntime hooks
	@$(START_PYTHON) -I -S -B gpuruntime/bytecode.py
	@$(BIN)/python -I -S -B gpuruntime/bytecode.py --slow-path
	@mkdir -p build && touch $@

needs-root:
	@[ "$$(id -u)" = 0 ] || { echo 'demo: containers need root' >&2; echo 'hint: run: sudo make demo' >&2; exit 1; }

demo: needs-root demo-packages programs ## start a real container with two of eight GPUs; SIMULATED=1: also on a machine with GPUs
	@$(BIN)/python tests/demo/demo.py

lint: style types imports ## run ruff, mypy (strict) and the import contracts

style: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

imports: setup
	@$(BIN)/lint-imports --config pyproject.toml

# Containers by runc on cgroup version 1, with a few of the ways to request GPUs.
CHECK_CONTAINER = tests/system/test_runc.py::test_a_runc_container_on_cgroup_v1_has_the_gpus_it_asked_for_and_no_other

# Files that several tests need; a test makes those that are missing.
prepared: setup
	@$(BIN)/python tests/prepare.py
	@$(BIN)/python tests/image_packages.py || echo 'prepared: tests of explain --rootfs on packages are skipped' >&2

# The bytecode of the tests, also where PYTHONDONTWRITEBYTECODE is set.
compiled: setup
	@$(BIN)/python tests/compiled.py

# Lint and what tests share at once, then two workers more than cores, because many tests wait. A worker has all
# tests of a file, and first those that take long (tests/conftest.py).
CORES := $(shell nproc)
RUN_TESTS = $(MAKE) --no-print-directory -j$(CORES) --output-sync=target lint prepared compiled && \
  $(BIN)/python -m pytest -n $(or $(WORKERS),$(shell expr $(CORES) + 2)) --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 0 --durations 10

# Without the tests that are marked `slow`; `make test` runs these.
check: setup ## run lint, the quick unit tests and one container, in under a minute
	@$(MAKE) --no-print-directory -j$(CORES) --output-sync=target lint prepared
	@$(BIN)/python -m pytest -q -m 'not slow' -n $(or $(WORKERS),$(CORES)) --dist loadfile --max-worker-restart 0 \
	  tests/unit '$(CHECK_CONTAINER)'

test: setup ## run lint and every test that can run here, WORKERS=N at a time; SHORT=1: without those of releases
	@$(RUN_TESTS)

test-all: setup ## run the same with every combination of runtime, namespace, system call and environment
	@export GPURUNTIME_TEST_ALL=1; $(RUN_TESTS)

unit: setup ## run the tests that need neither root nor containers
	@$(BIN)/python -m pytest -m 'not system and not engine'

test-newer-engines: setup ## have podman, docker and containerd of newer Debian suites read our specs
	@PYTHONPATH=tests $(BIN)/python tests/newer_engines/fetch.py
	@$(BIN)/python -m pytest tests/newer_engines

# KUBERNETES: a directory with k8s-up.sh and the programs of Kubernetes.
test-kubernetes: needs-root setup image ## offer GPUs to a real Kubernetes: make test-kubernetes KUBERNETES=DIR
	@[ -n '$(KUBERNETES)' ] || { echo 'test-kubernetes: KUBERNETES names no directory' >&2; \
	  echo 'hint: run: make test-kubernetes KUBERNETES=DIR' >&2; exit 1; }
	@GPURUNTIME_TEST_REQUIRE=kubernetes,image $(BIN)/python -m pytest -q tests/kubernetes

test-switch: needs-root setup ## switch a simulated node from the incumbent to us and back, with the installed engines
	@$(BIN)/python -m pytest -qq tests/switch

conformance: setup ## run a directory of CDI cases: make conformance CASES=DIR
	@PYTHONPATH=tests $(BIN)/python tests/conformance/cases.py '$(or $(CASES),tests/data/cdi)'

perf: setup ## count the instructions of loading and generating CDI specs
	@$(BIN)/python tests/perf/cdi_load.py
	@$(BIN)/python tests/perf/generate.py

# FIRST=1: ahead of the machine's other processes. RUNTIME: names and paths of others. REPLAY=off: a
# launcher that repeats no create. PEER: another device plugin with the same flags. Words of the command are in
# the page that DOC=1 writes.
BENCH_WORDS = $(foreach word,REPS FIRST REPLAY,$(if $($(word)),$(word)=$($(word)))) $(if $(RUNTIME),RUNTIME="$(RUNTIME)")
bench: needs-root setup ## measure our cost between engines and runc, as a device plugin, as an agent and as an exporter: make bench REPS=40 FIRST=1 RUNTIME=NAME=PATH PEER=PATH DOC=1
	@PYTHONPATH=tests $(BIN)/python tests/bench/measure.py --reps '$(or $(REPS),40)' $(if $(FIRST),--first) \
	  $(if $(filter off,$(REPLAY)),--without-replay) \
	  $(if $(VIEWS),--views --out build/bench/views.json) $(if $(DOC),--doc docs/development/performance.md) \
	  $(foreach other,$(RUNTIME),--runtime '$(other)') --said '$(strip $(BENCH_WORDS))'
	@PYTHONPATH=tests PEER='$(PEER)' $(BIN)/python tests/bench/device_plugin.py
	@PYTHONPATH=tests $(BIN)/python tests/bench/agent.py
	@PYTHONPATH=tests $(BIN)/python tests/bench/exporter.py

fuzz: setup ## fuzz every parser of privileged code, print executions and coverage: make fuzz SECONDS=30
	@PYTHONPATH=tests $(BIN)/python tests/fuzz/targets.py '$(or $(SECONDS),30)'

races: needs-root setup ## run the races for long, with their controls: make races FACTOR=1
	@PYTHONPATH=tests $(BIN)/python tests/races/play.py '$(or $(FACTOR),1)'

mutants: needs-root setup ## print which patches of a directory a test catches: make mutants PATCHES=DIR
	@PYTHONPATH=tests $(BIN)/python tests/mutants/run.py '$(or $(PATCHES),tests/mutants)'

record: needs-root setup ## record what the programs of a checkout write: make record OUT=DIR CHECKOUT=DIR; OLD=DIR compares
	@[ -n '$(OUT)' ] || { echo 'record: name the directory to write: make record OUT=DIR' >&2; exit 1; }
	@$(BIN)/python tests/record/record.py --checkout '$(or $(CHECKOUT),$(CURDIR))' --out '$(OUT)'
	@$(if $(OLD),$(BIN)/python tests/record/record.py compare '$(OLD)' '$(OUT)')

protos: setup ## generate the modules of gpunode/kubelet/proto from their .proto files
	@scripts/protos $(BIN)/python .

driver-root: setup ## unpack NVIDIA's real user space: make driver-root VERSION=550 or VERSION=535
	@$(BIN)/python tests/simhost/fetch_driver.py '$(or $(VERSION),550)'

image-packages: setup ## unpack packages of distributions for tests: C libraries, promtool
	@$(BIN)/python tests/image_packages.py

# systemd and udev read only directories below /usr and /usr/local: for another PREFIX, name one of those.
PREFIX ?= /usr/local
UNITDIR ?= $(PREFIX)/lib/systemd
UDEVDIR ?= $(PREFIX)/lib/udev/rules.d

# $(1) as one word of the shell.
quoted = '$(subst ','\'',$(1))'

# NODE=1: gpu-node as well, with what it needs.
install: ## install into $(DESTDIR)$(PREFIX): make install PREFIX=/usr/local DESTDIR= COMPAT=nvidia NODE=1
	@DESTDIR=$(call quoted,$(DESTDIR)) PREFIX=$(call quoted,$(PREFIX)) UNITDIR=$(call quoted,$(UNITDIR)) \
	  UDEVDIR=$(call quoted,$(UDEVDIR)) COMPAT=$(call quoted,$(COMPAT)) NODE=$(call quoted,$(NODE)) START_PYTHON='$(START_PYTHON)' PYTHON='$(PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' scripts/install

uninstall: ## remove what make install has installed with the same PREFIX and DESTDIR
	@DESTDIR=$(call quoted,$(DESTDIR)) PREFIX=$(call quoted,$(PREFIX)) scripts/uninstall

# For another architecture name its compiler: CC=aarch64-linux-gnu-gcc. NODE=0 leaves out gpu-node.
deb: ## build the Debian packages gpuruntime, gpuruntime-nvidia-compat and gpu-node below build/deb
	@PYTHON='$(PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' VERSION='$(OUR_VERSION)' \
	  DEB_VERSION='$(DEB_VERSION)' NODE=$(call quoted,$(NODE)) scripts/deb

test-install: setup ## install, use, upgrade, remove and purge the packages in clean roots of Debian 12 and 13
	@PYTHONPATH=tests:tests/simhost $(BIN)/python tests/packages/clean_roots.py

# SUITE: bookworm or trixie. SCENARIOS: names of scenarios, by default all. VERBOSE=1 shows their commands.
test-vm: needs-root setup ## test the packages on Debian with systemd and cgroup v2, in a virtual machine
	@PYTHON='$(PYTHON)' scripts/setup vm
	@PYTHONPATH=tests:tests/simhost:tests/packages $(BIN)/python -m vm.run \
	  --suite '$(or $(SUITE),bookworm)' $(if $(VERBOSE),--verbose) $(SCENARIOS)

bundle: ## build a tree with its own interpreter and C library, for hosts without Python, below build/bundle
	@PYTHON='$(PYTHON)' START_PYTHON='$(START_PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' COMPAT='$(COMPAT)' scripts/bundle

wheel: setup ## build the wheel, which has no native code, below build/wheel
	@rm -rf build/wheel
	@$(BIN)/python -m hatchling build -t wheel -d build/wheel >/dev/null

image: wheel ## build the OCI image with gpu-node for the nodes of a cluster, below build/image
	@PYTHON='$(PYTHON)' scripts/setup image
	@PYTHON='$(PYTHON)' START_PYTHON='$(START_PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' BIN='$(BIN)' scripts/image
	@GPURUNTIME_TEST_REQUIRE=image $(BIN)/python -m pytest -qq tests/image

release: setup ## build wheel, source, bundle, packages, their SBOM and checksums below build/release
	@PYTHON='$(PYTHON)' START_PYTHON='$(START_PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' BIN='$(BIN)' scripts/release

clean: ## remove what was built
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find cdi gpuruntime hooks tests -name __pycache__ -type d -exec rm -rf {} +
