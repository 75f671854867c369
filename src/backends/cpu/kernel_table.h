// The vector kernels of one instruction class, as plain functions over pointers and sizes. Drivers
// (linear.cc, attention.cc,
// ...) cut the work, own all memory and call these; a kernel allocates nothing and knows no thread.
//
// Bits: each output element is one fixed chain of operations over its own inputs. Register tiles, panel
// counts and row counts only choose which elements are computed side by side.
//
// Packed matrices ("panels"): `nr` columns a panel, columns padded with zeros.
//   plain  [panel][k][nr] T                 T = f32 or bf16 (widened when loaded)
//   pairs  [panel][ceil(k/2)][nr][2] bf16   for the bf16 dot product, k padded with zero
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice::cpu {

enum class Isa : uint8_t { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// Rows that will be read soon, fetched towards the cache a few lines at a time between register tiles, so
// that fetching runs beside the arithmetic instead of in bursts that fill the miss buffers.
struct RowPrefetch {
  const std::byte* const* rows = nullptr;
  int64_t count = 0, bytes = 0;  // rows, bytes of each
  int64_t lines_per_step = 0;
  int64_t row = 0, byte = 0;  // next
  void Step() {
    for (int64_t i = 0; i < lines_per_step && row < count; ++i) {
      __builtin_prefetch(rows[row] + byte, 0, 2);
      byte += 64;
      if (byte >= bytes) {
        __builtin_prefetch(rows[row] + bytes - 1, 0, 2);
        byte = 0;
        ++row;
      }
    }
  }
};

enum class Store : uint8_t {
  kF32,     // c = acc
  kF32Add,  // c += acc
  kBF16,    // c = bf16(acc)
  kMerge,   // c = c * alpha[row] + acc * beta[row], f32
};

struct GemmArgs {
  const void* a = nullptr;  // [rows, k], row stride lda in elements
  int64_t lda = 0, rows = 0, k = 0;
  const void* b = nullptr;  // first panel
  int64_t panel_bytes = 0;
  int64_t cols = 0;   // from the first panel on; the last panel may be partial
  void* c = nullptr;  // [rows, cols], row stride ldc in elements
  int64_t ldc = 0;
  Store store = Store::kF32;
  const float* alpha = nullptr;
  const float* beta = nullptr;
  int64_t scale_block = 0;  // e4m3 panels: k of one scale
  RowPrefetch* prefetch = nullptr;
};
using GemmFn = void (*)(const GemmArgs&);

enum class RowFormat : uint8_t { kF32, kBF16, kFp8 };

// Up to 64 latent rows as two packed matrices; rows past `count` are zero.
struct LatentBlock {
  const std::byte* const* rows = nullptr;  // [count], in the pool's row format
  int64_t count = 0;
  RowFormat format = RowFormat::kBF16;
  int64_t kv_lora = 0, rope = 0;
  void* keys = nullptr;    // k = kv_lora + rope, columns = 64 rows
  void* values = nullptr;  // k = 64 rows, columns = kv_lora
  void* row = nullptr;     // scratch, 64 * (kv_lora + rope) elements of the tile type
};

struct SoftmaxArgs {
  float* s = nullptr;  // [m, 64] scores before scaling
  int64_t m = 0;
  float scale = 0;
  const int32_t* valid = nullptr;  // [m] leading columns that count, 0..64
  void* p = nullptr;               // [m, 64] tile type
  float* run_max = nullptr;        // [m] running values, updated
  float* run_sum = nullptr;
  float* alpha = nullptr;  // [m] out: factor of what was accumulated before
  float* beta = nullptr;   // [m] out: factor of this block
};

// Few pairs against up to 64 latent rows of the tile type as they lie, where packing the rows would cost more
// than the products. The bits are those of the products over the packed block.
struct FewPairsArgs {
  const std::byte* const* rows = nullptr;  // [count] of kv_lora + rope elements
  int64_t count = 0, m = 0;                // m: pairs
  int64_t kv_lora = 0, rope = 0;
  const void* q = nullptr;  // [m, kv_lora + rope]
  float* s = nullptr;       // [m, 64]
  const void* p = nullptr;  // [m, 64] tile type; 0 behind count
  float* o = nullptr;       // [m, kv_lora]
  const float* alpha = nullptr;
  const float* beta = nullptr;
  RowPrefetch* prefetch = nullptr;
};

struct IndexScoreArgs {
  const void* q = nullptr;   // [heads, dim] tile type
  const float* w = nullptr;  // [heads]
  int64_t heads = 0, dim = 0;
  const void* keys = nullptr;        // k = dim, columns = 64 rows
  const float* key_scale = nullptr;  // [64]
  float* out = nullptr;              // [64]
};

struct KernelTable {
  const char* name = nullptr;
  int64_t nr = 0;                  // columns of a panel
  bool bf16_pairs = false;         // tiles of an Act = bf16 backend are bf16 pairs; else they are f32
  GemmFn gemm_f32 = nullptr;       // a f32, b plain f32
  GemmFn gemm_f32_bf16 = nullptr;  // a f32, b plain bf16
  GemmFn gemm_pairs = nullptr;     // a bf16, b pairs
  // a bf16, b e4m3 panels (bf16_gemm.cc has their layout), at most kFp8Rows rows, k even. For more rows
  // decode a panel into pairs first; the bits are the same.
  static constexpr int64_t kFp8Rows = 6;
  GemmFn gemm_pairs_fp8 = nullptr;
  void (*decode_panel_fp8)(const void* panel, int64_t k, int64_t block, uint16_t* out) = nullptr;
  // n rounds of the multiply-add that products run on, in registers alone; returns the operations done. The
  // ceiling of every product, for benchmarks.
  double (*peak)(int64_t n, float* sink) = nullptr;

  void (*bf16_to_f32)(const uint16_t* x, int64_t n, float* y) = nullptr;
  void (*f32_to_bf16)(const float* x, int64_t n, uint16_t* y) = nullptr;
  // y = x * rsqrt(mean(x^2) + eps) * w
  void (*rms_norm)(const float* x, const float* w, float eps, int64_t n, float* y) = nullptr;
  void (*layer_norm)(const float* x, const float* w, const float* b, float eps, int64_t n,
                     float* y) = nullptr;
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y) = nullptr;
  void (*exp)(const float* x, int64_t n, float* y) = nullptr;  // inputs clamped to [-87, 88]; below: 0
  void (*sigmoid)(const float* x, int64_t n, float* y) = nullptr;
  float (*abs_max)(const float* x, int64_t n) = nullptr;
  void (*quant_e4m3)(const float* x, int64_t n, float scale, uint8_t* y) = nullptr;  // e4m3(x / scale)
  void (*dequant_e4m3)(const uint8_t* x, int64_t n, float scale, float* y) = nullptr;
  // out[i, j] = x[i] . w[j]; x [rows, n], w [cols, n], out [rows, cols]
  // Positions i with x[i] >= least, in order; returns how many. out has room for n + 64.
  int64_t (*collect)(const float* x, int64_t n, float least, int32_t* out) = nullptr;
  void (*dots)(const float* x, int64_t rows, const float* w, int64_t cols, int64_t n, float* out) = nullptr;
  // y += sum over j in order of w[j] * d[j]
  void (*combine)(float* y, const float* const* d, const float* w, int64_t count, int64_t n) = nullptr;

  void (*load_latent)(const LatentBlock&) = nullptr;
  // At most kFewPairs pairs; null where there is no such kernel. score_few: s = q rows. merge_few: o = o *
  // alpha[pair] + (p values) * beta[pair].
  static constexpr int64_t kFewPairs = 8;
  void (*score_few)(const FewPairsArgs&) = nullptr;
  void (*merge_few)(const FewPairsArgs&) = nullptr;
  // One row of the pool as [kv_lora + rope] of the tile type, the same values that load_latent packs.
  void (*decode_latent)(const std::byte* row, RowFormat format, int64_t kv_lora, int64_t rope,
                        void* out) = nullptr;
  void (*softmax)(const SoftmaxArgs&) = nullptr;
  // out = o / sum (zeros where sum is 0)
  void (*finish)(const float* o, float sum, int64_t n, void* out, bool bf16) = nullptr;
  // rows [count, dim] -> keys; rows past count are zero
  void (*load_index)(const std::byte* rows, int64_t count, RowFormat format, int64_t dim,
                     void* keys) = nullptr;
  void (*index_scores)(const IndexScoreArgs&) = nullptr;
};

// Null when the processor lacks the class.
const KernelTable* KernelsFor(Isa isa, bool act_bf16);
Isa BestIsa();

// Filled by the files that hold the kernels.
void FillGemm(Isa isa, KernelTable* t);
void FillRowOps(Isa isa, KernelTable* t);
void FillAttention(Isa isa, KernelTable* t);
void FillBf16Gemm(KernelTable* t);
void FillBf16Attention(KernelTable* t);

}  // namespace sluice::cpu
