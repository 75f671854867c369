#include "backends/cuda/cuda_backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "backends/cuda/cublaslt_linear.h"
#include "backends/cuda/cuda_memory.h"
#include "backends/cuda/cuda_queue.h"
#include "backends/cuda/device_features.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/scratch_plan.h"
#include "base/check.h"

namespace sluice::cuda {
namespace {

constexpr int64_t kScoresUnplanned = int64_t(1) << 28;  // bytes of indexer scores held at once
constexpr int kSplitsDeterministic = 2;

CudaQueue& Cuda(ops::Queue& q) { return static_cast<CudaQueue&>(q); }

class CudaLinear final : public ops::Linear {
 public:
  std::shared_ptr<std::byte> w, scale;
  bool fp8 = false;
  bool fp8_input = false;  // activations become e4m3 too; scale is by 64 outputs, else by output
  std::shared_ptr<std::byte> block_scale;  // as cuBLASLt reads it; null: it does not take this weight
};

Elem ElemOf(DType t) {
  switch (t) {
    case DType::kF32:
      return Elem::kF32;
    case DType::kF16:
      return Elem::kF16;
    case DType::kF8E4M3:
      return Elem::kE4M3;
    default:
      return Elem::kBF16;
  }
}

float HalfToF32(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  const float f =
      e == 0    ? std::ldexp(float(m), -24)
      : e == 31 ? (m != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity())
                : std::ldexp(float(1024 + m), e - 25);
  return h & 0x8000 ? -f : f;
}

std::vector<float> RowF32(const ops::WeightView& v, int64_t r) {
  std::vector<float> out(size_t(v.in));
  const int64_t blocks = v.scale_block_k > 0 ? CeilDiv(v.in, v.scale_block_k) : 0;
  for (int64_t c = 0; c < v.in; ++c) {
    const int64_t i = r * v.in + c;
    switch (v.dtype) {
      case DType::kF32:
        out[size_t(c)] = static_cast<const float*>(v.data)[i];
        break;
      case DType::kF16:
        out[size_t(c)] = HalfToF32(static_cast<const uint16_t*>(v.data)[i]);
        break;
      case DType::kF8E4M3:
        out[size_t(c)] = E4M3ToF32(static_cast<const uint8_t*>(v.data)[i]) *
                         v.scale[r / v.scale_block_n * blocks + c / v.scale_block_k];
        break;
      default:
        out[size_t(c)] = BF16ToF32(static_cast<const uint16_t*>(v.data)[i]);
    }
  }
  return out;
}

Slab LatentSlab(const DevicePool& pool, LogicalLayer layer) {
  Slab s;
  s.base = pool.LatentSlab(layer, 0);
  s.lanes = pool.lanes();
  s.lane_stride = pool.lanes() > 1 ? pool.LatentSlab(layer, 1) - s.base : 0;
  s.page_bytes = pool.layout().latent_page_bytes();
  s.format = ElemOf(pool.layout().latent_dtype());
  return s;
}

Slab IndexSlab(const DevicePool& pool, LogicalLayer layer) {
  Slab s;
  s.base = pool.IndexSlab(layer, 0);
  s.lanes = pool.lanes();
  s.lane_stride = pool.lanes() > 1 ? pool.IndexSlab(layer, 1) - s.base : 0;
  s.page_bytes = pool.layout().index_page_bytes();
  s.format = ElemOf(pool.layout().index_dtype());
  return s;
}

static_assert(sizeof(PageId) == sizeof(int32_t));
const int32_t* Ids(const PageId* p) { return reinterpret_cast<const int32_t*>(p); }

Seqs SeqsOf(const ops::SeqTables& t) {
  Seqs s;
  s.rows = int32_t(t.rows);
  s.seqs = int32_t(t.seqs);
  s.max_context = int32_t(t.max_context);
  s.slot_shift = t.slot_shift;
  s.seq_of_row = t.seq_of_row;
  s.positions = t.positions;
  s.page_begin = t.page_begin;
  s.pages = Ids(t.pages);
  return s;
}

Rope RopeOf(const ops::RopeTable& t, bool interleave) { return {t.cos, t.sin, int32_t(t.half), interleave}; }

class CudaBackend final : public ops::Backend {
 public:
  CudaBackend(std::unique_ptr<CudaMemory> memory, ops::BackendInfo info, const CudaOptions& options,
              std::unique_ptr<CublasLtLinear> cublaslt)
      : memory_(std::move(memory)),
        info_(std::move(info)),
        cublaslt_(std::move(cublaslt)),
        f32_(info_.act == DType::kF32),
        deterministic_(options.deterministic) {
    queue_.graph_rows = options.graph_rows;
    queue_.score_bytes = kScoresUnplanned;
    queue_.check_steps = options.check_steps;
    if (options.check_steps) queue_.mark_every = 1;
  }

