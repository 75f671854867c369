// fuzz_X [--seconds N] [--seed S] [FILE...]: mutates the target's seeds for N seconds (default 20), or runs
// files once. The input that is running lies in fuzz_X.last, so a crash leaves it there.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/random.h"
#include "fuzz_target.h"

namespace {

constexpr size_t kMaxInput = 1 << 16;

// The running input, in a file that outlives the process.
class LastInput {
 public:
  explicit LastInput(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || ::ftruncate(fd, kMaxInput) != 0) std::abort();
    map_ = static_cast<char*>(::mmap(nullptr, kMaxInput, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    fd_ = fd;
  }
  void Set(const std::string& input) {
    std::memcpy(map_, input.data(), input.size());
    if (::ftruncate(fd_, off_t(input.size())) != 0 || ::ftruncate(fd_, kMaxInput) != 0) std::abort();
    std::memcpy(map_, input.data(), input.size());
  }

 private:
  char* map_;
  int fd_;
};

std::string Mutate(std::string s, const std::vector<std::string>& seeds, sluice::SeededStream& random) {
  static const char* const kWords[] = {"null",
                                       "true",
                                       "-1",
                                       "1e999",
                                       "18446744073709551616",
                                       "[[[[[[",
                                       "{\"",
                                       "\"}",
                                       "\\ud800",
                                       "\xff\xfe",
                                       "<|user|>",
                                       "<think>",
                                       "{%",
                                       "%}",
                                       "{{",
                                       "}}",
                                       "\r\n\r\n",
                                       "\0\0\0\0",
                                       "Content-Length: 9\r\n",
                                       "Transfer-Encoding: chunked\r\n",
                                       ",",
                                       ":",
                                       "0",
                                       "\xf0\x9f"};
  for (uint64_t n = 1 + random.Below(6); n > 0; --n) {
    const size_t at = s.empty() ? 0 : random.Below(s.size());
    switch (random.Below(7)) {
      case 0:
        if (!s.empty()) s[at] = char(random.Below(256));
        break;
      case 1:
        if (!s.empty()) s[at] = char(s[at] ^ (1 << random.Below(8)));
        break;
      case 2:
        s.insert(at, kWords[random.Below(std::size(kWords))]);
        break;
      case 3:
        s.erase(at, 1 + random.Below(16));
        break;
      case 4: {  // a piece of it once more
        const std::string piece = s.substr(at, 1 + random.Below(64));
        for (uint64_t k = 1 + random.Below(random.Chance(0.05) ? 300 : 3); k > 0; --k) s.insert(at, piece);
        break;
      }
      case 5: {  // a piece of another
        const std::string& other = seeds[random.Below(seeds.size())];
        if (!other.empty()) s.insert(at, other.substr(random.Below(other.size()), 1 + random.Below(128)));
        break;
      }
      default:
        s.resize(at);
    }
  }
  if (s.size() > kMaxInput) s.resize(kMaxInput);
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 20;
  uint64_t seed = 1;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--seconds") == 0 && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      files.emplace_back(argv[i]);
    }
  }
  for (const std::string& file : files) {
    std::ifstream in(file, std::ios::binary);
    std::stringstream s;
    s << in.rdbuf();
    const std::string input = s.str();
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  if (!files.empty()) return 0;
  std::vector<std::string> pool = FuzzSeeds();
  if (pool.empty()) return 1;
  LastInput last(std::string(argv[0]) + ".last");
  sluice::SeededStream random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  long runs = 0;
  while (std::chrono::steady_clock::now() < end) {
    const std::string input = Mutate(pool[random.Below(pool.size())], pool, random);
    last.Set(input);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    if (random.Chance(0.01) && pool.size() < 2000) pool.push_back(input);
    ++runs;
  }
  std::printf("%s: %ld inputs, none fails\n", argv[0], runs);
  return runs > 0 ? 0 : 1;
}
