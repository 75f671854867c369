#include "model/model_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>

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

}  // namespace

StatusOr<std::unique_ptr<ModelBuffers>> ModelBuffers::Make(const ModelConfig& c, const ops::Backend& backend,
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
    p.Skip();
    p.Take(b->logits, logits_rows * c.vocab_size, 4);
    return p.end();
  };
  b->arena_bytes_ = size_t(AlignUp(plan(nullptr), 4096));
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

  const int64_t half = c.qk_rope / 2, positions = limits.max_context;
  b->rope_half_ = half;
  b->rope_.resize(size_t(2 * positions * half));
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      // The angle is rounded to float32 as in training; its cosine is exact to float32.
      const float angle = float(p) * c.rope.inv_freq[size_t(i)];
      b->rope_[size_t(p * half + i)] = float(std::cos(double(angle))) * c.rope.cos_sin_scale;
      b->rope_[size_t((positions + p) * half + i)] = float(std::sin(double(angle))) * c.rope.cos_sin_scale;
    }
  }
  return b;
}

ops::RopeTable ModelBuffers::rope() const {
  return {rope_.data(), rope_.data() + limits_.max_context * rope_half_, rope_half_};
}

}  // namespace sluice
