// Launchers of the CUDA kernels: plain pointers and sizes, nothing of the engine. Compiled by nvcc; callers
// need the CUDA runtime's header only. Every launcher enqueues on the stream and returns; launch errors are
// read with cudaGetLastError by the caller. All pointers are device memory unless a name says host.
//
// Act buffers are bf16, or f32 where `f32` is set. A row's result depends on that row's inputs alone.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/reduced_row.h"

namespace sluice::cuda {

enum class Elem : int32_t { kF32, kBF16, kF16, kE4M3 };

// One layer's pages of one component: page p is block p / lanes of lane p % lanes.
struct Slab {
  std::byte* base = nullptr;
  int64_t lane_stride = 0;
  int64_t page_bytes = 0;
  int32_t lanes = 1;
  Elem format = Elem::kBF16;
};

struct Rope {
  const float* cos = nullptr;  // [positions, half]
  const float* sin = nullptr;
  int32_t half = 0;
  bool interleave = true;
};

struct Seqs {
  int32_t rows = 0, seqs = 0;
  int32_t max_context = 0;  // of any row: bounds grids
  int32_t slot_shift = 0;
  const int32_t* seq_of_row = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* page_begin = nullptr;
  const int32_t* pages = nullptr;
};

// ---- rows
void LaunchEmbed(cudaStream_t s, const void* table, Elem dtype, const float* scale, int block_n, int block_k,
                 const int32_t* tokens, int rows, int hidden, float* x);
void LaunchRmsNorm(cudaStream_t s, const float* x, int64_t x_ld, const float* weight, float eps, int rows,
                   int dim, void* y_act, int64_t y_ld, bool f32, float* y_f32);
void LaunchSplitQuery(cudaStream_t s, const float* q, const int32_t* positions, Rope rope, int rows,
                      int heads, int nope, int rope_dim, int kv_lora, void* q_nope, void* q_full, bool f32);
void LaunchWriteLatent(cudaStream_t s, const float* ckv, int64_t ld, const float* norm, float eps,
                       const int32_t* positions, Rope rope, const int32_t* page, const int32_t* offset,
                       int rows, int lora, int rope_dim, Slab slab);
void LaunchWriteIndex(cudaStream_t s, const float* k, int64_t ld, const float* norm, const float* bias,
                      float eps, const int32_t* positions, Rope rope, const int32_t* page,
                      const int32_t* offset, int rows, int dim, int rope_dim, Slab slab);
void LaunchSiluMul(cudaStream_t s, const float* gate_up, int64_t rows, int dim, void* act, bool f32);
void LaunchGatherRows(cudaStream_t s, const void* src, const int32_t* index, int rows, int64_t bytes,
                      void* dst);
// finite[r] = 1 when no value of row r is a NaN or an infinity.
void LaunchFiniteRows(cudaStream_t s, const float* x, int rows, int dim, int32_t* finite);
// First index of the highest value of each row: greedy sampling. -1 when the row holds a NaN, +inf or nothing
// finite.
void LaunchArgmaxRows(cudaStream_t s, const float* x, int rows, int dim, int32_t* best);

// ---- matrix products, y[m, n] = sum_k x[m, k] w[n, k]
enum class Out : int32_t { kF32, kF32Add, kAct };
constexpr int kGemmTileRows = 64;
#ifdef __CUDACC__
#define SLUICE_BOTH __host__ __device__
#else
#define SLUICE_BOTH
#endif
// Scales of e4m3 operands lie as tiles read them. Of rows: [rows / 64][block of 128 inputs][64]; of weights:
// [outputs / 256][block][4], one for 64 outputs. Where a scale lies, and how many floats all take.
SLUICE_BOTH inline int64_t RowScaleAt(int64_t row, int64_t block, int64_t blocks) {
  return (row / 64 * blocks + block) * 64 + row % 64;
}
SLUICE_BOTH inline int64_t WeightScaleAt(int64_t output, int64_t block, int64_t blocks) {
  return (output / 256 * blocks + block) * 4 + output % 256 / 64;
}
inline int64_t RowScales(int64_t rows, int64_t k) { return (rows + 127) / 128 * 128 * ((k + 127) / 128); }
inline int64_t WeightScales(int64_t n, int64_t k) { return (n + 255) / 256 * 4 * ((k + 127) / 128); }
// Instead of one product of all inputs: `count` products of `k` inputs each, product i of plane x[i] of x
// with plane w[i] of w from input 64 * k_block[i], written as group i of y. x and w have three planes.
struct GemmPieces {
  static constexpr int kMost = 24;
  int count = 0, k = 0;
  int8_t x[kMost] = {}, w[kMost] = {};
  int16_t k_block[kMost] = {};
};
struct Gemm {
  int rows = 0, n = 0, k = 0, groups = 1;
  const void* x = nullptr;  // Act, or e4m3 when x_fp8; group g at x + g * x_group elements
  int64_t x_ld = 0, x_group = 0;
  const void* w = nullptr;       // [groups, n, k] bf16 or e4m3 (f32 when f32)
  const float* scale = nullptr;  // e4m3 with Act x: [groups, ceil(k / 128), n]
  bool w_fp8 = false, f32 = false;
  // e4m3 with e4m3 x: x_scale as RowScaleAt, scale64 as WeightScaleAt, group after group.
  bool x_fp8 = false;
  const float* x_scale = nullptr;
  const float* scale64 = nullptr;
  void* y = nullptr;
  int64_t y_ld = 0, y_group = 0;
  Out out = Out::kF32;
  // Not null: w has 2 n rows [gate | up], y is silu(gate) * up as e4m3 with these scales (RowScaleAt).
  // Needs e4m3 x, n a multiple of 128, and tiles of 128 rows.
  float* y_scale = nullptr;
  bool split =
      false;  // few rows: the inputs may be cut into parts, so that bits follow from the number of rows
  GemmPieces pieces;
  // Grouped by expert: tile t of tile_rows sorted rows belongs to group tile_group[t] (< 0: none). Sorted row
  // i reads row sorted[i] / divide_x of x (none when sorted[i] < 0), or row i when gather is off, and writes
  // row i, or row sorted[i] when scatter is on. `rows` bounds the sorted rows.
  const int32_t* sorted = nullptr;
  const int32_t* tile_group = nullptr;
  const int32_t* tiles_used = nullptr;  // [1] tiles that have a group; they come first
  int tile_rows = kGemmTileRows;        // or 128
  int divide_x = 1;
  bool gather = false, scatter = false;
};
cudaError_t LaunchGemm(cudaStream_t s, const Gemm& g);
// What LaunchGemm does with operands of one type that lie aligned.
bool WgmmaGemmFits(const Gemm& g);
cudaError_t LaunchWgmmaGemm(cudaStream_t s, const Gemm& g);

// ---- activations as e4m3, one scale per row and 128 values, as RowScaleAt
struct SortedRows {
  const int32_t* rows = nullptr;
  const int32_t* tiles_used = nullptr;
  int tile_rows = kGemmTileRows;
  int64_t capacity = 0;
};
// flat: scales as [block of 128][rows].
void LaunchQuantise(cudaStream_t s, const void* x, int64_t x_ld, int rows, int k, void* y, float* scale,
                    bool flat = false);
// Row i from row sorted[i] / divide of x, zeros where there is none.
void LaunchQuantiseSorted(cudaStream_t s, const void* x, int64_t x_ld, int k, const SortedRows& sorted,
                          int divide, void* y, float* scale);
void LaunchGatherSorted(cudaStream_t s, const void* x, int64_t x_ld, int k, const SortedRows& sorted,
                        int divide, void* y);
void LaunchSiluQuantise(cudaStream_t s, const float* gate_up, int64_t rows, int dim, const SortedRows* sorted,
                        void* y, float* scale);
// y[0 .. 2][n] bf16 with x = y[0] + y[1] + y[2] to 24 bits; n a multiple of 4.
void LaunchSplitBF16(cudaStream_t s, const float* x, int64_t n, void* y);

// ---- mixture of experts
struct Gate {
  int rows = 0, hidden = 0, experts = 0, topk = 0;
  bool softmax = false, normalize = true;
  int groups = 1, groups_kept = 1;
  bool sum_top2 = false;
  float scaling = 1;
  const float* x = nullptr;       // [rows, hidden]
  const float* weight = nullptr;  // [experts, hidden]
  const float* bias = nullptr;
  // With the weight as three bf16 planes the scores are made by the matrix units, to f32's accuracy.
  const void* weight_planes = nullptr;  // LaunchSplitBF16 of weight
  void* x_planes = nullptr;             // scratch [3, rows, hidden] bf16
  float* scores = nullptr;              // scratch [GateScoreParts, rows, experts]
  int32_t* expert = nullptr;            // [rows, topk]
  float* expert_weight = nullptr;
};
bool GateTakesPlanes(int hidden, int experts);
int GateScoreParts(int hidden);
cudaError_t LaunchGate(cudaStream_t s, const Gate& g);
// Pairs (row, slot) sorted by expert, each expert padded to whole tiles of `tile`. sorted has MaxSortedRows
// entries.
inline int64_t MaxSortedRows(int64_t pairs, int experts, int tile) {
  const int64_t full = (pairs + int64_t(experts) * (tile - 1)) / tile * tile + tile;
  const int64_t each = pairs * tile;  // no more tiles than pairs
  return full < each ? full : each;
}
// tile_group has MaxSortedRows / tile entries and one more: the number of tiles used.
void LaunchSortPairs(cudaStream_t s, const int32_t* expert, int pairs, int experts, int tile, int32_t* counts,
                     int32_t* begins, int32_t* sorted, int32_t* tile_group, int max_sorted);
// y[r] += sum over k in order of weight[r, k] * out[r * topk + k]; slots with expert < 0 are left out.
void LaunchCombine(cudaStream_t s, const void* out, bool bf16, const int32_t* expert, const float* weight,
                   int rows, int topk, int hidden, float* y);

// ---- indexer
struct IndexQuery {  // what LaunchIndexQuery makes of q: roped, in the number format of the scores' product
  Elem format = Elem::kBF16;
  int heads = 0;       // padded with heads of weight 0 to what the product takes: PaddedIndexHeads
  void* q = nullptr;   // [rows, heads, dim]
  float* w = nullptr;  // [rows, heads], all factors folded in
};
inline int PaddedIndexHeads(Elem format, int heads) {
  return format == Elem::kE4M3 && heads <= 32 ? 32 : heads;
}
void LaunchIndexQuery(cudaStream_t s, const float* q, const float* head_weight, float scale,
                      const int32_t* positions, Rope rope, int rows, int heads, int dim, int rope_dim,
                      IndexQuery out);
// scores[(r - row0) * ld + p] for p <= position of row r, r in [row0, row0 + rows).
void LaunchIndexScores(cudaStream_t s, const Seqs& seqs, int row0, int rows, int heads, int dim, IndexQuery q,
                       Slab slab, float* scores, int64_t ld);
// Best topk of each row by (score descending, position ascending), written ascending, -1 padded. lengths:
// position + 1.
void LaunchTopK(cudaStream_t s, const float* scores, int64_t ld, const int32_t* positions,
                const int32_t* seq_of_row, int rows, int topk, int max_context, int32_t* selected,
                int32_t* count, float* gap);
// All positions of rows that have no more than topk.
void LaunchSelectAll(cudaStream_t s, const int32_t* positions, const int32_t* seq_of_row, int rows, int topk,
                     int32_t* selected, int32_t* count, float* gap);

// ---- attention over latent rows
struct Attend {
  Seqs seqs;
  int heads = 0, kv_lora = 0, rope = 0, topk = 0;
  const void* q = nullptr;  // [rows, heads, kv_lora + rope] Act
  bool f32 = false;
  float scale = 0;
  Slab slab;
  const int32_t* selected = nullptr;  // null: every position
  const int32_t* count = nullptr;
  void* out = nullptr;  // [rows, heads, kv_lora] Act
  int splits = 1;       // parts of a row's list that are computed apart and merged in order: 1, 2, 4 or 8
};
constexpr int kMaxSplits = 8;
int SparseMlaSplits(int rows);        // the most parts with which all rows run at once
bool SparseMlaFits(const Attend& a);  // 512 + 64, bf16 or fp8 rows, at most 64 heads
void LaunchSparseMla(cudaStream_t s, const Attend& a);
void LaunchAttendAny(cudaStream_t s, const Attend& a);  // any shape, slow

// The n fp8 pages of the list as bf16 pages of 64 rows of 512 + 64 values, page i of the list at place i.
constexpr int64_t kBF16PageBytes = 64 * 2 * (512 + 64);
void LaunchDequantisePages(cudaStream_t s, Slab slab, const int32_t* pages, int n, std::byte* out,
                           int32_t* places);

// ---- pages
struct PageMove {
  const std::byte* const* src = nullptr;
  std::byte* const* dst = nullptr;
};
// Copies n runs of `bytes` (a multiple of 16, addresses 16-byte aligned): dst_base + dst_index[i] *
// dst_stride from src_base + src_index[i] * src_stride. Either side may be mapped pinned host memory; when
// neither is, blocks = 0 spreads the pages over the whole device.
void LaunchPageCopy(cudaStream_t s, const std::byte* src, int64_t src_stride, const int32_t* src_index,
                    std::byte* dst, int64_t dst_stride, const int32_t* dst_index, int n, int64_t bytes,
                    int blocks);
// The same for runs at arbitrary addresses.
struct Run {
  const std::byte* src;
  std::byte* dst;
  int64_t bytes;
};
void LaunchRunCopy(cudaStream_t s, const Run* runs, int n, int blocks);
// Pages by index as rows of any length and alignment: row r of page i goes from src + src_index[i] * src_page
// + r * src_row to dst + dst_index[i] * dst_page + r * dst_row.
struct PageRows {
  const std::byte* src = nullptr;
  std::byte* dst = nullptr;
  int64_t src_page = 0, dst_page = 0;
  const int32_t* src_index = nullptr;
  const int32_t* dst_index = nullptr;
  int64_t count = 0, rows = 1, row_bytes = 0, src_row = 0, dst_row = 0;
};
void LaunchPageRows(cudaStream_t s, const PageRows& p, int blocks);

// ---- progress
// *passed = value (mapped pinned host memory) when all before it in the stream has ended.
void LaunchProgress(cudaStream_t s, uint32_t* passed, uint32_t value);

// ---- sampling and drafts
// See ops::CarrySelectionArgs and ops::ReduceRowsArgs.
void LaunchCarrySelection(cudaStream_t s, const int32_t* from, const int32_t* positions, int rows, int topk,
                          int32_t* selected, int32_t* count);
cudaError_t LaunchReduceRows(cudaStream_t s, const float* logits, int vocab, const RowRequest* request,
                             int requests, ReducedRow* out, RowCandidate* candidates);

}  // namespace sluice::cuda
