#include "exec/rank_group.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "exec/rank_state.h"
#include "sampling/row_math.h"

namespace sluice {

void RankGroup::Hooks::WaitReadable(LogicalLayer layer) {
  if (LayerHooks* hooks = group_.options_in_->hooks) hooks->WaitReadable(layer);
  if (rank_.pages != nullptr) {
    rank_.queue->Synchronize();
    rank_.pages->Ready(layer);
    return;
  }
  // Rows of this layer lie in other ranks' lanes: all are written before one is read.
  if (!group_.split().split()) return;
  rank_.queue->Synchronize();
  rank_.comm->Fence();
}

void RankGroup::Hooks::LayerFinal(LogicalLayer layer) {
  LayerHooks* hooks = group_.options_in_->hooks;
  if (hooks == nullptr) return;
  // One queue's order tells others nothing of another one's.
  if (group_.ranks() > 1 && hooks->Active()) rank_.queue->Synchronize();
  std::atomic<int32_t>& arrived = group_.layer_arrivals_[size_t(layer.value)];
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 != group_.ranks()) return;
  arrived.store(0, std::memory_order_relaxed);
  hooks->LayerFinal(layer);
}

void RankGroup::Hooks::IndexSelected(LogicalLayer layer, const int32_t* selected, const int32_t* count) {
  if (group_.ranks() == 1 && group_.options_in_->hooks != nullptr)
    group_.options_in_->hooks->IndexSelected(layer, selected, count);
}

bool RankGroup::Hooks::RunExperts(ops::Queue& queue, const ops::MoeArgs& args) {
  if (group_.experts_ == nullptr) return false;
  group_.experts_->Run(rank_.id, queue, args, *rank_.comm);
  return true;
}

bool RankGroup::Hooks::Active() const {
  const LayerHooks* hooks = group_.options_in_->hooks;
  return group_.ranks() > 1 || group_.experts_ != nullptr || (hooks != nullptr && hooks->Active());
}

ops::OwnBlocks RankGroup::Hooks::Own(KvComponent component, LogicalLayer layer) {
  return rank_.pages == nullptr ? ops::OwnBlocks() : rank_.pages->Own(component, layer);
}

void RankGroup::Hooks::BeforeAttention(LogicalLayer layer, const int32_t* selected, const int32_t* count) {
  if (rank_.pages != nullptr) rank_.pages->Fetch(layer, selected, count);
}

void RankGroup::DraftHooks::WaitReadable(LogicalLayer layer) {
  rank_.queue->Synchronize();
  rank_.pages->Ready(layer);
}

ops::OwnBlocks RankGroup::DraftHooks::Own(KvComponent component, LogicalLayer layer) {
  return rank_.pages->Own(component, layer);
}

void RankGroup::DraftHooks::BeforeAttention(LogicalLayer layer, const int32_t* selected,
                                            const int32_t* count) {
  rank_.pages->Fetch(layer, selected, count);
}

RankGroup::RankGroup(const Model& model, const DevicePool& pool, const RankGroupOptions& options)
    : model_(model),
      pool_(pool),
      options_(options),
      wait_mode_(WaitModeFor(options.ranks, options.threads_per_rank, options.cores)),
      layer_arrivals_(size_t(model.config().num_layers) + 1) {}

