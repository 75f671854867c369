// Weight files.
#include <unistd.h>

#include "fuzz_target.h"
#include "weights/safetensors.h"

using namespace sluice;

std::vector<std::string> FuzzSeeds() {
  const auto file = [](const std::string& header, size_t bytes) {
    std::string out(8, '\0');
    for (int i = 0; i < 8; ++i) out[size_t(i)] = char(header.size() >> (8 * i));
    return out + header + std::string(bytes, 'x');
  };
  return {
      file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4),
      file(
          R"({"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},"b":{"dtype":"BF16","shape":[],"data_offsets":[6,8]}})",
          8),
      FuzzFile("tests/data/tiny-random/deepseek-v2/golden.safetensors").substr(0, 4096)};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string path = "/tmp/fuzz_safetensors." + std::to_string(::getpid());
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), std::streamsize(size));
  const auto file = SafetensorsFile::Open(path);
  if (file.ok()) {  // every byte that the header names can be read
    uint64_t sum = 0;
    for (const StoredTensor& t : (*file)->tensors()) {
      for (int64_t i = 0; i < t.bytes; ++i)
        sum += uint64_t(static_cast<const uint8_t*>(static_cast<const void*>(t.data))[i]);
    }
    asm volatile("" : : "r"(sum));  // the reads happen
  }
  ::unlink(path.c_str());
  return 0;
}
