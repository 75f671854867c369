// The table of operations that a device implements. model/ calls it and knows no device; backends/* fill it.
//
// Conventions
//  - Act = the backend's activation type for this model: f32 with --dtype float32, else bf16. GEMMs take Act,
//  accumulate in
//    f32 and write f32 or Act. The residual stream is always f32.
//  - Every op takes a Queue and returns nothing; order inside one queue is program order. The CPU backend
//  runs inline on the
//    queue's threads. Buffers stay alive until the queue has passed.
//  - Bits: the result of a row depends on that row's inputs alone, never on the number of rows, threads,
//  chunking or page
//    placement.
//  - Row buffers have room for RowCapacity(rows) rows: a GEMM may read and write (garbage) rows past `rows`
//  up to there.
//  - Shapes are trailing comments; all matrices are row-major and dense unless a stride (ld, in elements) is
//  given.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/reduced_row.h"
#include "base/status.h"
#include "kv/device_pool.h"
#include "kv/kv_layout.h"
#include "tensor/device_memory.h"
#include "tensor/dtype.h"

namespace sluice::ops {

using ReplayKey = std::array<int64_t, 8>;

// A rank's execution queue (stream). CPU: a thread group that runs each op to its end before the call
// returns.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual int threads() const = 0;
  virtual void Synchronize() = 0;
  // Copies in the queue's order between host memory and what ops read and write. `src` of an Upload may
  // change once the call is back; the result of a Download is there after Synchronize.
  virtual void Upload(void* dst, const void* src, int64_t bytes) { std::memcpy(dst, src, size_t(bytes)); }
  // The same out of memory that AllocateShared gave, which must stay as it is until Synchronize.
  virtual void UploadShared(void* dst, const void* src, int64_t bytes) {
    std::memcpy(dst, src, size_t(bytes));
  }
  virtual void Download(void* dst, const void* src, int64_t bytes) { std::memcpy(dst, src, size_t(bytes)); }
  // One launch for many ops: Replay enqueues what was recorded under `key`, or returns false. Record(key,
  // rows) says whether what is enqueued from here to EndRecord is recorded (and enqueued then). A key names
  // all that the ops' arguments follow from. Queues that run inline record nothing.
  virtual bool Replay(const ReplayKey& /*key*/) { return false; }
  virtual bool Record(const ReplayKey& /*key*/, int64_t /*rows*/) { return false; }
  virtual void EndRecord() {}
  // A place where what is recorded may be cut in two, so that the device begins before all of it is handed
  // over.
  virtual void Border() {}
  // Seconds that the device took between the two last marks; 0 where a queue runs inline.
  virtual void Mark(bool /*end*/) {}
  virtual double MarkedSeconds() { return 0; }
  // A place in the queue's order that other threads may wait for; null where a queue runs inline.
  virtual std::shared_ptr<DeviceEvent> RecordEvent() { return nullptr; }
  // Status of the device so far: an error here has spoilt every later result of the queue.
  virtual Status status() const { return OkStatus(); }
  // Copies inside the device's memory, in the queue's order.
  virtual void CopyRuns(std::span<const MemoryRun> runs) {
    for (const MemoryRun& r : runs) std::memcpy(r.dst, r.src, size_t(r.bytes));
  }
  // The work of a step from here to EndStep is this thread's. Once all shapes have been run (WarmedUp), a
  // queue that checks its steps refuses one that allocated, asked for memory or waited more often than
  // `waits` times: Internal, with the calls named.
  virtual void BeginStep() {}
  virtual Status EndStep(int64_t /*waits*/) { return OkStatus(); }
  virtual void WarmedUp() {}
  // What the device is at, for the report of one that does not answer. Callable from any thread.
  virtual std::string Where() const { return ""; }
};