StatusOr<std::unique_ptr<RankGroup>> RankGroup::Make(const Model& model, ops::Backend& backend,
                                                     const DevicePool& pool,
                                                     const RankGroupOptions& options) {
  if (pool.lanes() != options.ranks)
    return Internal("{} ranks over a pool of {} lanes; each rank owns one lane", options.ranks, pool.lanes());
  std::unique_ptr<RankGroup> group(new RankGroup(model, pool, options));
  auto comms = MakeThreadCommunicators(options.ranks, {.wait = group->wait_mode_});
  const ModelConfig& c = model.config();
  if (options.spread_experts && options.ranks > 1 && c.moe.num_experts > 0) {
    ExpertExchangeOptions e;
    e.ranks = options.ranks;
    e.hidden = c.hidden;
    e.topk = c.moe.experts_per_token;
    e.experts = c.moe.num_experts;
    e.act_bytes = SizeOf(backend.info().act);
    ASSIGN_OR_RETURN(group->experts_, ExpertExchange::Make(backend, e));
  }
  // A sequence may bring two segments to a rank.
  const int64_t max_seqs = options.limits.max_seqs * (options.ranks > 1 ? 2 : 1);
  for (int32_t r = 0; r < options.ranks; ++r) {
    auto rank = std::make_unique<RankState>();
    rank->id = Rank(r);
    rank->queue = backend.MakeQueue(options.threads_per_rank, -1);
    RETURN_IF_ERROR(rank->queue->status());
    ASSIGN_OR_RETURN(rank->buffers, ModelBuffers::Make(model.config(), backend, options.limits));
    rank->tables = std::make_unique<BatchTables>(options.limits.max_rows, max_seqs);
    for (auto& ahead : rank->ahead)
      ahead.tables = std::make_unique<BatchTables>(options.limits.max_rows, max_seqs);
    rank->comm = std::move(comms[size_t(r)]);
    rank->hooks = std::make_unique<Hooks>(*group, *rank);
    rank->tokens.reserve(size_t(options.limits.max_rows));
    group->ranks_.push_back(std::move(rank));
  }
  if (options.ranks > 1 && options.kv_exchange == KvExchangeMode::kGather) {
    if (!backend.info().own_blocks)
      return Unsupported(
          "--cp-kv-exchange gather: the {} backend reads and writes pages of the pool only; use direct",
          backend.info().device);
    RETURN_IF_ERROR(group->MakePages());
  }
  if (options.ranks > 1)
    group->logits_.resize(size_t(options.limits.max_logits_rows * model.config().vocab_size));
  RankGroup* g = group.get();
  for (int32_t r = 1; r < options.ranks; ++r) {
    RankState* rank = group->ranks_[size_t(r)].get();
    rank->thread = std::thread([g, rank] {
      std::unique_lock lock(g->mutex_);
      while (true) {
        const auto called = [&] {
          return g->stop_ || g->generation_.load(std::memory_order_acquire) != rank->seen;
        };
        if (!called()) {
          lock.unlock();
          WaitAwake(g->wait_mode_, called);  // Forward and Logits follow one another closely
          lock.lock();
          g->start_.wait(lock, called);
        }
        if (g->stop_) return;
        rank->seen = g->generation_;
        const std::function<void(RankState&)>& work = *g->work_;
        lock.unlock();
        work(*rank);
        lock.lock();
        if (g->running_.fetch_sub(1, std::memory_order_acq_rel) == 1) g->done_.notify_one();
      }
    });
  }
  return group;
}

namespace {
RankPagesOptions PagesOptions(const RankGroupOptions& group) {
  RankPagesOptions o;
  o.ranks = group.ranks;
  o.max_rows = group.limits.max_rows + 2 * group.limits.max_seqs;  // both segments of each may end in a dummy
  o.buffer_bytes = group.gather_buffer_bytes;
  return o;
}
}  // namespace

int64_t RankGroup::GatherBytes(const KvLayout& layout, const RankGroupOptions& options) {
  if (options.ranks == 1 || options.kv_exchange != KvExchangeMode::kGather) return 0;
  return options.ranks * RankPages::Bytes(layout, PagesOptions(options));
}

Status RankGroup::MakePages() {
  RankPagesOptions o = PagesOptions(options_);
  o.topk = model_.config().sparse() ? model_.config().index.topk : 0;
  o.wait = wait_mode_;
  auto comms = MakeThreadCommunicators(ranks(), {.wait = wait_mode_});
  std::vector<RankPages*> all;
  for (auto& rank : ranks_) {
    ASSIGN_OR_RETURN(rank->pages,
                     RankPages::Make(pool_, o, *rank->comm, std::move(comms[size_t(rank->id.value)])));
    rank->draft_hooks = std::make_unique<DraftHooks>(*rank);
    all.push_back(rank->pages.get());
  }
  for (RankPages* pages : all) pages->Meet(all);
  return OkStatus();
}

RankGroup::~RankGroup() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& rank : ranks_)
    if (rank->thread.joinable()) rank->thread.join();
}

ops::Queue& RankGroup::queue() const { return *ranks_[0]->queue; }

int64_t RankGroup::working_bytes() const {
  int64_t bytes = 0;
  for (const auto& rank : ranks_)
    bytes += rank->buffers->bytes() + (rank->pages != nullptr ? rank->pages->bytes() : 0);
  if (experts_ != nullptr) bytes += experts_->bytes();
  return bytes;
}

