#include "model/model_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/check.h"

namespace sluice {
namespace {

// Two passes over the same list: the first adds sizes, the second hands out addresses.
class Planner {
 public:
  explicit Planner(std::byte* base) : base_(base) {}
  template <typename T>
  void Take(T*& p, int64_t count, int64_t element_bytes) {
    p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at_);
    at_ = AlignUp(at_ + count * element_bytes, 64);
    end_ = std::max(end_, at_);
  }
  int64_t at() const { return at_; }
  void Rewind(int64_t at) { at_ = at; }
  void Skip() { at_ = end_; }
  int64_t end() const { return end_; }

 private:
  std::byte* base_;
  int64_t at_ = 0, end_ = 0;
};

int64_t MaxPages(const ModelLimits& limits) {
  return limits.max_seqs * CeilDiv(limits.max_context + kPageTokens, kPageTokens);
}
// Six tables of a batch, its page lists (shared pages repeated by each sequence) and the gaps between them.
int64_t TableWords(const ModelLimits& limits) {
  return 6 * limits.max_rows + 3 * limits.max_seqs + MaxPages(limits) + 16 * 16;
}

}  // namespace

ops::Limits OpLimits(const ModelConfig& c, const ModelLimits& limits) {
  ops::Limits o;
  o.max_rows = limits.max_rows;
  o.max_seqs = limits.max_seqs;
  o.max_context = limits.max_context;
  o.max_pages = MaxPages(limits);
  o.max_index_heads = c.sparse() ? c.index.num_heads : 0;
  o.index_dim = c.index.head_dim;
  o.hidden = c.hidden;
  o.heads = c.num_heads;
  o.widest_input = std::max({2 * c.hidden, c.q_lora_rank, c.num_heads * c.v_head, c.dense_intermediate,
                             c.moe.num_shared * c.moe.intermediate});
  o.experts = c.moe.num_experts;
  o.expert_topk = c.moe.experts_per_token;
  o.expert_intermediate = c.moe.intermediate;
  o.upload_bytes = 2 * (TableWords(limits) + limits.max_logits_rows + limits.max_rows) * 4;
  return o;
}