// A small read-only array of f32 (norm weights, the router) where ops read it. Copies share the values.
class Constant {
 public:
  Constant() = default;
  Constant(std::shared_ptr<const float> values, size_t size) : values_(std::move(values)), size_(size) {}
  const float* data() const { return values_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  std::shared_ptr<const float> values_;
  size_t size_ = 0;
};

// A weight as it lies in the checkpoint: [out, in] row-major. e4m3 weights carry block scales [ceil(out/bn),
// ceil(in/bk)].
struct WeightView {
  DType dtype = DType::kF32;
  int64_t out = 0, in = 0;
  const void* data = nullptr;
  const float* scale = nullptr;
  int64_t scale_block_n = 0, scale_block_k = 0;
};

// A packed weight (or a group of equal shape: heads, experts), owned by whoever packed it. Opaque outside the
// backend.
class Linear {
 public:
  virtual ~Linear() = default;
  int64_t groups = 1, out = 0, in = 0;
  int64_t packed_bytes = 0;  // what stays resident
  std::string kernel;        // the implementation chosen and why, for inspect
};

enum class OutMode : uint8_t { kF32, kF32Add, kAct };  // write f32, add to f32, write Act

struct LinearArgs {
  const Linear* weight = nullptr;
  int64_t rows = 0;
  const void* x = nullptr;  // [rows, in] Act
  int64_t x_ld = 0;         // 0 = in
  void* y = nullptr;        // [rows, out] by mode
  int64_t y_ld = 0;         // 0 = out
  OutMode mode = OutMode::kF32;
};

// One matrix per head: y[r, h, :] = W[h] x[r, h, :]. Linear::groups = heads.
struct HeadLinearArgs {
  const Linear* weight = nullptr;
  int64_t rows = 0;
  const void* x = nullptr;  // Act, element (r, h, i) at r * x_row + h * x_head + i
  int64_t x_row = 0, x_head = 0;
  void* y = nullptr;  // Act, likewise
  int64_t y_row = 0, y_head = 0;
};

struct RmsNormArgs {
  int64_t rows = 0, dim = 0;
  const float* x = nullptr;       // [rows, dim], stride x_ld
  int64_t x_ld = 0;               // 0 = dim
  const float* weight = nullptr;  // [dim]
  float eps = 0;
  void* y_act = nullptr;   // [rows, dim] Act, stride y_ld; may be null
  int64_t y_ld = 0;        // 0 = dim
  float* y_f32 = nullptr;  // [rows, dim] f32 (router input); may be null
};

struct RopeTable {  // cos and sin of every position, built once: [max_positions, rope/2]
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half = 0;
};

// q [rows, heads, nope + rope] f32 -> nope part to Act, rope part rotated to Act at the tail of q_full.
struct SplitQueryArgs {
  int64_t rows = 0, heads = 0, nope = 0, rope = 0, kv_lora = 0;
  const float* q = nullptr;            // [rows, heads, nope + rope]
  const int32_t* positions = nullptr;  // [rows]
  RopeTable table;
  bool interleave = true;
  void* q_nope = nullptr;  // [rows, heads, nope] Act
  void* q_full = nullptr;  // [rows, heads, kv_lora + rope] Act; only the last `rope` of each head are written
};

// Where rows go in the pool: row r of the batch is slot (page, offset); a row with page < 0 is a dummy and
// goes nowhere.
struct RowSlots {
  const PageId* page = nullptr;     // [rows]
  const int32_t* offset = nullptr;  // [rows] 0..63
};

// Page-shaped blocks that are not the pool's, of one component of one layer: page ids from `first` on name
// them, in row slots and in page lists. A rank's own room for rows that it hands on and for copies of other
// ranks' pages. Backends with BackendInfo::own_blocks only.
struct OwnBlocks {
  int32_t first = INT32_MAX;  // id of the block at base
  std::byte* base = nullptr;
  int32_t lane = -1;  // >= 0: the only lane of the pool that the op may touch
};

// ckv [rows, kv_lora + rope] f32 -> RMSNorm of the first kv_lora, rope of the rest, quantised into the pool's
// rows.
struct WriteLatentArgs {
  int64_t rows = 0;
  const float* ckv = nullptr;
  int64_t ckv_ld = 0;
  const float* norm_weight = nullptr;  // [kv_lora]
  float eps = 0;
  const int32_t* positions = nullptr;
  RopeTable table;
  bool interleave = true;
  const DevicePool* pool = nullptr;
  LogicalLayer layer;
  OwnBlocks own;
  RowSlots slots;
};

// k [rows, dim] f32 -> LayerNorm(weight, bias, eps), rope on the FIRST rope dims, into the pool's index rows.
struct WriteIndexArgs {
  int64_t rows = 0, dim = 0, rope = 0;
  const float* k = nullptr;
  int64_t k_ld = 0;
  const float* norm_weight = nullptr;
  const float* norm_bias = nullptr;
  float eps = 0;
  const int32_t* positions = nullptr;
  RopeTable table;
  bool interleave = true;
  const DevicePool* pool = nullptr;
  LogicalLayer layer;
  OwnBlocks own;
  RowSlots slots;
};

// The sequences of a batch for attention: row r belongs to sequence seq_of_row[r], sees positions [0,
// positions[r]].
struct SeqTables {
  int64_t rows = 0, seqs = 0;
  const int32_t* seq_of_row = nullptr;  // [rows]
  const int32_t* positions = nullptr;   // [rows]
  const int32_t* row_begin = nullptr;   // [seqs] first row of each sequence; its rows are consecutive
  const int32_t* num_rows = nullptr;    // [seqs]
  int64_t max_context = 0;              // largest position + 1, plus slot_shift
  int64_t num_pages = 0;                // entries of pages
  const int32_t* page_begin = nullptr;  // [seqs] into pages
  const PageId* pages = nullptr;        // position p of sequence s: pages[page_begin[s] + p / 64], row p % 64
  // Position p lies in the place of position p + slot_shift instead: 1 for the draft layer, whose row made
  // from the hidden state at p and token p + 1 belongs to the page of token p + 1. Reads only; writes go
  // where RowSlots says.
  int32_t slot_shift = 0;
};

// Lightning indexer: score(t, s) = sum_h relu(q[t,h] . k[s]) * w[t,h] for s <= position(t); the topk best by
// (score descending, position ascending) are written in ascending position order. Fewer positions than topk:
// all of them, no score is needed. q is roped here (first `rope` dims).
struct IndexSelectArgs {
  SeqTables seqs;
  int64_t heads = 0, dim = 0, rope = 0, topk = 0;
  const float* q = nullptr;            // [rows, heads, dim] f32, before rope
  const float* head_weight = nullptr;  // [rows, heads] f32 from weights_proj
  float scale = 0;                     // heads^-0.5 * dim^-0.5, folded into the head weight
  RopeTable table;
  bool interleave = true;
  const DevicePool* pool = nullptr;
  LogicalLayer layer;
  OwnBlocks own;
  int32_t* selected = nullptr;        // [rows, topk] positions ascending, -1 padded
  int32_t* selected_count = nullptr;  // [rows]
  float* gap = nullptr;  // [rows] last chosen minus first left out score (+inf when none); may be null
};

// Positions that a pass before has chosen, taken over in place: row r takes what row from[r] >= r holds. A
// row that sees at most topk positions takes them all.
struct CarrySelectionArgs {
  int64_t rows = 0, topk = 0;
  const int32_t* from = nullptr;       // [rows] ascending
  const int32_t* positions = nullptr;  // [rows]
  int32_t* selected = nullptr;         // [rows of the pass before, topk]
  int32_t* selected_count = nullptr;
};

// Rows of logits to what the sampler needs of them (base/reduced_row.h).
struct ReduceRowsArgs {
  int64_t requests = 0, vocab = 0;
  const float* logits = nullptr;        // [places, vocab]
  const RowRequest* request = nullptr;  // [requests]
  ReducedRow* out = nullptr;            // [requests] in memory that the host reads, too
  RowCandidate* candidates = nullptr;   // [requests, kMostCandidates] likewise
};

// MLA over latent rows: softmax over the selected (or, selected == null, all) positions in blocks of 64 rows
// in position order, merged (max, sum, out) block by block. out = sum p * latent[0:kv_lora].
struct AttentionArgs {
  SeqTables seqs;
  int64_t heads = 0, kv_lora = 0, rope = 0, topk = 0;
  const void* q = nullptr;  // [rows, heads, kv_lora + rope] Act
  float scale = 0;
  const DevicePool* pool = nullptr;
  LogicalLayer layer;
  OwnBlocks own;
  const int32_t* selected = nullptr;  // [rows, topk] or null (dense)
  const int32_t* selected_count = nullptr;
  void* out = nullptr;  // [rows, heads, kv_lora] Act
  bool dequant_only_topk =
      true;  // false: the whole row set of each sequence is dequantised first (reference path)
  bool dequant_freely =
      false;  // with dequant_only_topk: whole pages all the same where that is faster and no bit differs
  bool dequant_verify = false;  // run both; verify_failed_row gets the first differing batch row, else -1
  int32_t* verify_failed_row = nullptr;  // [1]
};

struct GateArgs {  // router in f32
  int64_t rows = 0, hidden = 0, experts = 0, topk = 0;
  const float* x = nullptr;       // [rows, hidden] f32
  const float* weight = nullptr;  // [experts, hidden] f32
  const float* bias = nullptr;    // [experts] or null
  bool softmax = false, normalize = true;
  int64_t groups = 1, groups_kept = 1;
  bool group_sum_top2 = false;  // else the group's maximum
  float scaling = 1;
  int32_t* expert = nullptr;       // [rows, topk], in selection order (score descending, id ascending)
  float* expert_weight = nullptr;  // [rows, topk]
};

struct MoeArgs {  // y[r] += sum over slots in order of weight * expert(x[r])
  int64_t rows = 0, topk = 0;
  const Linear* gate_up = nullptr;  // groups = experts, out = 2 * intermediate ([gate | up]), in = hidden
  const Linear* down = nullptr;     // groups = experts, out = hidden, in = intermediate
  const void* x = nullptr;          // [rows, hidden] Act
  const int32_t* expert = nullptr;
  const float* expert_weight = nullptr;
  float* y = nullptr;  // [rows, hidden] f32, added to
};

struct SiluMulArgs {  // act = silu(gate) * up
  int64_t rows = 0, dim = 0;
  const float* gate_up = nullptr;  // [rows, 2 * dim]
  void* act = nullptr;             // [rows, dim] Act
};

struct EmbedArgs {
  int64_t rows = 0, hidden = 0, vocab = 0;
  WeightView table;  // [vocab, hidden]
  const int32_t* tokens = nullptr;
  float* x = nullptr;  // [rows, hidden]
};

struct BackendInfo {
  std::string device;  // "cpu"
  std::string isa;     // "avx512_bf16", "avx512", "avx2"
  DType act = DType::kBF16;
  std::string numerics_class;  // goes into the content fingerprint
  bool own_blocks = false;     // ops read and write OwnBlocks
};

// Bounds that scratch memory is planned from, once: of a queue's largest forward and of the model's shapes.
struct Limits {
  int64_t max_rows = 0;     // of a batch
  int64_t max_seqs = 0;     // of a batch
  int64_t max_context = 0;  // largest position + 1
  int64_t max_pages = 0;    // entries of all page lists of a batch
  int64_t max_index_heads = 0, index_dim = 0;
  int64_t hidden = 0, heads = 0;
  int64_t widest_input = 0;  // of any matrix that takes rows of the batch
  int64_t experts = 0, expert_topk = 0, expert_intermediate = 0;
  int64_t upload_bytes = 0;  // what a step sends ahead of its ops
  int64_t score_bytes = 0;   // room for the indexer's scores; 0: that of one row
  // Bytes of a row of scores that sees the whole context.
  int64_t ScoreRowBytes() const { return max_index_heads > 0 ? AlignUp(max_context + 1, 4) * 4 : 0; }
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const BackendInfo& info() const = 0;
  // Compute threads of one rank. `first_core` < 0: not pinned.
  virtual std::unique_ptr<Queue> MakeQueue(int threads, int first_core) = 0;
  // Where buffers, pools and weights of this backend must lie; null: anywhere in host memory.
  virtual DeviceMemory* memory() { return nullptr; }
  virtual int64_t RowCapacity(int64_t rows) const = 0;
  // Fixes the scratch of queues that are made from here on: it does not grow within these limits.
  virtual Status Plan(const Limits& limits) = 0;
  // Device memory that Plan(limits) and one queue take, without score_bytes beyond one row.
  virtual int64_t ScratchBytes(const Limits& /*limits*/) const { return 0; }

