// config.json.
#include "config/model_config.h"
#include "fuzz_target.h"

using namespace sluice;

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (const char* name : {"glm-moe-dsa", "deepseek-v32", "deepseek-v3", "deepseek-v2", "glm4-moe-lite"})
    seeds.push_back(FuzzFile(std::string("tests/data/tiny-random/") + name + "/config.json"));
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)ParseModelConfig(text);
  ModelOverrides overrides;
  overrides.json = std::string(text);
  static const std::string good = FuzzSeeds()[0];
  (void)ParseModelConfig(good, overrides);
  return 0;
}
