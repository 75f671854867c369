// One safetensors file, mapped read-only and checked in full before any tensor is handed out.
//
// Layout: u64 little-endian header length, a JSON object (may be padded with spaces), then the tensors'
// bytes, which must cover the rest of the file exactly: no gap, no overlap, nothing after the last one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "tensor/dtype.h"

namespace sluice {

// A view of the map; valid while the file object lives. `data` has no alignment beyond the byte.
struct StoredTensor {
  std::string name;
  std::string dtype_name;      // as in the file, "BF16"
  std::optional<DType> dtype;  // nullopt: a type that no model here uses (the bytes are still checked)
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  std::string file;  // path, for messages

  int64_t elements() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
};

std::string ShapeString(const std::vector<int64_t>& shape);

class SafetensorsFile {
 public:
  static StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in file order of the header
  const StoredTensor* Find(std::string_view name) const;                 // linear search; for small files
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }
  void DropResidentPages() const;  // the pages come back from the file when touched again

 private:
  SafetensorsFile() = default;
  Status Parse(const std::string& path);
  std::byte* map_ = nullptr;
  size_t map_bytes_ = 0;
  std::vector<StoredTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

}  // namespace sluice