  const ops::BackendInfo& info() const override { return info_; }
  DeviceMemory* memory() override { return memory_.get(); }
  std::unique_ptr<ops::Queue> MakeQueue(int, int) override {
    cudaStream_t stream = nullptr;
    const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    SLUICE_CHECK(error == cudaSuccess, "stream: {}", cudaGetErrorString(error));
    return std::make_unique<CudaQueue>(*memory_, stream, queue_);
  }
  int64_t RowCapacity(int64_t rows) const override { return rows; }
  Status Plan(const ops::Limits& limits) override {
    queue_.scratch = PlanScratch(limits, ShapeOf(limits));
    queue_.score_bytes = queue_.scratch[kScores];
    queue_.upload_bytes = std::max<int64_t>(limits.upload_bytes, 1 << 16);
    return cublaslt_ == nullptr ? OkStatus() : cublaslt_->Prepare(limits.max_rows);
  }
  int64_t ScratchBytes(const ops::Limits& limits) const override {
    const ScratchPlan plan = PlanScratch(limits, ShapeOf(limits));
    return std::accumulate(plan.begin(), plan.end(), int64_t(0));
  }

  StatusOr<std::unique_ptr<ops::Linear>> Pack(std::span<const ops::WeightView> concat_out) override {
    const std::vector<ops::WeightView> group(concat_out.begin(), concat_out.end());
    return PackGroups({&group, 1});
  }

