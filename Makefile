# Everything runs in .venv, which the first target that needs it creates. `make` alone lists the targets.

VENV := .venv
# Any Python from 3.11 on; name another with `make PYTHON=/path/to/python …`.
PYTHON ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint format clean

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(VENV)/.with-demo ## Start the demo; make demo ARGS=--exit ends after the drive.
	@$(VENV)/bin/wavegate demo $(ARGS)

test: $(VENV)/.with-test ## Run all tests; ARGS go to pytest: make test ARGS='-k config'.
	$(VENV)/bin/pytest $(ARGS)

lint: $(VENV)/.with-test ## Check style and types.
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(VENV)/.with-test ## Bring the code into shape.
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean: ## Remove everything that was made, .venv included.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@for python in $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$($$python --version)"; \
	        exec $$python -m venv --clear $(VENV); \
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