StatusOr<std::unique_ptr<ModelBuffers>> ModelBuffers::Make(const ModelConfig& c, ops::Backend& backend,
                                                           const ModelLimits& limits) {
  if (limits.max_rows < 1 || limits.max_seqs < 1 || limits.max_logits_rows < 1 || limits.max_context < 1) {
    return Internal("model buffers: limits must be positive");
  }
  std::unique_ptr<ModelBuffers> b(new ModelBuffers());
  b->limits_ = limits;
  const int64_t rows = backend.RowCapacity(limits.max_rows),
                logits_rows = backend.RowCapacity(limits.max_logits_rows);
  const int64_t act = SizeOf(backend.info().act);
  int64_t intermediate = 0;
  for (bool moe : c.layer_is_moe) {
    intermediate = std::max(intermediate, moe ? c.moe.num_shared * c.moe.intermediate : c.dense_intermediate);
  }
  if (c.moe.num_experts > 0) intermediate = std::max(intermediate, c.moe.num_shared * c.moe.intermediate);
  const auto plan = [&](std::byte* base) {
    Planner p(base);
    p.Take(b->x, rows * c.hidden, 4);
    p.Take(b->h, rows * c.hidden, act);
    p.Take(b->selected, rows * c.index.topk, 4);
    p.Take(b->selected_count, rows, 4);
    const int64_t halves = p.at();
    p.Take(b->in_proj, rows * (c.q_lora_rank + c.latent_dim() + c.index.head_dim), 4);
    p.Take(b->q_latent, rows * c.q_lora_rank, act);
    p.Take(b->q, rows * c.num_heads * (c.qk_nope + c.qk_rope), 4);
    p.Take(b->q_nope, rows * c.num_heads * c.qk_nope, act);
    p.Take(b->q_full, rows * c.num_heads * c.latent_dim(), act);
    p.Take(b->index_q, rows * c.index.num_heads * c.index.head_dim, 4);
    p.Take(b->index_w, rows * c.index.num_heads, 4);
    p.Take(b->latent_out, rows * c.num_heads * c.kv_lora_rank, act);
    p.Take(b->head_out, rows * c.num_heads * c.v_head, act);
    p.Rewind(halves);
    p.Take(b->router_in, rows * c.hidden, 4);
    p.Take(b->gate_up, rows * 2 * intermediate, 4);
    p.Take(b->mlp_act, rows * intermediate, act);
    p.Take(b->expert, rows * c.moe.experts_per_token, 4);
    p.Take(b->expert_weight, rows * c.moe.experts_per_token, 4);
    p.Rewind(halves);
    p.Take(b->draft_in, rows * 2 * c.hidden, act);
    p.Rewind(halves);
    p.Take(b->logits_x, logits_rows * c.hidden, 4);
    p.Take(b->logits_h, logits_rows * c.hidden, act);
    if (backend.memory() != nullptr && c.num_draft_layers > 0) {
      p.Rewind(std::max(p.at(), halves + rows * 2 * c.hidden * act));  // behind draft_in
      p.Take(b->draft_hidden, rows * c.hidden, 4);
    }
    p.Skip();
    p.Take(b->logits, logits_rows * c.vocab_size, 4);
    return p.end();
  };
  b->arena_bytes_ = size_t(AlignUp(plan(nullptr), 4096));
  b->memory_ = backend.memory();
  if (b->memory_ != nullptr) {
    DeviceMemory& memory = *b->memory_;
    ASSIGN_OR_RETURN(auto arena, memory.Allocate(int64_t(b->arena_bytes_),
                                                 "working buffers; lower --chunked-prefill-size"));
    b->arena_owner_ = arena;
    plan(arena.get());
    ASSIGN_OR_RETURN(b->host_logits_memory_, memory.AllocateShared(logits_rows * c.vocab_size * 4, "logits"));
    b->host_logits = reinterpret_cast<float*>(b->host_logits_memory_.get());
    ASSIGN_OR_RETURN(b->host_finite_memory_, memory.AllocateShared(rows * 4, "row checks"));
    b->host_finite = reinterpret_cast<int32_t*>(b->host_finite_memory_.get());
    const int64_t answers = AlignUp(logits_rows * int64_t(sizeof(ReducedRow)), 64),
                  asked = AlignUp(logits_rows * int64_t(sizeof(RowRequest)), 64);
    ASSIGN_OR_RETURN(
        b->reduced_memory_,
        memory.AllocateShared(answers + asked + logits_rows * kMostCandidates * int64_t(sizeof(RowCandidate)),
                              "sampling"));
    b->reduced = reinterpret_cast<ReducedRow*>(b->reduced_memory_.get());
    b->requests = reinterpret_cast<RowRequest*>(b->reduced_memory_.get() + answers);
    b->candidates = reinterpret_cast<RowCandidate*>(b->reduced_memory_.get() + answers + asked);
    b->table_words_ = TableWords(limits);
    ASSIGN_OR_RETURN(
        b->table_memory_,
        memory.Allocate((b->table_words_ + std::max(limits.max_logits_rows, limits.max_rows)) * 4,
                        "batch tables"));
    b->staging_.resize(size_t(b->table_words_));
    ASSIGN_OR_RETURN(b->stage_memory_, memory.AllocateShared(kStages * b->table_words_ * 4, "batch tables"));
    b->FillRope(c);
    ASSIGN_OR_RETURN(b->rope_memory_, memory.Allocate(int64_t(b->rope_.size()) * 4, "rope tables"));
    memory.Copy(b->rope_memory_.get(), b->rope_.data(), int64_t(b->rope_.size()) * 4);
    return b;
  }
  // Committed when first touched: a short batch never pays for the planned maximum.
  void* memory = mmap(nullptr, b->arena_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return Exhausted("model buffers: {} bytes for {} rows cannot be reserved; lower --chunked-prefill-size",
                     b->arena_bytes_, limits.max_rows);
  }
  const size_t bytes = b->arena_bytes_;
  b->arena_owner_ = std::shared_ptr<void>(memory, [bytes](void* p) { munmap(p, bytes); });
  b->arena_ = static_cast<std::byte*>(memory);
  plan(b->arena_);
  b->FillRope(c);
  return b;
}