  StatusOr<std::unique_ptr<ops::Linear>> PackGroups(
      std::span<const std::vector<ops::WeightView>> groups) override {
    if (groups.empty() || groups[0].empty()) return Internal("pack: no weight given");
    auto l = std::make_unique<CudaLinear>();
    l->groups = int64_t(groups.size());
    l->in = groups[0][0].in;
    bool fp8 = !f32_;
    for (const ops::WeightView& v : groups[0]) l->out += v.out;
    for (const auto& group : groups) {
      int64_t out = 0;
      for (const ops::WeightView& v : group) {
        if (v.in != l->in) return Internal("pack: parts of {} and {} inputs", v.in, l->in);
        out += v.out;
        fp8 = fp8 && v.dtype == DType::kF8E4M3 && v.scale_block_k == kScaleTile;
      }
      if (out != l->out) return Internal("pack: groups of {} and {} outputs", out, l->out);
    }
    l->fp8 = fp8;
    l->fp8_input = fp8 && TakesFp8Input(groups[0], l->out, l->in);
    if (l->groups > 1) groups_.push_back({l->groups, l->in, l->out, l->fp8_input});
    const int64_t item = f32_ ? 4 : fp8 ? 1 : 2, blocks_k = CeilDiv(l->in, kScaleTile);
    const int64_t scale_step = l->fp8_input ? 64 : 1;
    const int64_t group_scales = !fp8 ? 0 : l->fp8_input ? WeightScales(l->out, l->in) : blocks_k * l->out;
    ASSIGN_OR_RETURN(l->w, memory_->Allocate(l->groups * l->out * l->in * item, "weights"));
    l->packed_bytes = l->groups * l->out * l->in * item + l->groups * group_scales * 4;
    if (fp8) {
      ASSIGN_OR_RETURN(l->scale, memory_->Allocate(l->groups * group_scales * 4, "weight scales"));
    }
    std::byte* to = l->w.get();
    std::vector<float> scales(static_cast<size_t>(group_scales));
    std::vector<std::byte> converted;
    for (size_t g = 0; g < groups.size(); ++g) {
      int64_t row0 = 0;
      for (const ops::WeightView& v : groups[g]) {
        if (fp8) {
          memory_->Copy(to, v.data, v.out * v.in);
          for (int64_t r = 0; r < v.out; r += scale_step) {
            for (int64_t k = 0; k < blocks_k; ++k) {
              const int64_t at = l->fp8_input ? WeightScaleAt(row0 + r, k, blocks_k) : k * l->out + row0 + r;
              scales[size_t(at)] = v.scale[r / v.scale_block_n * blocks_k + k];
            }
          }
        } else {
          converted.resize(size_t(v.out * v.in * item));
          for (int64_t r = 0; r < v.out; ++r) {
            const std::vector<float> row = RowF32(v, r);
            for (int64_t c = 0; c < v.in; ++c) {
              const int64_t at = (r * v.in + c) * item;
              if (f32_) {
                std::memcpy(&converted[size_t(at)], &row[size_t(c)], 4);
              } else {
                const uint16_t b = F32ToBF16(row[size_t(c)]);
                std::memcpy(&converted[size_t(at)], &b, 2);
              }
            }
          }
          memory_->Copy(to, converted.data(), int64_t(converted.size()));
        }
        to += v.out * v.in * item;
        row0 += v.out;
      }
      if (fp8)
        memory_->Copy(l->scale.get() + int64_t(g) * group_scales * 4, scales.data(),
                      int64_t(scales.size()) * 4);
    }
    if (cublaslt_ != nullptr && l->fp8_input && l->groups == 1) {
      ASSIGN_OR_RETURN(l->block_scale, cublaslt_->Pack(groups[0], l->out, l->in, l->w));
      if (l->block_scale != nullptr) l->packed_bytes += BlockScales(l->out, l->in) * 4;
    }
    l->kernel = f32_ ? "cuda f32"
                : l->block_scale != nullptr
                    ? "cuda wgmma e4m3 x e4m3, a scale for 128 inputs; " + cublaslt_->Name()
                : l->fp8_input ? "cuda wgmma e4m3 x e4m3, a scale for 128 inputs"
                : fp8 ? "cuda mma bf16, weights e4m3 decoded on chip: scales of fewer than 64 outputs"
                      : "cuda wgmma bf16";
    return std::unique_ptr<ops::Linear>(std::move(l));
  }

  void Embed(ops::Queue& q, const ops::EmbedArgs& a) override {
    LaunchEmbed(Cuda(q).stream(), a.table.data, ElemOf(a.table.dtype), a.table.scale,
                int(a.table.scale_block_n), int(a.table.scale_block_k), a.tokens, int(a.rows), int(a.hidden),
                a.x);
    Cuda(q).Launched("embed");
  }

  void Apply(ops::Queue& q, const ops::LinearArgs& a) override {
    const auto& w = *static_cast<const CudaLinear*>(a.weight);
    Gemm g = GemmOf(w);
    g.rows = int(a.rows);
    g.x = a.x;
    g.x_ld = a.x_ld != 0 ? a.x_ld : w.in;
    g.y = a.y;
    g.y_ld = a.y_ld != 0 ? a.y_ld : w.out;
    g.out = a.mode == ops::OutMode::kAct      ? Out::kAct
            : a.mode == ops::OutMode::kF32Add ? Out::kF32Add
                                              : Out::kF32;
    if (w.block_scale != nullptr && cublaslt_->Launch(Cuda(q), g, w.block_scale.get()))
      return Cuda(q).Launched("gemm");
    if (w.fp8_input) QuantiseInput(Cuda(q), g);
    Cuda(q).Launched("gemm", LaunchGemm(Cuda(q).stream(), g));
  }

