# Every target sets up what it needs: a virtual environment in .venv with the pinned packages of constraints.txt.

# The first of these that is a working Python of a supported version; `make PYTHON=/path/to/python3.11 run` overrides it.
working = $(shell for python in $(1); do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& command -v $$python && break; done)
PYTHON ?= $(call working,python3.11 python3.12 python3.13 python3)
PYTHON_oldest ?= $(PYTHON)
PYTHON_newest ?= $(call working,python3.13 python3.12)
PYTHON_blazefl ?= $(call working,python3.13t python3.13 python3.12)
FOR_RUNS := .venv/.installed-for-runs
INSTALLED := .venv/.installed
ARGS ?=
PINS ?= constraints.txt
RUNS ?= runs

.PHONY: help run test test-all test-versions wheel release requirements audit test-wheel check docs tables bench-peers gpu-check fuzz
.DELETE_ON_ERROR:

help:
	@echo 'make run       FedAvg and FedMLAC on the built-in spoken corpus (ARGS="key=value ..." changes the configuration)'
	@echo 'make test      every test that is not slow (ARGS="tests/data -k name" chooses)'
	@echo 'make test-all  every test'
	@echo 'make test-versions  laws and a few tests with Ray, with the oldest and the newest packages that raydfl takes'
	@echo 'make wheel     raydfl as a wheel, in build/wheel'
	@echo 'make release   the wheel, the source distribution, the software bill of materials (CycloneDX) and requirements.txt with hashes, in build/release'
	@echo 'make requirements  constraints.txt with the hashes of all files of each package, for pip and uv: build/requirements.txt (needs uv)'
	@echo 'make audit     known vulnerabilities of the packages in constraints.txt (needs pip-audit and its data)'
	@echo 'make test-wheel  the blocks of README.md and docs/ with an installed wheel, away from the repository'
	@echo 'make check     style, types, which room imports which, plain words, and the links of the documentation'
	@echo 'make docs      the documentation as a site, in build/docs; links are checked'
	@echo 'make tables    the tables and figures of the docs, from the JSON files in benchmarks/results'
	@echo 'make fuzz      an hour of damaged files of every format that raydfl reads (docs/recordings.md)'
	@echo 'make gpu-check   whether raydfl is right on this GPU, and how fast: one table, ten minutes (docs/speed.md#gpus)'
	@echo 'make bench-peers  what benchmarks/rounds.py compares with: Flower, pfl-research, FedJAX; BlazeFL too if Python 3.12 or newer is there'

run: QUICKSTART := $(RUNS)/quickstart-$(shell date +%Y%m%d-%H%M%S)
run: $(FOR_RUNS)
	.venv/bin/raydfl run jobs/quickstart.yaml run.dir=$(RUNS) run.name=$(notdir $(QUICKSTART))-fedavg $(ARGS)
	.venv/bin/raydfl run jobs/quickstart.yaml run.dir=$(RUNS) run.name=$(notdir $(QUICKSTART))-fedmlac $(ARGS) \
		method='{name: fedmlac, plug_ce_weight: 1.0}'
	.venv/bin/raydfl report $(QUICKSTART)-fedavg $(QUICKSTART)-fedmlac --out $(QUICKSTART).html
	@echo 'open the comparison:  $(QUICKSTART).html   (each run has its own page beside its files: report.html)'
	@echo 'browse in MLflow:     .venv/bin/mlflow ui --backend-store-uri sqlite:///$(abspath $(RUNS))/mlflow.db'

# The tests write many small files, which some disks delete slowly: where memory has room for a gigabyte, they write there.
test: IN_MEMORY = $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 1000000 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)
# Without bytecode on the disk each process would compile raydfl, and each worker all tests, anew: 5 s of its time.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(IN_MEMORY) .venv/bin/python -m pytest -m 'not slow' --numprocesses 2 --dist loadfile $(ARGS)

test-all: $(INSTALLED)
	.venv/bin/python -m pytest $(ARGS)

wheel: $(FOR_RUNS)
	rm -rf build/wheel
	.venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel .

