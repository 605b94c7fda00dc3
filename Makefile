# make demo, make test: each works on a fresh machine with Python 3.11 to 3.13, git and make.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/installed

export OMP_NUM_THREADS := 1
unexport PYTHONPATH

.PHONY: demo test lint format exact exact-ops exact-rules exact-probe exact-random exact-slice exact-layouts exact-solved exact-small exact-small-stages exact-predicted exact-peak exact-families exact-zero exact-checkpoints exact-init exact-shapes exact-further exact-schedules exact-pipelines exact-torch-pipelines clean

demo: $(READY)  ## train a small GPT on 4 local ranks, then compare it with one process
	$(BIN)/torchrun --standalone --nproc-per-node 4 -m autopar.demo

test: lint  ## what CI runs: lint, types, tests (about 16 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

exact: exact-ops exact-rules exact-probe exact-random exact-slice exact-layouts exact-solved exact-small exact-small-stages exact-predicted exact-peak exact-families exact-zero exact-checkpoints exact-init exact-shapes exact-further exact-schedules exact-pipelines exact-torch-pipelines  ## every large table

# torchvision and timm stay out of .venv: torchvision's release needs a CUDA torch, and transformers imports it unasked.
build/vision: $(READY)
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target $@ -c constraints.txt torchvision timm pillow
	@touch $@

exact-ops: build/vision  ## 53 public models x plans, with and without dropout (at most 150 minutes on 2 cores)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/ops.py --minutes 140

exact-rules: $(READY)  ## every strategy of every rule over torch's samples beside DTensor's: docs/rules.md (15 minutes)
	$(BIN)/python tests/exact/rules.py --write

exact-probe: $(READY)  ## 60 ops whose rules are hidden: what probing finds of them, judged as rules are (5 minutes)
	$(BIN)/python tests/exact/probe.py

exact-random: $(READY)  ## 2,000 random models under random layouts, 100 of them on real ranks (some hours)
	$(BIN)/python tests/exact/random_models.py

exact-slice: build/vision  ## models x plans x ranks against one process (at most 90 minutes on 2 cores)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/slice.py

exact-layouts: $(READY)  ## 500 random complete layouts of four models, 50 of them on real ranks (at most 90 minutes)
	$(BIN)/python tests/exact/random_layouts.py

exact-solved: build/vision  ## the solver's own plans, memory loose to just enough, and 200 rivals (at most 4 hours)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/solved_on_ranks.py

exact-small: $(READY)  ## the solver's plans of small models, all ranks in one process (at most 2 hours)
	$(BIN)/python tests/exact/solved.py

exact-small-stages: $(READY)  ## random problems with stages against counting every assignment out (at most 10 minutes)
	$(BIN)/python tests/exact/small_stages.py

exact-predicted: build/vision  ## predicted bytes against those of real steps (at most 90 minutes)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/predicted.py

exact-peak: $(READY)  ## predicted peaks against the allocator's, 12 plans of 50 MB and more (at most 30 minutes)
	$(BIN)/python tests/exact/peak.py --minutes 28

exact-families: $(READY)  ## the solver's plans of 16 model families against one process (at most 60 minutes)
	$(BIN)/python tests/exact/families.py --minutes 55

exact-zero: build/vision  ## ZeRO x recomputation x precision x microbatches x dropout on real ranks (at most 120 minutes)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/zero.py --minutes 110

exact-checkpoints: build/vision  ## runs that stop under one plan and go on under another (at most 30 minutes)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/checkpoints.py

exact-init: $(READY)  ## first values of a billion parameters on 4 ranks: equal, in which bytes (at most 30 minutes)
	$(BIN)/python tests/exact/initialise.py

exact-schedules: $(READY)  ## 2,000 random pipelines, some that deadlock: the static check against the executor (2 minutes)
	$(BIN)/python tests/exact/schedules.py

exact-shapes: $(READY)  ## 200 batches of other shapes under the first one's plan, six models (at most 30 minutes)
	$(BIN)/python tests/exact/shapes.py --minutes 28

exact-further: build/vision  ## further public models under the solver's plan and tp=2: docs/models.md (at most 40 minutes)
	PYTHONPATH=build/vision $(BIN)/python tests/exact/further.py --write

exact-torch-pipelines: $(READY)  ## gradients of pipelines against torch.distributed.pipelining's (at most 10 minutes)
	$(BIN)/python tests/exact/torch_pipelining.py

exact-pipelines: $(READY)  ## models x axes x schedules x memory on 2, 4 and 8 real ranks (at most 150 minutes)
	$(BIN)/python tests/exact/pipelines.py --threads
	$(BIN)/python tests/exact/pipelines.py --minutes 130

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

$(READY): pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	for p in python3 python3.11 python3.12 python3.13; do \
	  test -n "$$python" && break; \
	  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && python="$$p"; \
	done; \
	if test -z "$$python"; then \
	  echo "make: no Python 3.11, 3.12 or 3.13 on PATH. Install one, or say make PYTHON=/path/to/python." >&2; exit 1; \
	fi; \
	echo "Installing into $(VENV) with $$("$$python" --version): some minutes, once."; \
	"$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@