  void ApplyHeads(ops::Queue& q, const ops::HeadLinearArgs& a) override {
    const auto& w = *static_cast<const CudaLinear*>(a.weight);
    Gemm g = GemmOf(w);
    g.rows = int(a.rows);
    g.groups = int(w.groups);
    g.x = a.x;
    g.x_ld = a.x_row;
    g.x_group = a.x_head;
    g.y = a.y;
    g.y_ld = a.y_row;
    g.y_group = a.y_head;
    g.out = Out::kAct;
    Cuda(q).Launched("gemm by heads", LaunchGemm(Cuda(q).stream(), g));
  }

  void RmsNorm(ops::Queue& q, const ops::RmsNormArgs& a) override {
    LaunchRmsNorm(Cuda(q).stream(), a.x, a.x_ld != 0 ? a.x_ld : a.dim, a.weight, a.eps, int(a.rows),
                  int(a.dim), a.y_act, a.y_ld != 0 ? a.y_ld : a.dim, f32_, a.y_f32);
    Cuda(q).Launched("rms norm");
  }

  void SplitQuery(ops::Queue& q, const ops::SplitQueryArgs& a) override {
    LaunchSplitQuery(Cuda(q).stream(), a.q, a.positions, RopeOf(a.table, a.interleave), int(a.rows),
                     int(a.heads), int(a.nope), int(a.rope), int(a.kv_lora), a.q_nope, a.q_full, f32_);
    Cuda(q).Launched("split query");
  }

  void WriteLatent(ops::Queue& q, const ops::WriteLatentArgs& a) override {
    const KvLayout& layout = a.pool->layout();
    LaunchWriteLatent(Cuda(q).stream(), a.ckv, a.ckv_ld != 0 ? a.ckv_ld : layout.kv_lora() + layout.rope(),
                      a.norm_weight, a.eps, a.positions, RopeOf(a.table, a.interleave), Ids(a.slots.page),
                      a.slots.offset, int(a.rows), int(layout.kv_lora()), int(layout.rope()),
                      LatentSlab(*a.pool, a.layer));
    Cuda(q).Launched("write latent rows");
  }

  void WriteIndex(ops::Queue& q, const ops::WriteIndexArgs& a) override {
    LaunchWriteIndex(Cuda(q).stream(), a.k, a.k_ld != 0 ? a.k_ld : a.dim, a.norm_weight, a.norm_bias, a.eps,
                     a.positions, RopeOf(a.table, a.interleave), Ids(a.slots.page), a.slots.offset,
                     int(a.rows), int(a.dim), int(a.rope), IndexSlab(*a.pool, a.layer));
    Cuda(q).Launched("write index rows");
  }

  void IndexSelect(ops::Queue& queue, const ops::IndexSelectArgs& a) override {
    CudaQueue& q = Cuda(queue);
    const Seqs seqs = SeqsOf(a.seqs);
    if (a.q == nullptr) {
      LaunchSelectAll(q.stream(), seqs.positions, seqs.seq_of_row, seqs.rows, int(a.topk), a.selected,
                      a.selected_count, a.gap);
      q.Launched("select all");
      return;
    }
    const Slab slab = IndexSlab(*a.pool, a.layer);
    const int64_t rows = a.seqs.rows;
    const bool tiles = !f32_ && a.dim == 128 && a.heads % 8 == 0 && slab.format != Elem::kF32;
    IndexQuery iq;
    iq.format = tiles ? slab.format : Elem::kF32;
    iq.heads = PaddedIndexHeads(iq.format, int(a.heads));
    iq.q = q.Scratch<float>(CudaQueue::kIndexQuery, rows * iq.heads * a.dim);
    iq.w = q.Scratch<float>(CudaQueue::kIndexWeight, rows * iq.heads);
    LaunchIndexQuery(q.stream(), a.q, a.head_weight, a.scale, seqs.positions, RopeOf(a.table, a.interleave),
                     int(rows), int(a.heads), int(a.dim), int(a.rope), iq);
    // Scores are made and used in pieces of rows that fit the budget; a row's choice does not depend on the
    // pieces.
    const int64_t ld = AlignUp(a.seqs.max_context, 4);
    const int64_t piece = ScorePiece(q.score_bytes(), ld, rows);
    float* scores = q.Scratch<float>(CudaQueue::kScores, piece * ld);
    for (int64_t row = 0; row < rows; row += piece) {
      const int n = int(std::min(piece, rows - row));
      LaunchIndexScores(q.stream(), seqs, int(row), n, iq.heads, int(a.dim), iq, slab, scores, ld);
      LaunchTopK(q.stream(), scores, ld, seqs.positions + row, seqs.seq_of_row + row, n, int(a.topk),
                 seqs.max_context, a.selected + row * a.topk, a.selected_count + row,
                 a.gap == nullptr ? nullptr : a.gap + row);
    }
    q.Launched("index select");
  }

