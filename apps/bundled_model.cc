#include "bundled_model.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

namespace sluice {
namespace {

namespace fs = std::filesystem;

// The first (by name) folder of `models` that holds a config.json; empty if there is none.
fs::path ModelIn(const fs::path& models) {
  std::error_code ec;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(models, ec), end; !ec && it != end; it.increment(ec)) {
    if (fs::is_regular_file(it->path() / "config.json", ec)) found.push_back(it->path());
  }
  if (found.empty()) return {};
  return *std::min_element(found.begin(), found.end());
}

}  // namespace

StatusOr<std::string> BundledModelPathFor(const std::string& executable) {
  const fs::path bin = fs::path(executable).parent_path();
  std::vector<fs::path> places = {bin.parent_path() / "share" / "sluice" / "models"};
  if (std::ifstream marker(bin / "sluice.source"); marker) {
    std::string source;
    std::getline(marker, source);
    places.push_back(fs::path(source) / "models");
  }
  std::string tried;
  for (const fs::path& place : places) {
    if (fs::path model = ModelIn(place); !model.empty()) return model.string();
    tried += (tried.empty() ? "" : ", ") + place.string();
  }
  return NotFound("no bundled model: no folder with a config.json under {}; name one with --model-path",
                  tried);
}

StatusOr<std::string> BundledModelPath() {
  std::error_code ec;
  const fs::path executable = fs::read_symlink("/proc/self/exe", ec);
  if (ec) return Unavailable("cannot read /proc/self/exe ({}); name a model with --model-path", ec.message());
  return BundledModelPathFor(executable.string());
}

}  // namespace sluice
