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

# Of make -s: the scripts then say nothing but errors.
export QUIET := $(findstring s,$(filter-out --%,$(firstword -$(MAKEFLAGS))))
SAY = @[ -n '$(QUIET)' ] || echo >&2

.PHONY: help setup packages demo-packages programs needs-root demo check test test-all lint style types imports prepared unit conformance perf bench fuzz races mutants record \
  test-newer-engines test-switch clean driver-root image-packages install uninstall deb test-install \
  bundle wheel release

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
	  printf '  make %-19s %s\n' "$$target" "$$text"; done

setup: packages programs ## install missing Debian packages, make .venv with all commands, compile the launcher

packages:
	@PYTHON='$(PYTHON)' scripts/setup demo test

# The build and the demo need few; a machine for the tests needs all of them.
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
  $(if $(filter x86_64%,$(shell $(CC) -dumpmachine 2>/dev/null)),-fcf-protection=none)

build/launcher: $(wildcard gpuruntime/launcher/*.[ch]) gpuruntime/__init__.py Makefile | demo-packages
	@mkdir -p build
	@$(CC) $(LAUNCHER_FLAGS) '-DLIBDIR="$(CURDIR)"' '-DPYTHON="$(START_PYTHON)"' \
	  '-DCLI_PYTHON="$(CURDIR)/$(BIN)/python"' '-DVERSION="$(OUR_VERSION)"' -o $@ gpuruntime/launcher/launcher.c

$(BIN)/gpu-container-runtime $(BIN)/gpu-container-runtime-hook $(BIN)/gpu-cdi-hook: build/launcher | $(BIN)/gpuruntime
	@ln -sf ../../build/launcher $@

# The start path imports from bytecode; without it each start compiles the modules again.
build/bytecode: $(SOURCES) | demo-packages
	@$(START_PYTHON) -m compileall -q cdi gpuruntime hooks
	@mkdir -p build && touch $@

needs-root:
	@[ "$$(id -u)" = 0 ] || { echo 'demo: containers need root: run it as root, for example: sudo make demo' >&2; exit 1; }

demo: needs-root demo-packages programs ## two of eight GPUs in a real container, through us; SIMULATED=1
	@$(BIN)/python tests/demo/demo.py

lint: style types imports ## ruff, mypy strict, import contracts

style: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@$(BIN)/mypy

imports: setup
	@$(BIN)/lint-imports --config pyproject.toml

# Real containers by runc, of the few ways of asking for GPUs that cgroup version 1 is tried with.
CHECK_CONTAINER = tests/system/test_runc.py::test_a_runc_container_on_cgroup_v1_has_the_gpus_it_asked_for_and_no_other

# What tests share; without it they make it themselves.
prepared: setup
	@$(BIN)/python tests/prepare.py
	@$(BIN)/python tests/image_packages.py || echo 'prepared: tests of explain --rootfs on packages are skipped' >&2

# Lint and what tests share at once, then a worker more than cores, because many tests wait. A worker has all
# tests of a file, and first those that take long (tests/conftest.py).
CORES := $(shell nproc)
RUN_TESTS = $(MAKE) --no-print-directory -j$(CORES) --output-sync=target lint prepared && \
  $(BIN)/python -m pytest -n $(or $(WORKERS),$(shell expr $(CORES) + 1)) --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 0 --durations 10

# The tests that are marked `slow` are for `make test`.
check: setup ## lint, the quick unit tests, one container: what holds of work in progress
	@$(MAKE) --no-print-directory -j$(CORES) --output-sync=target lint prepared
	@$(BIN)/python -m pytest -q -m 'not slow' -n $(or $(WORKERS),$(CORES)) --dist loadfile --max-worker-restart 0 \
	  tests/unit '$(CHECK_CONTAINER)'

test: setup ## lint and every test that can run here, WORKERS=N at a time
	@$(RUN_TESTS)

test-all: setup ## the same with every combination of runtime, namespace, system call and environment
	@export GPURUNTIME_TEST_ALL=1; $(RUN_TESTS)

unit: setup ## the tests that need neither root nor containers
	@$(BIN)/python -m pytest -m 'not system and not engine'

test-newer-engines: setup ## newer podman, docker and containerd, unpacked from newer Debian suites, read our specs
	@PYTHONPATH=tests $(BIN)/python tests/newer_engines/fetch.py
	@$(BIN)/python -m pytest tests/newer_engines

test-switch: needs-root setup ## from the incumbent to us and back, with the engines that are here; docs/switch.md
	@$(BIN)/python -m pytest -qq tests/switch

conformance: setup ## run a folder of CDI cases: make conformance CASES=DIR
	@PYTHONPATH=tests $(BIN)/python tests/conformance/cases.py '$(or $(CASES),tests/data/cdi)'

perf: setup ## print what loading and generating CDI specs costs, in instructions
	@$(BIN)/python tests/perf/cdi_load.py
	@$(BIN)/python tests/perf/generate.py

# FIRST=1: ahead of the machine's other processes. RUNTIME: names and paths of others. Words of the
# command are in the page that DOC=1 writes.
BENCH_WORDS = $(foreach word,REPS FIRST,$(if $($(word)),$(word)=$($(word)))) $(if $(RUNTIME),RUNTIME="$(RUNTIME)")
bench: needs-root setup ## what we cost between engines and runc: make bench REPS=40 FIRST=1 RUNTIME=NAME=PATH DOC=1
	@PYTHONPATH=tests $(BIN)/python tests/bench/measure.py --reps '$(or $(REPS),40)' $(if $(FIRST),--first) \
	  $(if $(VIEWS),--views --out build/bench/views.json) $(if $(DOC),--doc docs/development/performance.md) \
	  $(foreach other,$(RUNTIME),--runtime '$(other)') --said '$(strip $(BENCH_WORDS))'

fuzz: setup ## every parser of privileged code: executions and coverage; make fuzz SECONDS=30
	@PYTHONPATH=tests $(BIN)/python tests/fuzz/targets.py '$(or $(SECONDS),30)'

races: needs-root setup ## the long runs of the races, with their controls; make races FACTOR=1
	@PYTHONPATH=tests $(BIN)/python tests/races/play.py '$(or $(FACTOR),1)'

mutants: needs-root setup ## which patches of a folder the suite catches: make mutants PATCHES=DIR
	@PYTHONPATH=tests $(BIN)/python tests/mutants/run.py '$(or $(PATCHES),tests/mutants)'

record: needs-root setup ## what machines read of a checkout's programs: make record OUT=DIR CHECKOUT=DIR; OLD=DIR compares
	@[ -n '$(OUT)' ] || { echo 'record: name the directory to write: make record OUT=DIR' >&2; exit 1; }
	@$(BIN)/python tests/record/record.py --checkout '$(or $(CHECKOUT),$(CURDIR))' --out '$(OUT)'
	@$(if $(OLD),$(BIN)/python tests/record/record.py compare '$(OLD)' '$(OUT)')

driver-root: setup ## unpack NVIDIA's real user space: make driver-root VERSION=550 or VERSION=535
	@$(BIN)/python tests/simhost/fetch_driver.py '$(or $(VERSION),550)'

image-packages: setup ## unpack C libraries of distributions, for tests of explain --rootfs
	@$(BIN)/python tests/image_packages.py

# Where systemd and udev look: below /usr and /usr/local; for another PREFIX name a place that they know.
PREFIX ?= /usr/local
UNITDIR ?= $(PREFIX)/lib/systemd
UDEVDIR ?= $(PREFIX)/lib/udev/rules.d

# One word of the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'

install: ## into $(DESTDIR)$(PREFIX); make install PREFIX=/usr/local DESTDIR= COMPAT=nvidia
	@DESTDIR=$(call quoted,$(DESTDIR)) PREFIX=$(call quoted,$(PREFIX)) UNITDIR=$(call quoted,$(UNITDIR)) \
	  UDEVDIR=$(call quoted,$(UDEVDIR)) COMPAT=$(call quoted,$(COMPAT)) START_PYTHON='$(START_PYTHON)' PYTHON='$(PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' scripts/install

uninstall: ## remove what make install put there; the same PREFIX and DESTDIR
	@DESTDIR=$(call quoted,$(DESTDIR)) PREFIX=$(call quoted,$(PREFIX)) scripts/uninstall

# For another architecture name its compiler: CC=aarch64-linux-gnu-gcc.
deb: ## Debian packages below build/deb: gpuruntime and gpuruntime-nvidia-compat
	@PYTHON='$(PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' VERSION='$(OUR_VERSION)' \
	  DEB_VERSION='$(DEB_VERSION)' scripts/deb

test-install: setup ## clean Debian 12 and 13 roots: the packages installed, used, upgraded, removed, purged
	@PYTHONPATH=tests:tests/simhost $(BIN)/python tests/packages/clean_roots.py

bundle: ## a tree with its own interpreter and C library, for hosts without Python; below build/bundle
	@PYTHON='$(PYTHON)' START_PYTHON='$(START_PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' COMPAT='$(COMPAT)' scripts/bundle

wheel: setup ## for a virtual environment, without anything native; below build/wheel
	@rm -rf build/wheel
	@$(BIN)/python -m hatchling build -t wheel -d build/wheel >/dev/null

release: setup ## wheel, source, bundle and packages, their SBOM and checksums; below build/release
	@PYTHON='$(PYTHON)' START_PYTHON='$(START_PYTHON)' CC='$(CC)' LAUNCHER_FLAGS='$(LAUNCHER_FLAGS)' \
	  VERSION='$(OUR_VERSION)' BIN='$(BIN)' scripts/release

clean: ## remove what was built
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find cdi gpuruntime hooks tests -name __pycache__ -type d -exec rm -rf {} +