  void CarrySelection(ops::Queue& q, const ops::CarrySelectionArgs& a) override {
    LaunchCarrySelection(Cuda(q).stream(), a.from, a.positions, int(a.rows), int(a.topk), a.selected,
                         a.selected_count);
    Cuda(q).Launched("carry selection");
  }

  void Attention(ops::Queue& queue, const ops::AttentionArgs& a) override {
    CudaQueue& q = Cuda(queue);
    Attend t;
    t.seqs = SeqsOf(a.seqs);
    t.heads = int(a.heads);
    t.kv_lora = int(a.kv_lora);
    t.rope = int(a.rope);
    t.topk = int(a.topk);
    t.q = a.q;
    t.f32 = f32_;
    t.scale = a.scale;
    t.slab = LatentSlab(*a.pool, a.layer);
    t.selected = a.selected;
    t.count = a.selected_count;
    t.out = a.out;
    const bool whole_pages = !a.dequant_only_topk || (a.dequant_freely && WholePagesAreFaster(a.seqs));
    // More pages than are planned for are dequantised where they are selected: the bits are the same.
    if (whole_pages && SparseMlaFits(t) && t.slab.format == Elem::kE4M3 &&
        a.seqs.num_pages * kBF16PageBytes <= q.Planned(CudaQueue::kFullRows)) {
      // All rows of the batch's pages as bf16 first, page i of the list at place i.
      auto* rows = q.Scratch<std::byte>(CudaQueue::kFullRows, a.seqs.num_pages * kBF16PageBytes);
      auto* places = q.Scratch<int32_t>(CudaQueue::kFullPlaces, a.seqs.num_pages);
      LaunchDequantisePages(q.stream(), t.slab, t.seqs.pages, int(a.seqs.num_pages), rows, places);
      t.seqs.pages = places;
      t.slab = Slab{rows, 0, kBF16PageBytes, 1, Elem::kBF16};
    }
    if (SparseMlaFits(t)) {
      t.splits = deterministic_ ? kSplitsDeterministic : SparseMlaSplits(t.seqs.rows);
      LaunchSparseMla(q.stream(), t);
    } else {
      LaunchAttendAny(q.stream(), t);
    }
    q.Launched("attention");
  }

  void Gate(ops::Queue& queue, const ops::GateArgs& a) override {
    CudaQueue& q = Cuda(queue);
    cuda::Gate g;
    g.rows = int(a.rows);
    g.hidden = int(a.hidden);
    g.experts = int(a.experts);
    g.topk = int(a.topk);
    g.softmax = a.softmax;
    g.normalize = a.normalize;
    g.groups = int(a.groups);
    g.groups_kept = int(a.groups_kept);
    g.sum_top2 = a.group_sum_top2;
    g.scaling = a.scaling;
    g.x = a.x;
    g.weight = a.weight;
    g.bias = a.bias;
    g.expert = a.expert;
    g.expert_weight = a.expert_weight;
    int parts = 1;
    if (!f32_ && GateTakesPlanes(g.hidden, g.experts)) {
      parts = GateScoreParts(g.hidden);
      g.weight_planes = RouterPlanes(q, a.weight, a.experts * a.hidden);
      g.x_planes = q.Scratch<uint16_t>(CudaQueue::kGatePlanes, 3 * a.rows * a.hidden);
    }
    g.scores = q.Scratch<float>(CudaQueue::kGateScores, parts * a.rows * a.experts);
    q.Launched("gate", LaunchGate(q.stream(), g));
  }

