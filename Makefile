# make demo    set up, then run the whole example campaign here: local workers, no Slurm
# make test    set up, then everything that must pass, every scenario at reduced size
# make check   the quick tier: format, lint, types, unit tests
# make local   make check, then the quick tests with real processes on the local disk; needs no root
# make soak    every scenario at full size, and all tests of jobs on a newer Slurm
# make newslurm SUITE=sid    all tests of jobs on the Slurm of another Debian release
# make newnfs SUITE=sid      scenarios on NFS between the kernels of another Debian release, full size
# make matrix  unit and model tests with Python 3.11 to 3.14, oldest and newest dependencies
# make bench   speed beside other queues and simulated clusters, into benchmarks/results.md: 10 min
# make pictures  the README's recording and charts, from real runs; needs chromium
# make docs    the documentation site, into site/
# make address URL=https://...  set the address of the repository in every text that names it
# Programs are called as its modules: those in .venv/bin do not start from every path.
PY = .venv/bin/python
# In the shell's place, so that a make that is told to end by SIGTERM passes it on.
RUN_PYTEST = $(PY) -m pytest -p no:cacheprovider
PYTEST = exec $(RUN_PYTEST)
# tests/slurm in a root of this Debian release, for its Slurm: trixie has 24.11, sid the newest.
SUITE = trixie
NEWSLURM = exec $(PY) -m tests.slurm.slurmroot --suite $(SUITE)
CODE = hatch_build.py hpc_toolkit hydra_plugins tests benchmarks examples
ALL = demo,dev,oracles,docs

# Without compiled files each of the tests' many processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test local test-unit test-files test-fuse test-nfs test-slurm test-newslurm newslurm newnfs matrix check lint soak bench golden docs mutants pictures address clean

demo:
	@.ci/setup demo
	@$(PY) -m hpc_toolkit campaign run examples/mini-pythia.toml --workers 2

test: lint
	@.ci/system
	@echo "six parts side by side, each shown when it has ended"
	@$(MAKE) --no-print-directory --jobs=6 --output-sync=target test-unit test-files test-fuse test-nfs test-slurm test-newslurm
	$(PYTEST) $(call marked,alone) -m "alone and not soak" --durations=10

test-unit:
	$(PYTEST) tests/unit tests/model -m "not soak" -q -n 2

# They wait more than they compute: for Slurm, leases and time limits.
SMALL = not soak and not alone
# The files with a mark: importing all of the others takes longer than some of these tests.
marked = $(shell grep -rl --include='test_*.py' 'mark\.$(1)\b' $(SLOWER))
SLOWER = tests/faults tests/integration tests/sharedfs tests/slurm
# By file: of two processes that share a file, both make its fixtures and import torch.
BY_FILE = --dist loadfile --no-loadscope-reorder
test-files:
	$(PYTEST) tests/faults tests/integration -m "$(SMALL)" -n 4 $(BY_FILE) --durations=10
test-fuse:
	$(PYTEST) tests/sharedfs -m "not nfs and $(SMALL)" --durations=10
test-nfs:
	$(PYTEST) tests/sharedfs -m "nfs and $(SMALL)" --durations=10
test-slurm:
	$(PYTEST) tests/slurm -m "$(SMALL)" -n 4 --dist worksteal --durations=10

test-newslurm:
	$(NEWSLURM) --or-skip -- $(RUN_PYTEST) $(call marked,newslurm) -m "newslurm and $(SMALL)" --durations=10

# No root is built within a root.
ALLSLURM = tests/slurm --ignore=tests/slurm/test_lab_roots.py --timeout 3600
newslurm:
	@.ci/setup $(ALL)
	@.ci/system
	$(NEWSLURM) -- $(RUN_PYTEST) $(ALLSLURM) -m "not alone" -n 4 --dist worksteal --durations=10
	$(NEWSLURM) -- $(RUN_PYTEST) $(ALLSLURM) -m alone

check: lint
	$(PYTEST) tests/unit -m "not slow and not soak" -q -n 2

local: check
	$(PYTEST) tests/integration tests/faults -m "not slow and $(SMALL)" -q -n 2 $(BY_FILE)

lint:
	@.ci/setup $(ALL)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m ruff check $(CODE)
	$(PY) -m mypy
	$(PY) -m codespell_lib *.md CITATION.cff docs hpc_toolkit hydra_plugins tests examples benchmarks runs/README.md

newnfs:
	@.ci/setup $(ALL)
	@.ci/system
	$(NEWSLURM) --nfs -- $(RUN_PYTEST) tests/sharedfs -m nfs --timeout 3600 --durations=10

matrix:
	@.ci/setup $(ALL)
	@.ci/matrix $(PYTHONS)

soak:
	@.ci/setup $(ALL)
	@.ci/system
	$(PY) tests/mutants.py
	HPCTK_FORBID_SKIP=1 $(PYTEST) -m soak --timeout 3600 -s
	@HPCTK_FORBID_SKIP=1 $(MAKE) --no-print-directory newslurm

bench:
	@.ci/setup $(ALL)
	@.venv/peers/bin/python -m pip --version >/dev/null 2>&1 || $(PY) -m venv --clear .venv/peers
	@echo "other queues, into .venv/peers"
	@.venv/peers/bin/python -m pip install -q --disable-pip-version-check -r benchmarks/peers.txt
	@echo "speed beside other queues, three rounds: 9 min"
	$(PY) benchmarks/throughput.py --write
	@echo "simulated clusters: half a minute"
	$(PY) benchmarks/simulate.py --write

golden:
	@.ci/setup $(ALL)
	$(PY) slurm/examples/render.py
	$(PY) -m tests.manifestexamples
	$(PY) -m tests.manpage

pictures:
	@.ci/setup $(ALL)
	$(PY) -m pip install -q pyte
	$(PY) -m hpc_toolkit campaign run examples/boosting.toml --workers 2
	PATH=$(CURDIR)/.venv/bin:$$PATH $(PY) docs/pictures/record.py
	$(PY) docs/pictures/report.py runs/boosting/report.html

docs:
	@.ci/setup docs
	$(PY) -m tests.site site

ADDRESS = $(shell sed -n 's/^Repository = "\(.*\)"$$/\1/p' pyproject.toml)
# The pages of a repository on GitHub: https://github.com/NAME/PROJECT to https://NAME.github.io/PROJECT.
pages = $(shell echo '$(1)' | sed 's|^https://github.com/\([^/]*\)/|https://\1.github.io/|')
SITE = $(call pages,$(ADDRESS))
address:
	@test -n "$(URL)" || { echo "usage: make address URL=https://...; now $(ADDRESS)" >&2; exit 2; }
	@git grep -lF -e "$(ADDRESS)" | xargs sed -i 's|$(ADDRESS)|$(URL)|g'
	@git grep -lF -e "$(SITE)" | xargs sed -i 's|$(SITE)|$(call pages,$(URL))|g'

mutants:
	@.ci/setup $(ALL)
	$(PY) tests/mutants.py

clean:
	rm -rf .venv site demo-data runs/mini-pythia
