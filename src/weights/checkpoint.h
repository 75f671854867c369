// The weights of one model folder (or random ones of the same shapes), checked against the config before use.
//
// Owns the maps. Every tensor handed out is a view that lives as long as the checkpoint. Not thread-safe
// while loading; read-only afterwards.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/digest.h"
#include "base/status.h"
#include "config/model_config.h"
#include "weights/safetensors.h"
#include "weights/tensor_catalogue.h"

namespace sluice {

// A matrix as stored, element-aligned. FP8 carries its block scales: value(r, c) = e4m3 * scale[r / bn][c /
// bk].
struct StoredMatrix {
  DType dtype{};  // kF32, kBF16, kF16 or kF8E4M3
  int64_t out = 0, in = 0;
  const void* data = nullptr;    // [out, in]
  const float* scale = nullptr;  // [ceil(out / bn), ceil(in / bk)]
  int64_t block_n = 0, block_k = 0;
};

class Checkpoint {
 public:
  // Reads folder/model.safetensors.index.json with its shards, or the single *.safetensors file.
  static StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& folder);
  // Random weights of the config's shapes: bf16, or block FP8 where the config says so. Same seed, same
  // bytes.
  static StatusOr<std::unique_ptr<Checkpoint>> Dummy(const ModelConfig& config, bool with_draft,
                                                     uint64_t seed);
  ~Checkpoint();

  // Every tensor that the config needs is there with the right shape and type, and nothing else is, except
  // what is known to be unused (listed in notices()): indexers of layers that reuse a set, the draft layer
  // when it is not wanted.
  Status Validate(const ModelConfig& config, bool with_draft);
  const std::vector<std::string>& notices() const { return notices_; }  // one line each, for the log

  // REQUIRES Validate. Errors: FP8 bytes that are NaN, scales that are NaN, infinite, negative or of wrong
  // shape.
  StatusOr<StoredMatrix> Matrix(std::string_view name);
  StatusOr<std::vector<float>> Vector(std::string_view name);     // any float type, widened
  StatusOr<std::vector<float>> MatrixF32(std::string_view name);  // dequantised: float32(e4m3) * scale

  bool Has(std::string_view name) const { return by_name_.contains(std::string(name)); }
  const std::string& source() const { return source_; }
  int64_t total_bytes() const;
  // True when both are there and hold the same bytes.
  bool SameBytes(std::string_view a, std::string_view b) const;

  // Identity of the weights: config after overrides, every tensor's name, type and shape, and 192 bytes of
  // each.
  Digest256 Identity(const ModelConfig& config) const;
  // Gives memory back after packing. Views of files stay valid (their pages come back from the file); of
  // dummy weights only the tensor `keep` does.
  void ReleaseMemory(std::string_view keep);
  // The part of it that can be done at any time: page-cache memory of the files.
  void DropFilePages() const;

 private:
  Checkpoint() = default;
  Status AddFile(const std::string& path);
  Status ReadIndexFile(const std::string& folder, const std::string& index_path);
  const StoredTensor* Find(std::string_view name) const;
  Status CheckExpected(const ModelConfig& config, const ExpectedTensor& e) const;
  const void* Aligned(const StoredTensor& t);

  std::string source_;
  int64_t block_n_ = 0, block_k_ = 0;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<StoredTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> by_name_;
  std::vector<std::string> notices_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;             // tensors that lay unaligned in their file
  absl::flat_hash_map<std::string, std::vector<float>> scales_;  // widened scale tensors
  std::byte* arena_ = nullptr;                                   // dummy weights
  size_t arena_bytes_ = 0;
};

// Widens n elements of a float type to f32. No alignment needed.
void WidenToF32(DType dtype, const void* data, int64_t n, float* out);
float F16ToF32(uint16_t h);

}  // namespace sluice
