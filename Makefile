# Short names for the usual commands; scripts/ and CMakePresets.json hold what they do.
.PHONY: serve test bench format lint asan tsan clean

serve:
	scripts/serve.sh $(ARGS)

test:
	scripts/test.sh $(ARGS)

bench:
	scripts/build.sh release sluice
	build/release/bin/sluice bench ops
	build/release/bin/sluice bench radix
	build/release/bin/sluice bench transfer
	build/release/bin/sluice bench model

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

clean:
	rm -rf build
