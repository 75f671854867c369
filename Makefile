# Short names for the usual commands; scripts/ and CMakePresets.json hold what they do.
.PHONY: serve test bench simulate cache-passes drafts combined range chaos format lint asan tsan fuzz clean

serve:
	scripts/serve.sh $(ARGS)

test:
	scripts/test.sh $(ARGS)

bench:
	scripts/build.sh release sluice
	build/release/bin/sluice bench ops
	build/release/bin/sluice bench radix
	build/release/bin/sluice bench step
	build/release/bin/sluice bench start
	build/release/bin/sluice bench transfer
	build/release/bin/sluice bench model

# Minutes to hours, at low priority: 100,000 seeds of each scenario; every host layout and write policy, 1,000 turns each.
simulate:
	scripts/build.sh release simulate_search

cache-passes:
	scripts/build.sh release sluice
	tests/cache/passes.py build/release/bin/sluice models/ledger-28m-fp8 tests/data/eval/ledger_qa.jsonl $(ARGS)

# Answers with drafts against answers without: bf16 and fp8 KV, 1, 2 and 4 ranks, 1 and 32 at once, every cache pass. A part
# of it takes 2-5 minutes: make drafts ARGS="--kv fp8_e4m3 --batch 32 --ranks 2".
drafts:
	scripts/build.sh release sluice
	tests/draft/answers.py build/release/bin/sluice models/ledger-28m-fp8 tests/data/eval/ledger_qa.jsonl \
	  --expected tests/data/eval/expected.json $(ARGS)

# Ranks, drafts, disaggregation and all cache tiers together against one plain rank.
combined:
	scripts/build.sh release sluice
	python3 tests/disagg/combined.py $(ARGS)

# Every chunk size from 64 to 4096 with 1 to 32 running requests, bf16 and fp8 KV: the same logits bits.
range:
	scripts/build.sh release engine_range_test
	build/release/tests/engine/engine_range_test --gtest_filter='*AllChunk*'

# Kills, stops and restarts prefill and decode instances under load for ten minutes.
chaos:
	scripts/build.sh release sluice
	python3 tests/disagg/equality.py --long
	python3 tests/disagg/faults.py --long
	python3 tests/disagg/cases.py --long
	python3 tests/disagg/chaos.py --minutes 10 $(ARGS)

format:
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

lint:
	cmake --preset dev --log-level=WARNING
	git ls-files 'src/*.cc' 'apps/*.cc' | xargs -P $$(nproc) -n 4 clang-tidy --quiet -p build/dev
	python3 tools/check_deps.py
	python3 tools/tidy.py

asan:
	scripts/build.sh asan unit_tests
	ctest --preset asan -L unit

tsan:
	scripts/build.sh tsan unit_tests
	ctest --preset tsan -L unit

# Mutated inputs of every parser and of the grammar compiler, under ASan and UBSan. What fails is in *.last, or is named by number.
SECONDS_EACH ?= 30
SEED ?= 1
fuzz:
	scripts/build.sh asan fuzz_targets
	for f in build/asan/tests/fuzz/fuzz_* build/asan/tests/fuzz/*_fuzz; do \
	  case $$f in *.last) continue;; esac; [ -f $$f ] && [ -x $$f ] || continue; \
	  $$f --seconds $(SECONDS_EACH) --seed $(SEED) || exit 1; done

clean:
	rm -rf build