  void Moe(ops::Queue& queue, const ops::MoeArgs& a) override {
    CudaQueue& q = Cuda(queue);
    const auto& up = *static_cast<const CudaLinear*>(a.gate_up);
    const auto& down = *static_cast<const CudaLinear*>(a.down);
    const int64_t pairs = a.rows * a.topk;
    if (pairs == 0) return;
    const bool fp8 = up.fp8_input && down.fp8_input && down.in % 128 == 0;
    SortedRows rows;
    rows.tile_rows = fp8 && pairs >= up.groups * 64 ? 128 : kGemmTileRows;
    rows.capacity = MaxSortedRows(pairs, int(up.groups), rows.tile_rows);
    auto* sorted = q.Scratch<int32_t>(CudaQueue::kSorted, rows.capacity);
    auto* tile_group = q.Scratch<int32_t>(CudaQueue::kTileGroup, rows.capacity / rows.tile_rows + 1);
    auto* begins = q.Scratch<int32_t>(CudaQueue::kBegins, up.groups);
    rows.rows = sorted;
    rows.tiles_used = tile_group + rows.capacity / rows.tile_rows;
    LaunchSortPairs(q.stream(), a.expert, int(pairs), int(up.groups), rows.tile_rows, nullptr, begins, sorted,
                    tile_group, int(rows.capacity));
    Gemm g = GemmOf(up), d = GemmOf(down);
    g.rows = d.rows = int(rows.capacity);
    g.tile_rows = d.tile_rows = rows.tile_rows;
    g.tile_group = d.tile_group = tile_group;
    g.sorted = d.sorted = sorted;
    g.divide_x = int(a.topk);
    d.scatter = true;
    d.y_ld = down.out;
    d.x_ld = down.in;
    if (fp8) {
      ExpertsFp8(q, a, g, d, rows, up, down);
      return;
    }
    auto* gate_up = q.Scratch<float>(CudaQueue::kGateUp, rows.capacity * up.out);
    auto* act = q.Scratch<std::byte>(CudaQueue::kExpertAct, rows.capacity * down.in * (f32_ ? 4 : 2));
    auto* out = q.Scratch<float>(CudaQueue::kExpertOut, pairs * down.out);
    g.x = a.x;
    g.x_ld = up.in;
    g.y = gate_up;
    g.y_ld = up.out;
    g.gather = true;
    q.Launched("experts", LaunchGemm(q.stream(), g));
    LaunchSiluMul(q.stream(), gate_up, rows.capacity, int(down.in), act, f32_);
    d.x = act;
    d.y = out;
    q.Launched("experts", LaunchGemm(q.stream(), d));
    LaunchCombine(q.stream(), out, false, a.expert, a.expert_weight, int(a.rows), int(a.topk), int(down.out),
                  a.y);
    q.Launched("experts");
  }

  void SiluMul(ops::Queue& q, const ops::SiluMulArgs& a) override {
    LaunchSiluMul(Cuda(q).stream(), a.gate_up, a.rows, int(a.dim), a.act, f32_);
    Cuda(q).Launched("silu");
  }

  void GatherRows(ops::Queue& q, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                  void* dst) override {
    LaunchGatherRows(Cuda(q).stream(), src, index, int(rows), bytes, dst);
    Cuda(q).Launched("gather rows");
  }

