// The forward pass. Reads like the paper: norm, attention, residual, norm, MLP, residual.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "model/layer.h"

namespace sluice {
namespace {
constexpr float kIndexNormEps = 1e-6f;  // of the indexer's LayerNorm in all published implementations
constexpr int64_t kVerifyRows = 8;      // of a sequence in a step that decodes or verifies drafts
}  // namespace

// What one forward carries from layer to layer.
struct Model::Pass {
  ops::Queue& queue;
  const ModelBatch& batch;
  const DevicePool& pool;
  ModelBuffers& b;
  ForwardOptions& options;
  bool has_selection = false;
  const int32_t* carried = nullptr;  // options.carried_selection where the backend's ops read it
};

Status Model::Forward(ops::Queue& queue, const ModelBatch& batch, const DevicePool& pool,
                      ModelBuffers& buffers, ForwardOptions& options) const {
  if (batch.rows > buffers.limits().max_rows || batch.max_context > buffers.limits().max_context) {
    return Internal("forward of {} rows and context {} exceeds the planned {} and {}", batch.rows,
                    batch.max_context, buffers.limits().max_rows, buffers.limits().max_context);
  }
  const ModelBatch placed = buffers.Place(queue, batch);
  options.verify_failed_row = -1;
  return Recorded(queue, batch, placed, pool, buffers, options, /*kind=*/0,
                  [&](const ModelBatch& rows) { return RunLayers(queue, rows, pool, buffers, options); });
}

template <typename Run>
Status Model::Recorded(ops::Queue& queue, const ModelBatch& batch, const ModelBatch& at,
                       const DevicePool& pool, ModelBuffers& buffers, ForwardOptions& options, int64_t kind,
                       const Run& run) const {
  const bool alone = options.hooks == nullptr || !options.hooks->Active();
  if (!buffers.on_device() || !alone || options.timer != nullptr || options.index_gap != nullptr)
    return run(at);
  // The grids of a recorded pass hold for a range of contexts; the tables tell each row its own.
  ModelBatch placed = at;
  placed.max_context = ContextRange(batch.max_context, buffers.limits().max_context);
  placed.seqs.max_context = placed.max_context + batch.seqs.slot_shift;
  // A decoding or verifying step has few rows: no pages of it are dequantised as a whole, so that its
  // recording does not follow from their number.
  const bool few = batch.rows <= kVerifyRows * batch.seqs.seqs;
  const bool freely = options.dequant_freely;
  options.dequant_freely = freely && !few;
  const ops::ReplayKey key = {batch.rows,
                              batch.seqs.seqs,
                              placed.max_context,
                              batch.seqs.slot_shift,
                              options.dequant_only_topk && few ? 0 : batch.seqs.num_pages,
                              int64_t(reinterpret_cast<intptr_t>(&pool)),
                              int64_t(reinterpret_cast<intptr_t>(&buffers)),
                              kind};
  Status status;
  if (!queue.Replay(key)) {
    const bool recording = queue.Record(key, batch.rows);
    status = run(placed);
    if (recording) queue.EndRecord();
  }
  options.dequant_freely = freely;
  return status;
}

// The next power of two, on the same side of the number of rows that attention keeps.
int64_t Model::ContextRange(int64_t context, int64_t limit) const {
  const int64_t topk = config_.sparse() ? config_.index.topk : 0;
  if (context <= topk) return std::min(topk, limit);
  int64_t range = 1024;
  while (range < context) range *= 2;
  return std::max(context, std::min(range, limit));
}

Status Model::RunLayers(ops::Queue& queue, const ModelBatch& placed, const DevicePool& pool,
                        ModelBuffers& buffers, ForwardOptions& options) const {
  Pass pass{queue, placed, pool, buffers, options};
  Embed(pass);
  for (const auto& layer : layers_) {
    RETURN_IF_ERROR(RunLayer(pass, *layer));
    queue.Border();
  }
  if (buffers.on_device())
    backend_.FiniteRows(queue, buffers.x, placed.rows, config_.hidden, buffers.host_finite);
  return OkStatus();
}

void Model::Embed(Pass& pass) const {
  ZoneScope zone(pass.options.timer, Zone::kEmbed);
  ops::EmbedArgs e;
  e.rows = pass.batch.rows;
  e.hidden = config_.hidden;
  e.vocab = config_.vocab_size;
  e.table = embedding_;
  e.tokens = pass.batch.tokens;
  e.x = pass.b.x;
  backend_.Embed(pass.queue, e);
}

Status Model::RunLayer(Pass& pass, const Layer& l) const {
  if (config_.sparse() && !l.computes_index && !pass.has_selection) {
    return Internal("layer {} reuses the top-k of the layer before, but none was carried to it", l.id.value);
  }
  ModelBuffers& b = pass.b;
  {
    ZoneScope zone(pass.options.timer, Zone::kNorm);
    ops::RmsNormArgs n;
    n.rows = pass.batch.rows;
    n.dim = config_.hidden;
    n.x = b.x;
    n.weight = l.input_norm.data();
    n.eps = config_.rms_eps;
    n.y_act = b.h;
    backend_.RmsNorm(pass.queue, n);
  }
  Attend(pass, l);
  if (pass.options.kv_only && l.id == config_.draft_layer()) return OkStatus();
  {
    ZoneScope zone(pass.options.timer, Zone::kNorm);
    ops::RmsNormArgs n;
    n.rows = pass.batch.rows;
    n.dim = config_.hidden;
    n.x = b.x;
    n.weight = l.post_norm.data();
    n.eps = config_.rms_eps;
    n.y_act = b.h;
    n.y_f32 = l.moe ? b.router_in : nullptr;
    backend_.RmsNorm(pass.queue, n);
  }
  RunMlp(pass, l);
  return OkStatus();
}

// y = W x over the pass's rows.
void Model::Project(Pass& pass, const ops::Linear& w, const void* x, void* y, ops::OutMode mode,
                    int64_t y_ld) const {
  ops::LinearArgs a;
  a.weight = &w;
  a.rows = pass.batch.rows;
  a.x = x;
  a.y = y;
  a.y_ld = y_ld;
  a.mode = mode;
  backend_.Apply(pass.queue, a);
}

// KV rows are stored before anything else of the layer, so that what waits for them (other ranks, a transfer)
// waits least.
void Model::Attend(Pass& pass, const Layer& l) const {
  WriteKv(pass, l);
  LayerHooks* hooks = pass.options.hooks;
  const bool kv_only = pass.options.kv_only && l.id == config_.draft_layer();
  if (!kv_only) ProjectQuery(pass, l);
  if (hooks != nullptr) {
    hooks->WaitReadable(l.id);
    hooks->LayerFinal(l.id);
  }
  if (kv_only) return;
  if (l.computes_index) SelectRows(pass, l);
  AttendRows(pass, l);
  ZoneScope zone(pass.options.timer, Zone::kGemm);
  Project(pass, *l.out, pass.b.head_out, pass.b.x, ops::OutMode::kF32Add);
}

int64_t Model::InColumns(const Layer& l) const {
  return config_.q_lora_rank + config_.latent_dim() + (l.computes_index ? config_.index.head_dim : 0);
}

ops::OwnBlocks Model::Own(const Pass& pass, KvComponent component, LogicalLayer layer) const {
  LayerHooks* hooks = pass.options.hooks;
  return hooks == nullptr ? ops::OwnBlocks() : hooks->Own(component, layer);
}

void Model::WriteKv(Pass& pass, const Layer& l) const {
  const ModelConfig& c = config_;
  const ModelBatch& batch = pass.batch;
  ModelBuffers& b = pass.b;
  const int64_t in_ld = InColumns(l), rows = batch.rows;
  {
    ZoneScope zone(pass.options.timer, Zone::kGemm);
    for (const Layer::InPart& part : l.in)
      Project(pass, *part.weight, b.h, b.in_proj + part.column, ops::OutMode::kF32, in_ld);
  }
  ZoneScope zone(pass.options.timer, Zone::kKvWrite);
  ops::WriteLatentArgs w;
  w.rows = rows;
  w.ckv = b.in_proj + c.q_lora_rank;
  w.ckv_ld = in_ld;
  w.norm_weight = l.kv_latent_norm.data();
  w.eps = c.latent_norm_eps;
  w.positions = batch.positions;
  w.table = b.rope();
  w.interleave = c.rope_interleave;
  w.pool = &pass.pool;
  w.layer = l.id;
  w.own = Own(pass, KvComponent::kLatent, l.id);
  w.slots = batch.slots;
  backend_.WriteLatent(pass.queue, w);
  if (l.computes_index) {
    ops::WriteIndexArgs x;
    x.rows = rows;
    x.dim = c.index.head_dim;
    x.rope = c.qk_rope;
    x.k = b.in_proj + c.q_lora_rank + c.latent_dim();
    x.k_ld = in_ld;
    x.norm_weight = l.index_norm.data();
    x.norm_bias = l.index_norm_bias.data();
    x.eps = kIndexNormEps;
    x.positions = batch.positions;
    x.table = b.rope();
    x.interleave = c.index.rope_interleave;
    x.pool = &pass.pool;
    x.layer = l.id;
    x.own = Own(pass, KvComponent::kIndex, l.id);
    x.slots = batch.slots;
    backend_.WriteIndex(pass.queue, x);
  }
}

void Model::ProjectQuery(Pass& pass, const Layer& l) const {
  const ModelConfig& c = config_;
  ModelBuffers& b = pass.b;
  StepTimer* timer = pass.options.timer;
  const int64_t rows = pass.batch.rows;
  if (c.q_lora_rank > 0) {
    ZoneScope zone(timer, Zone::kNorm);
    ops::RmsNormArgs n;
    n.rows = rows;
    n.dim = c.q_lora_rank;
    n.x = b.in_proj;
    n.x_ld = InColumns(l);
    n.weight = l.q_latent_norm.data();
    n.eps = c.latent_norm_eps;
    n.y_act = b.q_latent;
    backend_.RmsNorm(pass.queue, n);
  }
  {
    ZoneScope zone(timer, Zone::kGemm);
    Project(pass, *l.q, c.q_lora_rank > 0 ? b.q_latent : b.h, b.q, ops::OutMode::kF32);
  }
  {
    ZoneScope zone(timer, Zone::kQuerySplit);
    ops::SplitQueryArgs s;
    s.rows = rows;
    s.heads = c.num_heads;
    s.nope = c.qk_nope;
    s.rope = c.qk_rope;
    s.kv_lora = c.kv_lora_rank;
    s.q = b.q;
    s.positions = pass.batch.positions;
    s.table = b.rope();
    s.interleave = c.rope_interleave;
    s.q_nope = b.q_nope;
    s.q_full = b.q_full;
    backend_.SplitQuery(pass.queue, s);
  }
  ZoneScope zone(timer, Zone::kHeadGemm);
  ops::HeadLinearArgs f;
  f.weight = l.fold.get();
  f.rows = rows;
  f.x = b.q_nope;
  f.x_row = c.num_heads * c.qk_nope;
  f.x_head = c.qk_nope;
  f.y = b.q_full;
  f.y_row = c.num_heads * c.latent_dim();
  f.y_head = c.latent_dim();
  backend_.ApplyHeads(pass.queue, f);
}

void Model::SelectRows(Pass& pass, const Layer& l) const {
  const ModelConfig& c = config_;
  const ModelBatch& batch = pass.batch;
  ModelBuffers& b = pass.b;
  StepTimer* timer = pass.options.timer;
  if (pass.carried != nullptr) return CarrySelection(pass);
  // Up to topk positions are all chosen without a score: the index key is stored above, the query is not
  // needed.
  const bool scores = batch.max_context > c.index.topk;
  if (scores) {
    ZoneScope zone(timer, Zone::kIndexGemm);
    Project(pass, *l.index_q, b.q_latent, b.index_q, ops::OutMode::kF32);
    Project(pass, *l.index_w, b.h, b.index_w, ops::OutMode::kF32);
  }
  ZoneScope zone(timer, Zone::kIndexSelect);
  ops::IndexSelectArgs s;
  s.seqs = batch.seqs;
  s.heads = c.index.num_heads;
  s.dim = c.index.head_dim;
  s.rope = c.qk_rope;
  s.topk = c.index.topk;
  s.q = scores ? b.index_q : nullptr;
  s.head_weight = scores ? b.index_w : nullptr;
  s.scale = float(1.0 / std::sqrt(double(c.index.num_heads) * double(c.index.head_dim)));
  s.table = b.rope();
  s.interleave = c.index.rope_interleave;
  s.pool = &pass.pool;
  s.layer = l.id;
  s.own = Own(pass, KvComponent::kIndex, l.id);
  s.selected = b.selected;
  s.selected_count = b.selected_count;
  s.gap = pass.options.index_gap;
  backend_.IndexSelect(pass.queue, s);
  pass.has_selection = true;
  LayerHooks* hooks = pass.options.hooks;
  if (hooks == nullptr) return;
  if (!b.on_device()) {
    hooks->IndexSelected(l.id, b.selected, b.selected_count);
    hooks->ReviseSelection(l.id, b.selected, b.selected_count);
  } else if (hooks->WantsSelection()) {
    b.host_selected.resize(size_t(batch.rows * c.index.topk));
    b.host_selected_count.resize(size_t(batch.rows));
    pass.queue.Download(b.host_selected.data(), b.selected, batch.rows * c.index.topk * 4);
    pass.queue.Download(b.host_selected_count.data(), b.selected_count, batch.rows * 4);
    pass.queue.Synchronize();
    hooks->IndexSelected(l.id, b.host_selected.data(), b.host_selected_count.data());
  }
}

// Positions, not places in the pool: what a later draft row of the sequence takes over as it is.
void Model::CarrySelection(Pass& pass) const {
  ops::CarrySelectionArgs c;
  c.rows = pass.batch.rows;
  c.topk = config_.index.topk;
  c.from = pass.carried;
  c.positions = pass.batch.positions;
  c.selected = pass.b.selected;
  c.selected_count = pass.b.selected_count;
  backend_.CarrySelection(pass.queue, c);
  pass.has_selection = true;
}

void Model::AttendRows(Pass& pass, const Layer& l) const {
  const ModelConfig& c = config_;
  const ModelBatch& batch = pass.batch;
  ModelBuffers& b = pass.b;
  StepTimer* timer = pass.options.timer;
  {
    ZoneScope zone(timer, Zone::kAttention);
    int32_t failed = -1;
    ops::AttentionArgs a;
    a.seqs = batch.seqs;
    a.heads = c.num_heads;
    a.kv_lora = c.kv_lora_rank;
    a.rope = c.qk_rope;
    a.topk = c.index.topk;
    a.q = b.q_full;
    a.scale = c.attn_scale;
    a.pool = &pass.pool;
    a.layer = l.id;
    a.own = Own(pass, KvComponent::kLatent, l.id);
    a.selected = c.sparse() ? b.selected : nullptr;
    a.selected_count = c.sparse() ? b.selected_count : nullptr;
    a.out = b.latent_out;
    a.dequant_only_topk = pass.options.dequant_only_topk;
    a.dequant_freely = pass.options.dequant_freely;
    a.dequant_verify = pass.options.dequant_verify;
    a.verify_failed_row = &failed;
    if (LayerHooks* hooks = pass.options.hooks; hooks != nullptr && !b.on_device())
      hooks->BeforeAttention(l.id, a.selected, a.selected_count);
    backend_.Attention(pass.queue, a);
    if (failed >= 0 && pass.options.verify_failed_row < 0) {
      pass.options.verify_failed_row = failed;
      pass.options.verify_failed_layer = l.id;
    }
  }
  ZoneScope zone(timer, Zone::kHeadGemm);
  ops::HeadLinearArgs u;
  u.weight = l.unfold.get();
  u.rows = batch.rows;
  u.x = b.latent_out;
  u.x_row = c.num_heads * c.kv_lora_rank;
  u.x_head = c.kv_lora_rank;
  u.y = b.head_out;
  u.y_row = c.num_heads * c.v_head;
  u.y_head = c.v_head;
  backend_.ApplyHeads(pass.queue, u);
}

void Model::RunMlp(Pass& pass, const Layer& l) const {
  const ModelConfig& c = config_;
  ModelBuffers& b = pass.b;
  StepTimer* timer = pass.options.timer;
  const int64_t rows = pass.batch.rows;
  if (l.gate_up != nullptr) {
    ops::LinearArgs a;
    a.rows = rows;
    a.weight = l.gate_up.get();
    a.x = b.h;
    a.y = b.gate_up;
    {
      ZoneScope zone(timer, Zone::kGemm);
      backend_.Apply(pass.queue, a);
    }
    {
      ZoneScope zone(timer, Zone::kActivation);
      ops::SiluMulArgs s;
      s.rows = rows;
      s.dim = l.gate_up->out / 2;
      s.gate_up = b.gate_up;
      s.act = b.mlp_act;
      backend_.SiluMul(pass.queue, s);
    }
    ZoneScope zone(timer, Zone::kGemm);
    a.weight = l.down.get();
    a.x = b.mlp_act;
    a.y = b.x;
    a.mode = ops::OutMode::kF32Add;
    backend_.Apply(pass.queue, a);
  }
  if (!l.moe) return;
  {
    ZoneScope zone(timer, Zone::kGate);
    ops::GateArgs g;
    g.rows = rows;
    g.hidden = c.hidden;
    g.experts = c.moe.num_experts;
    g.topk = c.moe.experts_per_token;
    g.x = b.router_in;
    g.weight = l.router.data();
    g.bias = l.router_bias.empty() ? nullptr : l.router_bias.data();
    g.softmax = c.moe.scoring == ScoringFunc::kSoftmax;
    g.normalize = c.moe.normalize;
    g.groups = c.moe.num_groups;
    g.groups_kept = c.moe.groups_kept;
    g.group_sum_top2 = c.moe.group_score == GroupScore::kSumTop2;
    g.scaling = c.moe.scaling;
    g.expert = b.expert;
    g.expert_weight = b.expert_weight;
    backend_.Gate(pass.queue, g);
  }
  if (pass.options.hooks != nullptr) pass.options.hooks->ReviseExperts(l.id, b.expert, b.expert_weight);
  ZoneScope zone(timer, Zone::kExperts);
  ops::MoeArgs m;
  m.rows = rows;
  m.topk = c.moe.experts_per_token;
  m.gate_up = l.experts_gate_up.get();
  m.down = l.experts_down.get();
  m.x = b.h;
  m.expert = b.expert;
  m.expert_weight = b.expert_weight;
  m.y = b.x;
  if (LayerHooks* hooks = pass.options.hooks; hooks != nullptr && hooks->RunExperts(pass.queue, m)) return;
  backend_.Moe(pass.queue, m);
}

void Model::NormRows(ops::Queue& queue, std::span<const int32_t> rows, const ops::Constant& weight,
                     ModelBuffers& b, float* out_f32) const {
  const int64_t limit = b.limits().max_logits_rows;
  // In groups that fit the gathered buffer; a row's result does not depend on its group.
  for (int64_t at = 0; at < int64_t(rows.size()); at += limit) {
    const int64_t n = std::min<int64_t>(limit, int64_t(rows.size()) - at);
    backend_.GatherRows(queue, b.x, b.PlaceRows(queue, rows.subspan(size_t(at), size_t(n))), n,
                        config_.hidden * 4, b.logits_x);
    ops::RmsNormArgs norm;
    norm.rows = n;
    norm.dim = config_.hidden;
    norm.x = b.logits_x;
    norm.weight = weight.data();
    norm.eps = config_.rms_eps;
    norm.y_act = b.logits_h;
    norm.y_f32 = out_f32 == nullptr ? nullptr : out_f32 + at * config_.hidden;
    backend_.RmsNorm(queue, norm);
  }
}

void Model::Head(ops::Queue& queue, std::span<const int32_t> rows, const ops::Constant& norm, ModelBuffers& b,
                 StepTimer* timer) const {
  SLUICE_CHECK(int64_t(rows.size()) <= b.limits().max_logits_rows, "{} logits rows of {}", rows.size(),
               b.limits().max_logits_rows);
  ZoneScope zone(timer, Zone::kLogits);
  NormRows(queue, rows, norm, b, nullptr);
  ops::LinearArgs a;
  a.weight = head_.get();
  a.rows = int64_t(rows.size());
  a.x = b.logits_h;
  a.y = b.logits;
  backend_.Apply(queue, a);
}

const float* Model::HostLogits(ops::Queue& queue, int64_t rows, ModelBuffers& b, StepTimer* timer) const {
  if (!b.on_device()) return b.logits;
  ZoneScope zone(timer, Zone::kLogits);
  queue.Download(b.host_logits, b.logits, rows * config_.vocab_size * 4);
  return b.host_logits;
}

void Model::Reduce(ops::Queue& queue, LogitsKind kind, std::span<const int32_t> rows, int64_t requests,
                   std::span<const int32_t> whole, ModelBuffers& b, StepTimer* timer) const {
  Head(queue, rows, kind == LogitsKind::kDraft ? draft_->head_norm : final_norm_, b, timer);
  ZoneScope zone(timer, Zone::kLogits);
  ops::ReduceRowsArgs r;
  r.requests = requests;
  r.vocab = config_.vocab_size;
  r.logits = b.logits;
  r.request = b.requests;
  r.out = b.reduced;
  r.candidates = b.candidates;
  backend_.ReduceRows(queue, r);
  for (const int32_t place : whole) FetchLogits(queue, place, b);
}

const float* Model::FetchLogits(ops::Queue& queue, int32_t place, ModelBuffers& b) const {
  const int64_t at = int64_t(place) * config_.vocab_size;
  queue.Download(b.host_logits + at, b.logits + at, config_.vocab_size * 4);
  return b.host_logits + at;
}

const float* Model::Logits(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& b,
                           StepTimer* timer) const {
  Head(queue, rows, final_norm_, b, timer);
  return HostLogits(queue, int64_t(rows.size()), b, timer);
}

void Model::FinalHidden(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& b, float* out) const {
  NormRows(queue, rows, final_norm_, b, out);
}

Status Model::DraftForward(ops::Queue& queue, const ModelBatch& batch, RankHidden hidden,
                           const DevicePool& pool, ModelBuffers& b, ForwardOptions& options) const {
  if (draft_ == nullptr) return Internal("draft forward without a draft layer");
  if (batch.seqs.slot_shift != 1)
    return Internal("draft forward on a batch that was built for the model's own layers");
  if (batch.rows > b.limits().max_rows || batch.max_context > b.limits().max_context) {
    return Internal("draft forward of {} rows and context {} exceeds the planned {} and {}", batch.rows,
                    batch.max_context, b.limits().max_rows, b.limits().max_context);
  }
  if (hidden.rows() != batch.rows || hidden.width() != config_.hidden) {
    return Internal("draft forward of {} rows of {} takes {} states of {}", batch.rows, config_.hidden,
                    hidden.rows(), hidden.width());
  }
  const ModelBatch placed = b.Place(queue, batch);
  options.verify_failed_row = -1;
  const int32_t* carried = options.carried_selection == nullptr
                               ? nullptr
                               : b.PlaceRows(queue, {options.carried_selection, size_t(batch.rows)});
  const int64_t kind = 1 + int64_t(options.kv_only) * 2 + int64_t(carried != nullptr) * 4;
  return Recorded(queue, batch, placed, pool, b, options, kind, [&](const ModelBatch& rows) {
    Pass pass{queue, rows, pool, b, options};
    pass.carried = carried;
    return RunDraft(pass, hidden);
  });
}

Status Model::RunDraft(Pass& pass, RankHidden hidden) const {
  ModelBuffers& b = pass.b;
  Embed(pass);
  // [norm of the embedding | norm of the hidden state], side by side.
  const size_t half = size_t(config_.hidden * SizeOf(backend_.info().act));
  ops::RmsNormArgs n;
  n.rows = pass.batch.rows;
  n.dim = config_.hidden;
  n.eps = config_.rms_eps;
  n.y_ld = 2 * config_.hidden;
  n.x = b.x;
  n.weight = draft_->embedding_norm.data();
  n.y_act = b.draft_in;
  backend_.RmsNorm(pass.queue, n);
  n.x = hidden.data();
  n.weight = draft_->hidden_norm.data();
  n.y_act = static_cast<std::byte*>(b.draft_in) + half;
  backend_.RmsNorm(pass.queue, n);
  ops::LinearArgs a;
  a.weight = draft_->combine.get();
  a.rows = pass.batch.rows;
  a.x = b.draft_in;
  a.y = b.x;
  backend_.Apply(pass.queue, a);
  return RunLayer(pass, *draft_->layer);
}

const float* Model::DraftLogits(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& b,
                                StepTimer* timer) const {
  Head(queue, rows, draft_->head_norm, b, timer);
  return HostLogits(queue, int64_t(rows.size()), b, timer);
}

void Model::DraftHidden(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& b, float* out) const {
  NormRows(queue, rows, draft_->head_norm, b, out);
}

}  // namespace sluice
