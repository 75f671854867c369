#include "exec/model_runner.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/check.h"

namespace sluice {
namespace {

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Adds the life of a scope to a counter.
class Timed {
 public:
  explicit Timed(std::atomic<int64_t>* total) : total_(total), start_(NowNs()) {}
  ~Timed() { total_->fetch_add(NowNs() - start_, std::memory_order_relaxed); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::atomic<int64_t>* const total_;
  const int64_t start_;
};

}  // namespace

ModelRunner::ModelRunner(const Model& model, std::unique_ptr<RankGroup> ranks, const DevicePool& device,
                         const HostPool* host, const ModelRunnerOptions& options)
    : model_(model),
      ranks_(std::move(ranks)),
      options_(options),
      max_logits_rows_(size_t(options.max_logits_rows)),
      copies_(host != nullptr ? std::make_unique<CopyWorker>(device, *host, options.io_backend) : nullptr),
      sampler_(int32_t(model.config().vocab_size), options.num_slots),
      watchdog_(options.step_seconds, [this] { return ranks_->Where(); }),
      observer_(options.observer) {
  if (options.time_device) ranks_->MarkForwards();
  forward_.hooks = this;
  forward_.dequant_only_topk = options.dequant_only_topk;
  forward_.dequant_verify = options.dequant_verify;
  tokens_.resize(size_t(options.max_rows));
  logits_rows_.reserve(max_logits_rows_);
  if (options.draft_tokens > 0) {
    SLUICE_CHECK(model.has_draft(), "speculation without a draft layer");
    drafter_ = MakeDrafter();
  }
}

std::unique_ptr<Drafter> ModelRunner::MakeDrafter() {
  return std::make_unique<Drafter>(model_.config().hidden, ranks_.get(), &sampler_, options_.num_slots,
                                   options_.draft_tokens, options_.rank_rows, options_.max_logits_rows,
                                   model_.config().index.share_for_mtp_iteration);
}

void ModelRunner::EndWarmUp() {
  warming_ = false;
  if (drafter_ != nullptr) drafter_ = MakeDrafter();
  for (std::atomic<int64_t>* t : {&times_.steps, &times_.rows, &times_.forward, &times_.logits,
                                  &times_.sampling, &times_.draft, &times_.total, &times_.device})
    t->store(0, std::memory_order_relaxed);
  ranks_->WarmedUp();
}

ModelRunner::~ModelRunner() = default;

void ModelRunner::Prepare(const ForwardBatch& batch) {
  if (drafter_ == nullptr && batch.rows() > 0) ranks_->Prepare(batch);
}

void ModelRunner::Run(const ForwardBatch& batch, StepResult* result) {
  const Timed timed(&times_.total);
  SLUICE_CHECK(copies_ != nullptr || (batch.loads.empty() && batch.backups.empty()),
               "copies without a host tier");
  if (copies_ != nullptr) copies_->Start(batch.loads, batch.backups);
  step_ = batch.step;
  loading_ = !batch.loads.empty();
  watchdog_.StepBegins(batch.step, batch.rows());
  ranks_->BeginStep();
  waits_ = 0;
  result->status = Compute(batch, result);
  const Status calls = ranks_->EndStep(drafter_ == nullptr ? std::max<int64_t>(waits_, 1)
                                                           : std::numeric_limits<int64_t>::max());
  // What a step that failed early has left in the queue still touches pages that are given back below.
  if (!result->status.ok()) (void)ranks_->Wait();
  if (result->status.ok()) result->status = calls;
  if (const Status device = ranks_->DeviceStatus(); !device.ok())
    watchdog_.Fault(fmt::format("step {} of {} rows: {}", batch.step, batch.rows(), Message(device)));
  if (copies_ != nullptr) {
    copies_->Finish();
    for (const CopyPlan& plan : batch.loads) result->copies_done.push_back(plan.id);
    for (const CopyPlan& plan : batch.backups) result->copies_done.push_back(plan.id);
  }
  watchdog_.StepEnds();
  if (observer_ != nullptr && !warming_) observer_->StepDone(batch.step, result->status);
  times_.steps.fetch_add(1, std::memory_order_relaxed);
  times_.rows.fetch_add(batch.rows(), std::memory_order_relaxed);
}

Status ModelRunner::Compute(const ForwardBatch& planned, StepResult* result) {
  for (const SlotInit& init : planned.slot_inits) {
    sampler_.InitSlot(init);
    if (drafter_ != nullptr) drafter_->InitSlot(init);
  }
  for (const PageCopy& copy : planned.page_copies) ranks_->CopyPage(copy.from, copy.to);
  if (planned.rows() == 0) return planned.page_copies.empty() ? OkStatus() : ranks_->Wait();
  const ForwardBatch& batch = drafter_ != nullptr ? drafter_->Resolve(planned) : planned;
  if (batch.rows() > int32_t(tokens_.size())) {
    return Internal("step of {} rows, planned for {}", batch.rows(), tokens_.size());
  }
  ResolveTokens(batch);
  {
    const Timed timed(&times_.forward);
    // Drafts follow from what the rows' states are, so those are waited for.
    RETURN_IF_ERROR(
        ranks_->Forward(batch, {tokens_.data(), size_t(batch.rows())}, forward_, drafter_ != nullptr));
  }
  RETURN_IF_ERROR(SampleRows(batch, result));
  if (options_.time_device) {
    ++waits_;
    times_.device.fetch_add(int64_t(ranks_->queue().MarkedSeconds() * 1e9), std::memory_order_relaxed);
  }
  const bool decodes =
      std::all_of(batch.seqs.begin(), batch.seqs.end(), [](const BatchSeq& s) { return s.decode; });
  if (decodes && planned.loads.empty() && planned.backups.empty() && planned.page_copies.empty())
    result->work.rows = batch.rows();
  return drafter_ != nullptr ? Draft(planned, batch, result) : OkStatus();
}

Status ModelRunner::Draft(const ForwardBatch& batch, const ForwardBatch& resolved, StepResult* result) {
  const Timed timed(&times_.draft);
  const LogicalLayer layer = model_.config().draft_layer();
  WaitReadable(layer);
  RETURN_IF_ERROR(drafter_->AfterStep(batch, resolved, {tokens_.data(), size_t(batch.rows())}, result));
  LayerFinal(layer);
  return OkStatus();
}

void ModelRunner::ResolveTokens(const ForwardBatch& batch) {
  for (int32_t r = 0; r < batch.rows(); ++r) {
    const int32_t token = batch.tokens[size_t(r)];
    // A slot without a token belongs to a sequence that has just failed; its row is computed for nothing.
    tokens_[size_t(r)] = token >= 0 ? token : std::max(0, sampler_.LastToken(SlotId(-1 - token)));
  }
}

// A NaN or infinity in any row ends that sequence now, before its pages enter the cache.
void ModelRunner::CheckRows(const ForwardBatch& batch, StepResult* result) {
  for (const BatchSeq& seq : batch.seqs) {
    const int32_t failed = forward_.verify_failed_row;
    if (forward_.dequant_verify && failed >= seq.row_begin && failed < seq.row_begin + seq.num_rows) {
      result->failed_slots.push_back(
          {seq.slot,
           Internal(
               "--nsa-dequant-verify: layer {}, position {}: the row dequantised by itself differs from the "
               "full dequantisation",
               forward_.verify_failed_layer.value, seq.start + failed - seq.row_begin)});
      continue;
    }
    bool finite = true;
    for (int32_t r = 0; r < seq.num_rows && finite; ++r) finite = ranks_->RowFinite(seq.row_begin + r);
    if (!finite) {
      result->failed_slots.push_back(
          {seq.slot, Internal("a hidden state of the request holds a NaN or an infinity; the "
                              "request was ended and its cache rows were dropped")});
    }
  }
}

// The first pass through the head is enqueued behind the forward, and its end is the step's only wait.
Status ModelRunner::SampleRows(const ForwardBatch& batch, StepResult* result) {
  const size_t n = batch.samples.size();
  result->samples.resize(n);
  const int64_t vocab = model_.config().vocab_size;
  size_t first = 0;
  do {
    // Neighbouring samples of one row (the choices of a request) share its logits.
    logits_rows_.clear();
    size_t end = first;
    const bool reduces = ranks_->Reduces();
    while (end < n && !(reduces && end - first == max_logits_rows_)) {
      const int32_t row = batch.samples[end].row;
      if (logits_rows_.empty() || logits_rows_.back() != row) {
        if (logits_rows_.size() == max_logits_rows_) break;
        logits_rows_.push_back(row);
      }
      ++end;
    }
    ++waits_;
    if (reduces && n > 0) {
      RETURN_IF_ERROR(SampleReduced(batch, first, end, result));
      first = end;
      continue;
    }
    const float* logits = nullptr;
    {
      const Timed timed(&times_.logits);
      if (n > 0) logits = ranks_->Logits(logits_rows_);
    }
    RETURN_IF_ERROR(n > 0 ? ranks_->DeviceStatus() : ranks_->Wait());
    if (first == 0) CheckRows(batch, result);
    const Timed timed(&times_.sampling);
    size_t at = 0;
    for (size_t i = first; i < end; ++i) {
      if (logits_rows_[at] != batch.samples[i].row) ++at;
      if (verifier_.Wanted(batch.samples[i], &result->samples[i]))
        verifier_.Sample(batch.samples[i], logits + int64_t(at) * vocab, &result->samples[i]);
    }
    first = end;
  } while (first < n);
  return OkStatus();
}

Status ModelRunner::SampleReduced(const ForwardBatch& batch, size_t first, size_t end, StepResult* result) {
  const std::span<const SampleRow> samples(&batch.samples[first], end - first);
  requests_.clear();
  whole_rows_.clear();
  size_t at = 0;
  for (const SampleRow& sample : samples) {
    if (logits_rows_[at] != sample.row) ++at;
    const auto place = int32_t(at);
    if (sampler_.TakesReduced(sample)) {
      requests_.push_back(sampler_.RequestFor(sample));
      requests_.back().place = place;
    } else if (whole_rows_.empty() || whole_rows_.back() != place) {
      whole_rows_.push_back(place);
    }
  }
  LogitsAnswers answers;
  {
    const Timed timed(&times_.logits);
    answers = ranks_->Reduce(logits_rows_, requests_, whole_rows_);
  }
  RETURN_IF_ERROR(ranks_->DeviceStatus());
  if (first == 0) CheckRows(batch, result);
  const Timed timed(&times_.sampling);
  at = 0;
  size_t answer = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const SampleRow& sample = samples[i];
    SampledToken* out = &result->samples[first + i];
    if (logits_rows_[at] != sample.row) ++at;
    const bool reduced = sampler_.TakesReduced(sample);
    const size_t mine = answer;
    answer += reduced ? 1 : 0;
    if (!verifier_.Wanted(sample, out)) continue;
    if (!reduced || !sampler_.SampleReduced(sample, answers.reduced[mine],
                                            answers.candidates + mine * size_t(kMostCandidates), out)) {
      waits_ += reduced ? 1 : 0;  // a list that does not settle the token: the row itself comes after it
      sampler_.Sample(sample, ranks_->FetchLogits(int32_t(at)), out);
    }
    verifier_.Drawn(sample, *out);
  }
  return OkStatus();
}

void ModelRunner::WaitReadable(LogicalLayer layer) {
  if (copies_ != nullptr) copies_->WaitLoaded(layer);
}

void ModelRunner::LayerFinal(LogicalLayer layer) {
  SLUICE_DCHECK(copies_ == nullptr || copies_->Loaded(layer),
                "layer {} was read before its pages had arrived", layer.value);
  if (observer_ == nullptr || warming_) return;
  // Several ranks have waited for their queues before this; one queue goes on.
  if (!ranks_->on_device() || ranks_->ranks() > 1 || layer == model_.config().draft_layer())
    return observer_->LayerFinal(step_, layer);
  observer_->LayerQueued(step_, layer, observer_->EndsGroup(layer) ? ranks_->queue().RecordEvent() : nullptr);
}

}  // namespace sluice