  void FiniteRows(ops::Queue& q, const float* x, int64_t rows, int64_t dim, int32_t* finite) override {
    LaunchFiniteRows(Cuda(q).stream(), x, int(rows), int(dim), finite);
    Cuda(q).Launched("finite rows");
  }

  void ReduceRows(ops::Queue& q, const ops::ReduceRowsArgs& a) override {
    Cuda(q).Launched("reduce rows", LaunchReduceRows(Cuda(q).stream(), a.logits, int(a.vocab), a.request,
                                                     int(a.requests), a.out, a.candidates));
  }

 private:
  // The matrix units take e4m3 on both sides where one scale holds for 64 neighbouring outputs.
  static bool TakesFp8Input(const std::vector<ops::WeightView>& parts, int64_t out, int64_t in) {
    int64_t row0 = 0;
    for (const ops::WeightView& v : parts) {
      if (row0 % 64 != 0 || v.scale_block_n % 64 != 0) return false;
      row0 += v.out;
    }
    return out % 2 == 0 && in % 16 == 0;
  }

  Gemm GemmOf(const CudaLinear& w) const {
    Gemm g;
    g.n = int(w.out);
    g.k = int(w.in);
    g.groups = int(w.groups);
    g.w = w.w.get();
    (w.fp8_input ? g.scale64 : g.scale) = reinterpret_cast<const float*>(w.scale.get());
    g.w_fp8 = w.fp8;
    g.f32 = f32_;
    g.split = !deterministic_;
    return g;
  }

  // Replaces g's bf16 input by e4m3 in scratch.
  static void QuantiseInput(CudaQueue& q, Gemm& g) {
    auto* x = q.Scratch<uint8_t>(CudaQueue::kInput8, int64_t(g.rows) * g.k);
    auto* scale = q.Scratch<float>(CudaQueue::kInputScale, RowScales(g.rows, g.k));
    LaunchQuantise(q.stream(), g.x, g.x_ld, g.rows, g.k, x, scale);
    g.x = x;
    g.x_ld = g.k;
    g.x_fp8 = true;
    g.x_scale = scale;
  }

  void ExpertsFp8(CudaQueue& q, const ops::MoeArgs& a, Gemm g, Gemm d, const SortedRows& rows,
                  const CudaLinear& up, const CudaLinear& down) {
    const int64_t pairs = a.rows * a.topk;
    auto* x = q.Scratch<uint8_t>(CudaQueue::kInput8, rows.capacity * up.in);
    auto* x_scale = q.Scratch<float>(CudaQueue::kInputScale, RowScales(rows.capacity, up.in));
    auto* act = q.Scratch<uint8_t>(CudaQueue::kExpert8, rows.capacity * down.in);
    auto* act_scale = q.Scratch<float>(CudaQueue::kExpertScale, RowScales(rows.capacity, down.in));
    auto* out = q.Scratch<uint16_t>(CudaQueue::kExpertOut, pairs * down.out);
    LaunchQuantiseSorted(q.stream(), a.x, up.in, int(up.in), rows, int(a.topk), x, x_scale);
    g.x_fp8 = d.x_fp8 = true;
    g.tiles_used = d.tiles_used = rows.tiles_used;
    g.x = x;
    g.x_ld = up.in;
    g.x_scale = x_scale;
    if (rows.tile_rows == 128) {  // the activation is made on the way out of the first product
      g.n = int(down.in);
      g.y = act;
      g.y_ld = down.in;
      g.y_scale = act_scale;
      q.Launched("experts", LaunchGemm(q.stream(), g));
    } else {
      auto* gate_up = q.Scratch<float>(CudaQueue::kGateUp, rows.capacity * up.out);
      g.y = gate_up;
      g.y_ld = up.out;
      q.Launched("experts", LaunchGemm(q.stream(), g));
      LaunchSiluQuantise(q.stream(), gate_up, rows.capacity, int(down.in), &rows, act, act_scale);
    }
    d.x = act;
    d.x_scale = act_scale;
    d.y = out;
    d.out = Out::kAct;
    q.Launched("experts", LaunchGemm(q.stream(), d));
    LaunchCombine(q.stream(), out, true, a.expert, a.expert_weight, int(a.rows), int(a.topk), int(down.out),
                  a.y);
    q.Launched("experts");
  }