release: $(INSTALLED) wheel requirements
	rm -rf build/release
	mkdir -p build/release
	cp build/wheel/*.whl build/requirements.txt build/release
	.venv/bin/python -c 'import setuptools.build_meta as build; build.build_sdist("build/release")'
	.venv/bin/python tools/sbom.py build/release/raydfl.cdx.json
	cd build/release && sha256sum * > SHA256SUMS

# The hashes are those of the index that uv uses (UV_DEFAULT_INDEX). Other builds of a version have others: PyTorch for CPUs.
# Python 3.11.5 is the oldest version for all pinned packages (pymdown-extensions, for the documentation).
requirements:
	@command -v uv >/dev/null || { echo 'make requirements needs uv: install it (pip install uv)' >&2; exit 2; }
	mkdir -p build
	rm -f build/requirements.txt
	uv pip compile $(PINS) --no-deps --universal --python-version 3.11.5 --generate-hashes --no-annotate --no-header --quiet \
		--output-file build/requirements.txt

# Without the tool or its data, it prints a line and succeeds; a known vulnerability is an error.
audit:
	@command -v pip-audit >/dev/null || { echo 'make audit: no package was checked, because pip-audit is not installed (pip install pip-audit)'; exit 0; }; \
	mkdir -p build; \
	pip-audit --requirement $(PINS) --no-deps --disable-pip --strict --progress-spinner off >build/audit.txt 2>&1 && code=0 || code=$$?; \
	if [ $$code = 0 ] || grep -q '^Found ' build/audit.txt; then cat build/audit.txt; exit $$code; fi; \
	echo "make audit: no package was checked, because the data are not available: $$(tail -n 1 build/audit.txt)"

# PyTorch and the like are those of .venv, whose editable raydfl a new environment does not see; -P: nor that of this folder.
test-wheel: $(INSTALLED) wheel
	.venv/bin/python -m venv build/wheel/venv
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > build/wheel/packages.pth
	cp build/wheel/packages.pth build/wheel/venv/lib/python3.*/site-packages
	build/wheel/venv/bin/python -m pip install --no-deps build/wheel/*.whl
	build/wheel/venv/bin/python -P -c 'import raydfl, sys; sys.exit(sys.prefix not in raydfl.__file__)'
	PATH="$$PATH:$(CURDIR)/.venv/bin" build/wheel/venv/bin/python -P -m pytest tests/docs $(ARGS) # there: the command ray

# Each end in an environment of its own, 6 GB; raydfl in it is a copy (-P: not this folder's), built there against its PyTorch.
test-versions: .venv-versions/oldest/.installed .venv-versions/newest/.installed
	@wrong=0; for end in oldest newest; do \
		python=.venv-versions/$$end/bin/python; \
		$$python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall . && \
		$$python -P tests/versions/end.py $$end .venv-versions/$$end/log || wrong=1; \
	done; exit $$wrong

.venv-versions/%/.installed: tests/versions/%.txt pyproject.toml
	@test -n "$(PYTHON_$*)" || { echo 'the newest packages need Python 3.12 or 3.13: name it: make PYTHON_newest=/path/to/python3.13 ...' >&2; exit 2; }
	test -x $(@D)/bin/pip || $(PYTHON_$*) -m venv $(@D)
	$(@D)/bin/python -m pip install --constraint $< setuptools torch
	$(@D)/bin/python -m pip install --constraint $< --no-build-isolation '.[speech,test]'
	@touch $@

check: $(INSTALLED)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy --strict -p raydfl
	.venv/bin/lint-imports --no-logo --no-cache
	.venv/bin/python -m pytest tests/laws/test_plain_words.py tests/laws/test_house.py
	$(MAKE) docs
	@echo 'lines by room:'
	@for room in raydfl/*/; do find $$room -name '*.py' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.h' | xargs -r cat | wc -l | tr '\n' ' '; \
		basename $$room; done | grep -v __pycache__

# Not --quiet: mkdocs then counts no warnings, so --strict accepts broken links. The variable silences an advertisement.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

tables: $(INSTALLED)
	.venv/bin/python benchmarks/study_tables.py
	.venv/bin/python docs/draw_privacy.py

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 .venv/bin/python tests/fuzz/fuzz.py --seconds 3600 $(ARGS)

gpu-check: $(INSTALLED)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/gpu_check.py $(ARGS)

# BlazeFL needs Python 3.12 or newer; for its threads, one that is free-threaded: make PYTHON_blazefl=/path/to/python3.13t ...
bench-peers: .venv-peers/.installed $(if $(PYTHON_blazefl),.venv-blazefl/.installed)

# In an environment of their own: Flower needs another version of Ray.
.venv-peers/.installed: benchmarks/peers/constraints.txt
	test -x .venv-peers/bin/pip || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --constraint $< 'flwr[simulation]' pfl fedjax torch
	@touch $@

.venv-blazefl/.installed: benchmarks/peers/constraints-blazefl.txt
	test -x .venv-blazefl/bin/pip || $(PYTHON_blazefl) -m venv .venv-blazefl
	.venv-blazefl/bin/python -m pip install --constraint $< 'blazefl[contrib,reproducibility]' torch
	@touch $@

# PyTorch comes first, for raydfl's operators are compiled against it (and left out where there is no C++ compiler).
$(FOR_RUNS): pyproject.toml constraints.txt setup.py $(wildcard raydfl/core/ops/csrc/*)
	@test -x .venv/bin/pip || test -n "$(PYTHON)" || { \
		echo 'raydfl needs Python 3.11, 3.12 or 3.13: install one, or name it: make PYTHON=/path/to/python3.12 ...' >&2; exit 2; }
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --constraint constraints.txt setuptools torch
	.venv/bin/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[speech]'
	@touch $@

# raydfl is there already: what comes are the packages of its extras.
$(INSTALLED): $(FOR_RUNS)
	.venv/bin/python -m pip install --constraint constraints.txt 'raydfl[speech,dev]'
	@touch $@