void RankGroup::RunOnAll(const std::function<void(RankState&)>& work) {
  if (ranks() > 1) {
    std::lock_guard lock(mutex_);
    work_ = &work;
    running_ = ranks() - 1;
    ++generation_;
    start_.notify_all();
  }
  work(*ranks_[0]);
  if (ranks() > 1) {
    const auto done = [&] { return running_.load(std::memory_order_acquire) == 0; };
    if (WaitAwake(wait_mode_, done)) return;
    std::unique_lock lock(mutex_);
    done_.wait(lock, done);
  }
}

void RankGroup::Prepare(const ForwardBatch& batch) {
  const int32_t place = std::exchange(next_place_, (next_place_ + 1) % ModelBuffers::kStages);
  Plan& plan = plans_[size_t(place)];
  plan.batch = &batch;
  plan.status = Split(batch, &plan);
  for (auto& rank : ranks_) {
    if (!plan.status.ok()) break;
    const RankPart& part = plan.split.part(rank->id);
    RankState::Ahead& ahead = rank->ahead[size_t(place)];
    StatusOr<ModelBatch> made = ahead.tables->BuildRows(part.seqs, batch.pages, part.valid_rows());
    plan.status = made.status();
    if (!made.ok()) break;
    ahead.batch = *made;
    rank->buffers->Stage(place, &ahead.batch);
  }
  plan.step.store(batch.step, std::memory_order_release);
}

// prepared: the place where Prepare has put what it made, or -1.
Status RankGroup::ForwardOn(RankState& rank, const ForwardBatch& batch, std::span<const int32_t> tokens,
                            int32_t prepared) {
  const RankPart& part = split().part(rank.id);
  rank.tokens.clear();
  for (const int32_t row : part.batch_row) rank.tokens.push_back(tokens[size_t(row)]);
  ModelBatch model_batch;
  if (prepared >= 0) {
    model_batch = rank.ahead[size_t(prepared)].batch;
    model_batch.tokens = rank.tokens.data();
  } else {
    ASSIGN_OR_RETURN(model_batch,
                     rank.tables->Build(part.seqs, batch.pages, rank.tokens, model_.config().vocab_size));
  }
  if (rank.pages != nullptr) {
    RankPass pass;
    pass.batch = batch.seqs;
    pass.seqs = part.seqs;
    pass.pages = batch.pages;
    pass.places = part.compute_row;
    pass.prefix = part.prefix_of_seq;
    pass.exchange = split().split() ? &exchange_ : nullptr;
    pass.whole = !rank.options.dequant_only_topk || rank.options.dequant_verify;
    pass.loads = options_in_->hooks;
    pass.first = LogicalLayer(0);
    pass.last = LogicalLayer(int32_t(model_.config().num_layers) - 1);
    RETURN_IF_ERROR(rank.pages->Begin(pass, &model_batch));
  }
  if (marks_) rank.queue->Mark(false);
  const Status done = model_.Forward(*rank.queue, model_batch, pool_, *rank.buffers, rank.options);
  if (rank.pages != nullptr) rank.pages->End();
  RETURN_IF_ERROR(done);
  if (!wait_) return OkStatus();
  rank.queue->Synchronize();
  return rank.queue->status();
}

Status RankGroup::Split(const ForwardBatch& batch, Plan* plan) const {
  RETURN_IF_ERROR(plan->split.Plan(batch, ranks(), pool_.pages_per_lane()));
  // Checked for all ranks before one starts: a rank that failed alone would leave the others at a fence.
  for (int32_t r = 0; r < ranks(); ++r) {
    const RankPart& part = plan->split.part(Rank(r));
    if (part.valid_rows() > options_.limits.max_rows ||
        int64_t(part.seqs.size()) > 2 * options_.limits.max_seqs)
      return Internal("rank {}: {} rows and {} segments exceed the planned {} and {}", r, part.valid_rows(),
                      part.seqs.size(), options_.limits.max_rows, 2 * options_.limits.max_seqs);
  }
  if (ranks_[0]->pages != nullptr && plan->split.compute_rows_per_rank() > ranks_[0]->pages->max_rows())
    return Internal("{} compute rows a rank exceed the planned {}", plan->split.compute_rows_per_rank(),
                    ranks_[0]->pages->max_rows());
  for (const BatchSeq& s : batch.seqs)
    if (int64_t(s.start) + s.num_rows > options_.limits.max_context)
      return Internal("slot {}: position {} exceeds the planned context of {}", s.slot.value,
                      s.start + s.num_rows - 1, options_.limits.max_context);
  return OkStatus();
}

