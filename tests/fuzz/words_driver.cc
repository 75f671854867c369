// Runs a fuzz target without a fuzzer: files named on the command line, or `--runs N [--seed S]` inputs made
// from the target's own words, mutated. The same N and S are the same inputs. With clang the targets link
// libFuzzer instead.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "base/random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern const char* const kFuzzWords[];
extern const size_t kFuzzWordCount;

namespace {

std::string MakeInput(sluice::SeededStream& random) {
  std::string out;
  for (uint64_t n = random.Below(40); n > 0; --n) {
    if (random.Chance(0.7)) {
      out += kFuzzWords[random.Below(kFuzzWordCount)];
    } else {
      out += char(random.Below(256));
    }
  }
  for (uint64_t n = random.Below(4); n > 0 && !out.empty(); --n) {
    const size_t at = random.Below(out.size());
    switch (random.Below(3)) {
      case 0:
        out[at] = char(random.Below(256));
        break;
      case 1:
        out.erase(at, 1 + random.Below(8));
        break;
      default:
        out.insert(at, out.substr(random.Below(out.size()), random.Below(16)));
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 0, seed = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--runs" && i + 1 < argc) {
      runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::ifstream in(word, std::ios::binary);
      if (!in) {
        std::cerr << word << ": cannot be read\n";
        return 3;
      }
      const std::string data((std::istreambuf_iterator<char>(in)), {});
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(data.data()), data.size());
    }
  }
  for (uint64_t run = 0; run < runs; ++run) {
    sluice::SeededStream random(seed * 0x9E3779B97F4A7C15ull + run);
    const std::string input = MakeInput(random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  return 0;
}
