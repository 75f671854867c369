// What a target gives: the function that libFuzzer calls, and inputs to start from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Good inputs, for the driver.
std::vector<std::string> FuzzSeeds();

inline std::string FuzzFile(const std::string& path) {
  std::ifstream in(std::string(SLUICE_SOURCE_DIR) + "/" + path, std::ios::binary);
  std::stringstream s;
  s << in.rdbuf();
  return s.str();
}