  // All views of a group have the same shape; concat_out packs several matrices of equal `in` as one (gate |
  // up).
  virtual StatusOr<std::unique_ptr<Linear>> Pack(std::span<const WeightView> concat_out) = 0;
  virtual StatusOr<std::unique_ptr<Linear>> PackGroups(std::span<const std::vector<WeightView>> groups) = 0;

  virtual void Embed(Queue&, const EmbedArgs&) = 0;
  virtual void Apply(Queue&, const LinearArgs&) = 0;
  virtual void ApplyHeads(Queue&, const HeadLinearArgs&) = 0;
  virtual void RmsNorm(Queue&, const RmsNormArgs&) = 0;
  virtual void SplitQuery(Queue&, const SplitQueryArgs&) = 0;
  virtual void WriteLatent(Queue&, const WriteLatentArgs&) = 0;
  virtual void WriteIndex(Queue&, const WriteIndexArgs&) = 0;
  virtual void IndexSelect(Queue&, const IndexSelectArgs&) = 0;
  virtual void CarrySelection(Queue&, const CarrySelectionArgs& a) {  // lists in host memory
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t from = a.from[row], seen = int64_t(a.positions[row]) + 1;
      int32_t* selected = a.selected + row * a.topk;
      if (seen <= a.topk) {
        for (int64_t i = 0; i < a.topk; ++i) selected[i] = i < seen ? int32_t(i) : -1;
        a.selected_count[row] = int32_t(seen);
        continue;
      }
      std::memmove(selected, a.selected + from * a.topk, size_t(a.topk) * sizeof(int32_t));
      a.selected_count[row] = a.selected_count[from];
    }
  }
  virtual void Attention(Queue&, const AttentionArgs&) = 0;
  virtual void Gate(Queue&, const GateArgs&) = 0;
  virtual void Moe(Queue&, const MoeArgs&) = 0;
  virtual void SiluMul(Queue&, const SiluMulArgs&) = 0;
  // dst[i] = src[index[i]] rows of `bytes`; used to collect logits rows.
  virtual void GatherRows(Queue&, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                          void* dst) = 0;
  // finite[r] = 0 when row r of x [rows, dim] holds a NaN or an infinity, else 1. Backends with memory()
  // only.
  virtual void FiniteRows(Queue&, const float* /*x*/, int64_t /*rows*/, int64_t /*dim*/,
                          int32_t* /*finite*/) {}

  // Backends with memory() only.
  virtual void ReduceRows(Queue&, const ReduceRowsArgs&) {}

  StatusOr<Constant> Keep(std::vector<float> values) {
    const size_t n = values.size();
    if (n == 0) return Constant();
    if (memory() == nullptr) {
      auto owner = std::make_shared<const std::vector<float>>(std::move(values));
      return Constant(std::shared_ptr<const float>(owner, owner->data()), n);
    }
    ASSIGN_OR_RETURN(auto owner, memory()->Allocate(int64_t(n) * 4, "weights"));
    memory()->Copy(owner.get(), values.data(), int64_t(n) * 4);
    return Constant(std::shared_ptr<const float>(owner, reinterpret_cast<const float*>(owner.get())), n);
  }
};

}  // namespace sluice::ops
