# make demo    set up, then run the whole example campaign here: local workers, no Slurm
# make test    set up, then everything that must pass, every scenario at reduced size
# make check   the quick tier: format, lint, types, unit tests
# make soak    every scenario at full size
# make bench   speed beside other queues and simulated clusters, into benchmarks/results.md: 10 min
PY = .venv/bin/python
PYTEST = $(PY) -m pytest -p no:cacheprovider
CODE = hpc_toolkit tests benchmarks examples

.PHONY: demo test check lint soak bench golden mutants clean

demo:
	@.ci/setup demo
	@$(PY) -m hpc_toolkit run examples/mini-pythia.toml --workers 2

test: lint
	@.ci/system
	$(PYTEST) tests/unit tests/model -m "not soak" -q -n 2
	$(PYTEST) --ignore tests/unit --ignore tests/model -m "not soak" --durations=10

check: lint
	$(PYTEST) tests/unit -m "not slow and not soak" -q -n 2

lint:
	@.ci/setup demo,dev
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/ruff check $(CODE)
	.venv/bin/mypy
	.venv/bin/codespell README.md docs changes hpc_toolkit tests examples benchmarks runs/README.md

soak:
	@.ci/setup demo,dev
	@.ci/system
	HPCTK_FORBID_SKIP=1 $(PYTEST) -m soak --timeout 3600 -s

bench:
	@.ci/setup demo,dev
	@test -x .venv/peers/bin/python || $(PY) -m venv .venv/peers
	.venv/peers/bin/python -m pip install -q --disable-pip-version-check -r benchmarks/peers.txt
	$(PY) benchmarks/throughput.py --write
	$(PY) benchmarks/simulate.py --write

golden:
	@.ci/setup dev
	$(PY) slurm/examples/render.py

mutants:
	@.ci/setup demo,dev
	$(PY) tests/mutants.py

clean:
	rm -rf .venv demo-data runs/mini-pythia
