# make demo   quantize a pretrained language model by layer name, and see what happened
# make test   lint-free test run (pytest on test/); test-all adds the slow ones
# make bench  print every figure of the README
PYTHON ?= python3
VENV := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all bench lint clean

$(READY): setup.cfg pyproject.toml constraints.txt
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/pip install -q --disable-pip-version-check torch==2.13.0
	$(VENV)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(READY)

demo: $(READY)
	$(VENV)/python tutorials/quickstart.py

test: $(READY)
	$(VENV)/python -m pytest test

test-all: $(READY)
	$(VENV)/python -m pytest test -m ''

bench: $(READY)
	for script in plan.py memory.py accuracy.py "accuracy.py --moe" cpu.py; do $(VENV)/python bench/$$script || exit 1; done

lint: $(READY)
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/clang-format --dry-run -Werror kernels/cpu/*.h kernels/cpu/*.cpp

clean:
	rm -rf .venv build dist *.egg-info
