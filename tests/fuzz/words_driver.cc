// Runs a fuzz target without a fuzzer: files named on the command line, or `--runs N [--seed S]` inputs made
// from the target's own words, mutated; or as many as --seconds N allow. The same N and S are the same
// inputs. An input that takes the process down is printed by its number: --runs 1 --first NUMBER repeats it.
// With clang the targets link libFuzzer instead.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
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

volatile uint64_t g_run = 0;

void SayWhich(int signal) {
  char text[64];
  const int n = std::snprintf(text, sizeof(text), "input %llu\n", static_cast<unsigned long long>(g_run));
  if (n > 0) (void)!::write(2, text, size_t(n));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

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
  uint64_t runs = 0, seed = 1, first = 0;
  double seconds = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--runs" && i + 1 < argc) {
      runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--first" && i + 1 < argc) {
      first = std::strtoull(argv[++i], nullptr, 10);
    } else if (word == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
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
  std::signal(SIGABRT, SayWhich);
  std::signal(SIGILL, SayWhich);
  std::signal(SIGSEGV, SayWhich);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  if (seconds > 0) runs = UINT64_MAX;
  uint64_t run = first;
  for (; run - first < runs && (seconds <= 0 || std::chrono::steady_clock::now() < end); ++run) {
    g_run = run;
    sluice::SeededStream random(seed * 0x9E3779B97F4A7C15ull + run);
    const std::string input = MakeInput(random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  if (run > first)
    std::cout << argv[0] << ": " << run - first << " inputs of seed " << seed << ", none fails\n";
  return 0;
}
