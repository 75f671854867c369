// KvLayout: the one source of every KV byte count (device, host, storage, transfer, admission, budgets).
//
// A page holds 64 tokens of every layer. Its bytes are a list of pieces, one per (component, layer that owns
// it):
//   latent  every layer (and the draft layer when speculation is on)
//   index   layers that compute their own top-k (draft: yes) of a sparse model
// Row formats (qk_rope after rope, never quantised):
//   latent f32   [kv_lora + rope] f32
//   latent bf16  [kv_lora + rope] bf16
//   latent fp8   kv_lora e4m3 | ceil(kv_lora/128) f32 scales | rope bf16         (656 B for 512 + 64)
//   index f32 / bf16: [64][index_dim];  index fp8: per PAGE 64*index_dim e4m3, then 64 f32 scales (8448 B for
//   128)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/ids.h"
#include "base/status.h"
#include "config/model_config.h"
#include "tensor/dtype.h"

namespace sluice {

constexpr int64_t kPageTokens = 64;
constexpr int64_t kScaleTile = 128;  // latent values that share one f32 scale in the fp8 row

// How scales are made, part of the bytes' identity: every writer of fp8 rows follows it, and a change needs a
// new name.
constexpr std::string_view kScaleRule = "f32:amax/448";

enum class KvComponent : uint8_t { kLatent, kIndex };

// One contiguous run of bytes inside a page: all 64 rows of one component of one layer.
struct KvPiece {
  KvComponent component;
  LogicalLayer layer;
  CompactLayer slot;  // among the pieces of the same component
  int64_t bytes;      // of the piece for one page
  int64_t
      offset;  // inside a page whose pieces are concatenated in pieces() order (page_first_direct, storage)
};

// Where the rows of a piece lie inside it: part k of row i is `bytes` long, at offset + i * bytes.
struct KvRowPart {
  int64_t offset = 0, bytes = 0;
};

struct KvLayoutOptions {
  DType latent_dtype = DType::kBF16;  // kF32, kBF16 or kF8E4M3
  DType index_dtype = DType::kBF16;   // kF32, kBF16 or kF8E4M3
  bool with_draft = false;            // speculation on: the draft layer's rows live in the same pages
  bool hadamard = false;
  std::string numerics_class;  // backend, instruction class, deterministic or not
  Digest256 model_identity{};
};

class KvLayout {
 public:
  static StatusOr<KvLayout> Make(const ModelConfig& model, const KvLayoutOptions& options);

  const KvLayoutOptions& options() const { return options_; }
  DType latent_dtype() const { return options_.latent_dtype; }
  DType index_dtype() const { return options_.index_dtype; }
  int64_t latent_row_bytes() const { return latent_row_bytes_; }
  int64_t latent_page_bytes() const { return latent_row_bytes_ * kPageTokens; }
  int64_t index_page_bytes() const { return index_page_bytes_; }
  int64_t kv_lora() const { return kv_lora_; }
  int64_t rope() const { return rope_; }
  int64_t index_dim() const { return index_dim_; }

  const std::vector<KvPiece>& pieces() const { return pieces_; }  // by layer, latent before index
  const std::vector<LogicalLayer>& latent_layers() const { return latent_layers_; }
  const std::vector<LogicalLayer>& index_layers() const { return index_layers_; }
  // Slot of the layer among the owners of the component; not valid() when the layer has none.
  CompactLayer LatentSlot(LogicalLayer layer) const { return Slot(latent_slot_, layer); }
  CompactLayer IndexSlot(LogicalLayer layer) const { return Slot(index_slot_, layer); }
  // One part, or two where the scales of a page's rows follow its values.
  std::span<const KvRowPart> row_parts(KvComponent component) const {
    return component == KvComponent::kLatent ? std::span(latent_parts_) : std::span(index_parts_);
  }
  std::vector<LogicalLayer> layers() const { return latent_layers_; }  // every layer that writes KV

  int64_t page_bytes() const { return page_bytes_; }  // all pieces
  double bytes_per_token() const { return double(page_bytes_) / kPageTokens; }

  // Identity of the bytes (I1): goes into storage keys, the PD handshake and /server_info.
  const Digest256& content_fingerprint() const { return fingerprint_; }

 private:
  static CompactLayer Slot(const std::vector<CompactLayer>& table, LogicalLayer layer) {
    const auto i = size_t(uint32_t(layer.value));
    return i < table.size() ? table[i] : CompactLayer();
  }
  void AddPiece(KvComponent component, LogicalLayer layer, CompactLayer slot, int64_t bytes);
  void ComputeFingerprint(const ModelConfig& model);

  KvLayoutOptions options_;
  int64_t kv_lora_ = 0, rope_ = 0, index_dim_ = 0;
  int64_t latent_row_bytes_ = 0, index_page_bytes_ = 0, page_bytes_ = 0;
  std::vector<KvPiece> pieces_;
  std::vector<KvRowPart> latent_parts_, index_parts_;
  std::vector<LogicalLayer> latent_layers_, index_layers_;
  std::vector<CompactLayer> latent_slot_, index_slot_;  // by logical layer
  Digest256 fingerprint_{};
};

}  // namespace sluice