  // The router's weight as three bf16 planes, made at its first use (the warm-up) and kept.
  const void* RouterPlanes(CudaQueue& q, const float* weight, int64_t n) {
    std::lock_guard lock(planes_mutex_);
    std::shared_ptr<std::byte>& planes = planes_[weight];
    if (planes == nullptr) {
      auto made = memory_->Allocate(3 * n * 2, "router weights");
      SLUICE_CHECK(made.ok(), "{}", Message(made.status()));
      planes = *made;
      LaunchSplitBF16(q.stream(), weight, n, planes.get());
      q.Synchronize();
    }
    return planes.get();
  }

  // A row that reads bf16 rows saves about 10 pages' worth of dequantising. Not for decoding steps, whose
  // recorded launch must not follow from the number of pages.
  static bool WholePagesAreFaster(const ops::SeqTables& s) {
    constexpr int64_t kLeastRows = 256;
    return s.rows >= kLeastRows && s.rows > s.seqs && s.num_pages <= MostWholePages(s.rows);
  }

  // How the experts were packed decides what their rows need.
  ScratchShape ShapeOf(const ops::Limits& l) const {
    ScratchShape shape{.f32 = f32_};
    bool all = l.expert_intermediate % 128 == 0, any = false;
    for (const Packed& p : groups_) {
      if (p.groups != l.experts || !((p.in == l.hidden && p.out == 2 * l.expert_intermediate) ||
                                     (p.in == l.expert_intermediate && p.out == l.hidden)))
        continue;
      any = true;
      all = all && p.fp8_input;
    }
    shape.fp8_experts = any && all;
    return shape;
  }

  const std::unique_ptr<CudaMemory> memory_;
  const ops::BackendInfo info_;
  const std::unique_ptr<CublasLtLinear> cublaslt_;  // null: the own kernel multiplies e4m3 alone
  const bool f32_, deterministic_;
  QueueOptions queue_;  // of queues that are made from here on
  struct Packed {
    int64_t groups = 0, in = 0, out = 0;
    bool fp8_input = false;
  };
  std::vector<Packed> groups_;  // shapes of what was packed in groups
  std::mutex planes_mutex_;
  std::unordered_map<const float*, std::shared_ptr<std::byte>> planes_;  // by weight
};

}  // namespace

StatusOr<std::unique_ptr<ops::Backend>> MakeCudaBackend(const CudaOptions& options) {
  if (options.act != DType::kBF16 && options.act != DType::kF32)
    return Unsupported("activation type {} is not supported on CUDA; use bf16 or float32", Name(options.act));
  // All kernels are loaded at once, so that no step loads one.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ASSIGN_OR_RETURN(const DeviceFacts facts, ReadDeviceFacts());
  RETURN_IF_ERROR(CheckFeature(Feature::kKernels, facts));
  ASSIGN_OR_RETURN(std::unique_ptr<CudaMemory> memory, CudaMemory::Make(facts));
  std::unique_ptr<CublasLtLinear> cublaslt;
  if (options.act == DType::kBF16 && !options.deterministic) {
    ASSIGN_OR_RETURN(cublaslt, CublasLtLinear::Make(options.fp8_gemm, facts.multiprocessors, *memory));
  }
  // A change of any kernel's arithmetic must change the number: caches written by another are then not
  // reused.
  return std::make_unique<CudaBackend>(
      std::move(memory),
      ops::BackendInfo{.device = "cuda",
                       .isa = "sm_90a",
                       .act = options.act,
                       .numerics_class = fmt::format("cuda/sm_90a/{}/{}2", Name(options.act),
                                                     options.deterministic ? "fixed/" : "")},
      options, std::move(cublaslt));
}

}  // namespace sluice::cuda