void ModelBuffers::FillRope(const ModelConfig& c) {
  const int64_t half = c.qk_rope / 2, positions = limits_.max_context;
  rope_half_ = half;
  rope_.resize(size_t(2 * positions * half));
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      // The angle is rounded to float32 as in training; its cosine is exact to float32.
      const float angle = float(p) * c.rope.inv_freq[size_t(i)];
      rope_[size_t(p * half + i)] = float(std::cos(double(angle))) * c.rope.cos_sin_scale;
      rope_[size_t((positions + p) * half + i)] = float(std::sin(double(angle))) * c.rope.cos_sin_scale;
    }
  }
}

ops::RopeTable ModelBuffers::rope() const {
  const float* base = on_device() ? reinterpret_cast<const float*>(rope_memory_.get()) : rope_.data();
  return {base, base + limits_.max_context * rope_half_, rope_half_};
}

int64_t ModelBuffers::Arrange(const ModelBatch& batch, int32_t* host, ModelBatch* placed) const {
  auto* base = reinterpret_cast<int32_t*>(table_memory_.get());
  int64_t at = 0;
  const auto put = [&](const auto* from, int64_t count) {
    using T = std::remove_cvref_t<decltype(*from)>;
    static_assert(sizeof(T) == 4);
    SLUICE_CHECK(at + count <= table_words_, "tables of {} words, planned for {}", at + count, table_words_);
    if (count > 0 && from != nullptr) std::memcpy(host + at, from, size_t(count) * 4);
    const T* there = reinterpret_cast<const T*>(base + at);
    at = AlignUp(at + count, 16);
    return there;
  };
  ModelBatch& m = *placed;
  m = batch;
  m.tokens = put(batch.tokens, batch.rows);
  m.positions = put(batch.positions, batch.rows);
  m.slots.page = put(batch.slots.page, batch.rows);
  m.slots.offset = put(batch.slots.offset, batch.rows);
  m.seqs.seq_of_row = put(batch.seqs.seq_of_row, batch.rows);
  m.seqs.positions = m.positions;
  m.seqs.row_begin = put(batch.seqs.row_begin, batch.seqs.seqs);
  m.seqs.num_rows = put(batch.seqs.num_rows, batch.seqs.seqs);
  m.seqs.page_begin = put(batch.seqs.page_begin, batch.seqs.seqs);
  m.seqs.pages = put(batch.seqs.pages, batch.seqs.num_pages);
  return at;
}

ModelBatch ModelBuffers::Place(ops::Queue& queue, const ModelBatch& batch) {
  if (!on_device()) return batch;
  ModelBatch m;
  void* const to = table_memory_.get();
  if (batch.staged < 0) {
    const int64_t words = Arrange(batch, staging_.data(), &m);
    queue.Upload(to, staging_.data(), words * 4);
    return m;
  }
  auto* staged = reinterpret_cast<int32_t*>(stage_memory_.get()) + batch.staged * table_words_;
  const Staged& stage = stages_[size_t(batch.staged)];
  std::memcpy(staged, batch.tokens, size_t(batch.rows) * 4);
  queue.UploadShared(to, staged, stage.words * 4);
  return stage.batch;
}

void ModelBuffers::Stage(int32_t place, ModelBatch* batch) {
  if (!on_device()) return;
  auto* staged = reinterpret_cast<int32_t*>(stage_memory_.get()) + place * table_words_;
  Staged& s = stages_[size_t(place)];
  batch->staged = place;
  s.words = Arrange(*batch, staged, &s.batch);
}

const int32_t* ModelBuffers::PlaceRows(ops::Queue& queue, std::span<const int32_t> rows) {
  if (!on_device()) return rows.data();
  auto* at = reinterpret_cast<int32_t*>(table_memory_.get()) + table_words_;
  queue.Upload(at, rows.data(), int64_t(rows.size()) * 4);
  return at;
}

}  // namespace sluice