Status RankGroup::Forward(const ForwardBatch& batch, std::span<const int32_t> tokens, ForwardOptions& options,
                          bool wait) {
  wait_ = wait || ranks() > 1;
  int32_t prepared = 0;
  while (prepared < ModelBuffers::kStages &&
         (plans_[size_t(prepared)].step.load(std::memory_order_acquire) != batch.step ||
          plans_[size_t(prepared)].batch != &batch))
    ++prepared;
  plan_ = &plans_[size_t(prepared)];
  if (prepared == ModelBuffers::kStages) {
    prepared = -1;
    plan_->status = Split(batch, plan_);
  } else {
    plan_->step.store(-1, std::memory_order_relaxed);
    prepared_.fetch_add(1, std::memory_order_relaxed);
  }
  RETURN_IF_ERROR(plan_->status);
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= model_.config().vocab_size)
      return Internal("row {}: token {} is outside the vocabulary of {}", i, tokens[i],
                      model_.config().vocab_size);
  if (ranks_[0]->pages != nullptr && split().split()) exchange_.Plan(batch, split(), ranks());
  options_in_ = &options;
  for (auto& rank : ranks_) {
    rank->options = options;
    rank->options.hooks = rank->hooks.get();
    rank->options.timer = rank->id.value == 0 ? options.timer : nullptr;
    if (ranks() > 1) rank->options.index_gap = nullptr;
  }
  RunOnAll([&](RankState& rank) { rank.status = ForwardOn(rank, batch, tokens, prepared); });
  if (ranks() > 1) CountBytes(batch);
  options.verify_failed_row = -1;
  for (auto& rank : ranks_) {
    RETURN_IF_ERROR(rank->status);
    if (rank->options.verify_failed_row >= 0 && options.verify_failed_row < 0) {
      options.verify_failed_row = split().part(rank->id).batch_row[size_t(rank->options.verify_failed_row)];
      options.verify_failed_layer = rank->options.verify_failed_layer;
    }
  }
  return OkStatus();
}

const float* RankGroup::Collect(std::span<const int32_t> rows, const std::vector<RankRow>& where,
                                int64_t width, float* out,
                                const std::function<const float*(RankState&)>& own) {
  for (auto& rank : ranks_) {
    rank->logits_rows.clear();
    rank->logits_place.clear();
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const RankRow at = where[size_t(rows[i])];
    ranks_[size_t(at.rank.value)]->logits_rows.push_back(at.row);
    ranks_[size_t(at.rank.value)]->logits_place.push_back(int32_t(i));
  }
  RunOnAll([&](RankState& rank) {
    if (rank.logits_rows.empty()) return;
    const float* result = own(rank);
    for (size_t i = 0; i < rank.logits_place.size(); ++i)
      std::memcpy(out + int64_t(rank.logits_place[i]) * width, result + int64_t(i) * width,
                  size_t(width) * sizeof(float));
  });
  return out;
}

const float* RankGroup::Logits(std::span<const int32_t> batch_rows) {
  if (ranks() == 1) {
    RankState& rank = *ranks_[0];
    rank.logits_rows.clear();
    for (const int32_t row : batch_rows) rank.logits_rows.push_back(split().Where(row).row);
    const float* logits = model_.Logits(*rank.queue, rank.logits_rows, *rank.buffers, rank.options.timer);
    if (marks_) rank.queue->Mark(true);
    rank.queue->Synchronize();
    return logits;
  }
  SLUICE_CHECK(int64_t(batch_rows.size()) <= options_.limits.max_logits_rows, "{} logits rows of {}",
               batch_rows.size(), options_.limits.max_logits_rows);
  return Collect(
      batch_rows, split().where(), model_.config().vocab_size, logits_.data(), [&](RankState& rank) {
        const float* own = model_.Logits(*rank.queue, rank.logits_rows, *rank.buffers, rank.options.timer);
        rank.queue->Synchronize();
        return own;
      });
}

bool RankGroup::on_device() const { return ranks_[0]->buffers->on_device(); }

bool RankGroup::Reduces() const { return ranks() == 1 && on_device(); }

LogitsAnswers RankGroup::Answers(Model::LogitsKind kind, std::span<const RowRequest> requests,
                                 std::span<const int32_t> whole, StepTimer* timer) {
  RankState& rank = *ranks_[0];
  ModelBuffers& b = *rank.buffers;
  SLUICE_CHECK(int64_t(requests.size()) <= b.limits().max_logits_rows, "{} requests about {} logits rows",
               requests.size(), b.limits().max_logits_rows);
  std::copy(requests.begin(), requests.end(), b.requests);
  model_.Reduce(*rank.queue, kind, rank.logits_rows, int64_t(requests.size()), whole, b, timer);
  if (marks_) rank.queue->Mark(true);
  rank.queue->Synchronize();
  fetched_.assign(whole.begin(), whole.end());
  return {b.reduced, b.candidates};
}

LogitsAnswers RankGroup::Reduce(std::span<const int32_t> batch_rows, std::span<const RowRequest> requests,
                                std::span<const int32_t> whole) {
  RankState& rank = *ranks_[0];
  rank.logits_rows.clear();
  for (const int32_t row : batch_rows) rank.logits_rows.push_back(split().Where(row).row);
  return Answers(Model::LogitsKind::kTarget, requests, whole, rank.options.timer);
}

const float* RankGroup::FetchLogits(int32_t place) {
  RankState& rank = *ranks_[0];
  if (std::find(fetched_.begin(), fetched_.end(), place) != fetched_.end())
    return rank.buffers->host_logits + int64_t(place) * model_.config().vocab_size;
  const float* logits = model_.FetchLogits(*rank.queue, place, *rank.buffers);
  rank.queue->Synchronize();
  fetched_.push_back(place);
  return logits;
}

Status RankGroup::Wait() {
  for (auto& rank : ranks_) {
    if (marks_) rank->queue->Mark(true);
    rank->queue->Synchronize();
  }
  return DeviceStatus();
}

Status RankGroup::DeviceStatus() const {
  for (const auto& rank : ranks_) RETURN_IF_ERROR(rank->queue->status());
  return OkStatus();
}

void RankGroup::BeginStep() { ranks_[0]->queue->BeginStep(); }

Status RankGroup::EndStep(int64_t waits) {
  return ranks_[0]->queue->EndStep(ranks() == 1 ? waits : std::numeric_limits<int64_t>::max());
}

void RankGroup::WarmedUp() {
  for (auto& rank : ranks_) rank->queue->WarmedUp();
}

std::string RankGroup::Where() const {
  std::string text;
  for (const auto& rank : ranks_) {
    const std::string where = rank->queue->Where();
    if (!where.empty()) text += fmt::format("{}rank {}: {}", text.empty() ? "" : "; ", rank->id.value, where);
  }
  return text;
}

void RankGroup::CopyPage(PageId from, PageId to) {
  if (pool_.memory() == nullptr || ranks() > 1) return pool_.CopyPage(from, to);
  runs_.clear();
  for (const KvPiece& piece : pool_.layout().pieces())
    runs_.push_back({.src = pool_.Piece(piece, from), .dst = pool_.Piece(piece, to), .bytes = piece.bytes});
  ranks_[0]->queue->CopyRuns(runs_);
}

bool RankGroup::RowFinite(int32_t batch_row) const {
  const RankRow where = split().Where(batch_row);
  const ModelBuffers& buffers = *ranks_[size_t(where.rank.value)]->buffers;
  if (buffers.on_device()) return buffers.host_finite[where.row] != 0;
  return AllFinite(Hidden(batch_row), model_.config().hidden);
}

const float* RankGroup::Hidden(int32_t batch_row) const {
  const RankRow where = split().Where(batch_row);
  return ranks_[size_t(where.rank.value)]->buffers->x + int64_t(where.row) * model_.config().hidden;
}

void RankGroup::CountBytes(const ForwardBatch& batch) {
  const LayerBytes layers =
      BytesOfLayers(pool_.layout(), LogicalLayer(0), LogicalLayer(int32_t(model_.config().num_layers)));
  int64_t moved = 0, in_place = 0, ahead = 0;
  for (auto& rank : ranks_) {
    if (rank->pages == nullptr) {
      const RankBytes bytes = BytesOf(split().part(rank->id).seqs, batch.pages, rank->id, ranks(), layers);
      rank->comm->CountDirect(bytes.got, bytes.put);
    } else {
      in_place += rank->pages->pages_in_place();
      ahead += rank->pages->chunks_ahead();
    }
    moved += rank->BytesMoved();
  }
  bytes_moved_.store(moved, std::memory_order_relaxed);
  pages_in_place_.store(in_place, std::memory_order_relaxed);
  chunks_ahead_.store(ahead, std::memory_order_relaxed);
}

}  // namespace sluice
