#include "sim/sim_executor.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/plant.h"
#include "kv/page_copy.h"

namespace sluice::sim {
void LogitsOf(uint64_t chain, std::vector<float>* logits) {
  logits->resize(kVocab);
  SeededStream random(chain);
  for (float& v : *logits) v = float(random.Unit() * 8);
  (*logits)[kEos] -= 1.0f;
}

SimExecutor::SimExecutor(const DevicePool* device, const HostPool* host, int32_t slots, const Clock* clock,
                         Journal* journal, uint64_t seed, const ExecutorFaults& faults, int32_t draft_tokens)
    : device_(device),
      host_(host),
      clock_(clock),
      journal_(journal),
      random_(seed),
      faults_(faults),
      rows_(device),
      sampler_(kVocab, slots),
      draft_layer_(&rows_, journal) {
  if (draft_tokens > 0)
    drafter_ = std::make_unique<Drafter>(kStateFloats, &draft_layer_, &sampler_, slots, draft_tokens,
                                         /*max_rows=*/64, /*max_logits_rows=*/3);
}

uint64_t SimExecutor::RootOf(PageId page) const {
  const auto it = roots_.find(page.value);
  return it == roots_.end() ? 0 : it->second;
}

void SimExecutor::Submit(StepBuffers* step) {
  step->result.step = step->batch.step;
  queue_.push_back({step});
  if (queue_.size() == 1) Start(&queue_.front());
}

void SimExecutor::Start(Queued* q) {
  const Nanos longest = random_.Chance(faults_.slow_step) ? 1'000'000'000 : faults_.step_max;
  q->due = clock_->Now() + faults_.step_min + Nanos(random_.Below(uint64_t(longest - faults_.step_min)));
  q->started = true;
  if (random_.Chance(0.5)) {
    Run(q->step->batch, &q->step->result);
    q->ran = true;
    if (ranks_ != nullptr) ranks_->Run(int64_t(random_.Below(60)));
  }
}

Nanos SimExecutor::NextDue() const {
  return queue_.empty() ? std::numeric_limits<Nanos>::max() : queue_.front().due;
}

StepBuffers* SimExecutor::Poll() {
  if (queue_.empty() || queue_.front().due > clock_->Now()) {
    if (ranks_ != nullptr && ranks_->active() && random_.Chance(0.5)) {
      ranks_->Run(int64_t(random_.Below(20)));
      journal_->Cover("engine_turns_in_mid_forward");
    }
    return nullptr;
  }
  Queued q = queue_.front();
  queue_.pop_front();
  if (!q.ran) Run(q.step->batch, &q.step->result);
  FinishOnRanks();
  // Acknowledgements of backups: the last thing of a result. Without a later step nothing can be put off.
  for (size_t i = late_.size(); i-- > 0;) {
    if (!queue_.empty() && random_.Chance(faults_.late_ack)) {
      journal_->Cover("backups_acknowledged_late");
      continue;
    }
    LateBackup& b = late_[i];
    const bool ok = !random_.Chance(faults_.copy_error);
    if (ok && !b.made) CopyPages(b.plan, *device_, *host_, -1);
    (ok ? q.step->result.copies_done : q.step->result.copies_failed).push_back(b.plan.id);
    late_.erase(late_.begin() + long(i));
  }
  journal_->Trace(clock_->Now(), "step {} done: {}", q.step->batch.step,
                  q.step->result.status.ok() ? "ok" : "failed");
  if (!queue_.empty()) Start(&queue_.front());
  return q.step;
}

PageId SimExecutor::PageOf(const ForwardBatch& batch, const BatchSeq& seq, int64_t position) const {
  const auto index = int32_t(position / kPageTokens);
  SLUICE_CHECK(index < seq.num_pages, "position {} of {} pages", position, seq.num_pages);
  return batch.pages[size_t(seq.page_begin + index)];
}

void SimExecutor::Lose(const ForwardBatch& batch, const BatchSeq& seq) {
  for (int64_t p = seq.start + seq.known; p < seq.start + seq.num_rows; ++p)
    for (int piece = 0; piece < rows_.pieces(); ++piece)
      rows_.Write(piece, PageOf(batch, seq, p), p % kPageTokens, kLostChain, kLostToken, p);
}

void SimExecutor::Run(const ForwardBatch& batch, StepResult* result) {
  journal_->Trace(clock_->Now(),
                  "step {} runs: {} rows of {} sequences, {} loads, {} backups, {} page copies", batch.step,
                  batch.rows(), batch.seqs.size(), batch.loads.size(), batch.backups.size(),
                  batch.page_copies.size());
  for (const CopyPlan* plan : [&] {
         std::vector<const CopyPlan*> all;
         for (const auto& p : batch.loads) all.push_back(&p);
         for (const auto& p : batch.backups) all.push_back(&p);
         return all;
       }()) {
    for (const PagePair& pair : plan->pages)
      if (pair.device.value % device_->lanes() != pair.host.value % host_->lanes())
        journal_->Violation("copy {}: device page {} and host page {} are on different lanes", plan->id,
                            pair.device.value, pair.host.value);
  }
  for (const CopyPlan& plan : batch.backups) {
    const bool now = random_.Chance(0.4);
    if (now) CopyPages(plan, *device_, *host_, -1);
    late_.push_back({plan, now});
  }
  for (const SlotInit& init : batch.slot_inits) {
    sampler_.InitSlot(init);
    if (drafter_ != nullptr) drafter_->InitSlot(init);
  }
  const ForwardBatch& resolved = drafter_ != nullptr ? drafter_->Resolve(batch) : batch;
  for (const PageCopy& copy : batch.page_copies)
    for (const KvPiece& piece : device_->layout().pieces())
      std::memcpy(device_->Piece(piece, copy.to), device_->Piece(piece, copy.from), size_t(piece.bytes));
  bool load_failed = false;
  for (const CopyPlan& plan : batch.loads) {
    if (!random_.Chance(faults_.copy_error)) continue;
    load_failed = true;
    result->copies_failed.push_back(plan.id);
    for (const PagePair& pair : plan.pages)
      for (int64_t r = 0; r < kPageTokens; ++r)
        for (int piece = 0; piece < rows_.pieces(); ++piece)
          rows_.Write(piece, pair.device, r, kLostChain, kLostToken, -1);
    journal_->Cover("loads_failed");
  }
  if (random_.Chance(faults_.step_error)) {
    result->status = Unavailable("the executor failed");
    journal_->Cover("steps_failed");
    for (const CopyPlan& plan : batch.loads) CopyPages(plan, *device_, *host_, -1);
  } else if (!load_failed) {
    return ranks_ != nullptr ? BeginOnRanks(batch, result) : Forward(batch, resolved, result);
  }
  for (const CopyPlan& plan : batch.loads)
    if (std::find(result->copies_failed.begin(), result->copies_failed.end(), plan.id) ==
        result->copies_failed.end()) {
      CopyPages(plan, *device_, *host_, -1);
      result->copies_done.push_back(plan.id);
    }
  for (const BatchSeq& seq : resolved.seqs) Lose(resolved, seq);
  result->samples.resize(batch.samples.size());
  for (size_t i = 0; i < batch.samples.size(); ++i) result->samples[i].slot = batch.samples[i].slot;
}

// Piece by piece (so layer by layer): bring the layer in, check every row that attention reads, write the new
// rows.
void SimExecutor::Forward(const ForwardBatch& planned, const ForwardBatch& batch, StepResult* result) {
  chains_.resize(std::max(chains_.size(), batch.seqs.size()));
  tokens_.resize(chains_.size());
  std::vector<bool> lost(batch.seqs.size());
  for (const CopyPlan& plan : planned.loads) result->copies_done.push_back(plan.id);
  result->samples.resize(batch.samples.size());
  for (size_t i = 0; i < batch.samples.size(); ++i) result->samples[i].slot = batch.samples[i].slot;
  int32_t loaded = -1;
  for (int piece = 0; piece < rows_.pieces(); ++piece) {
    const int32_t layer = rows_.layer(piece).value;
    // The wrong way waits for the first piece of each layer only at the next one.
    if (layer != loaded && !(Planted(Plant::kMissedLayerWait) && layer > 0)) {
      for (const CopyPlan& plan : planned.loads) CopyLayer(plan, LogicalLayer(layer), *device_, *host_, -1);
      loaded = layer;
    }
    for (size_t s = 0; s < batch.seqs.size(); ++s) {
      const BatchSeq& seq = batch.seqs[s];
      std::vector<uint64_t>& chain = chains_[s];
      std::vector<int32_t>& tokens = tokens_[s];
      const int64_t end = seq.start + seq.num_rows;
      if (piece == 0) {
        chain.resize(size_t(end));
        tokens.resize(size_t(end));
      }
      for (int64_t p = 0; p < end && !lost[s]; ++p) {
        const PageId page = PageOf(batch, seq, p);
        const bool draft_piece = drafter_ != nullptr && draft_layer_.IsDraftPiece(piece);
        // The draft layer's rows are the drafter's; those of full pages must be there for whoever shares
        // them.
        if (draft_piece && (p == 0 || p >= seq.start / kPageTokens * kPageTokens)) continue;
        if (p >= seq.start + seq.known) {
          if (piece == 0) {
            const int32_t token = batch.tokens[size_t(seq.row_begin + p - seq.start)];
            tokens[size_t(p)] = token >= 0 ? token : sampler_.LastToken(SlotId(-1 - token));
            if (tokens[size_t(p)] < 0) {
              lost[s] = true;  // the step that should have sampled it failed
              break;
            }
            chain[size_t(p)] = NextInChain(p == 0 ? RootOf(page) : chain[size_t(p - 1)], tokens[size_t(p)]);
          }
          rows_.Write(piece, page, p % kPageTokens, chain[size_t(p)], tokens[size_t(p)], p);
          continue;
        }
        uint64_t c;
        int32_t t;
        const bool whole = rows_.Read(piece, page, p % kPageTokens, p, &c, &t);
        if (t == kLostToken && c == kLostChain) {
          lost[s] = true;
          break;
        }
        if (piece == 0) {
          chain[size_t(p)] = c;
          tokens[size_t(p)] = t;
        }
        const uint64_t before = p == 0 ? RootOf(page) : chain[size_t(p - 1)];
        if (!whole || c != NextInChain(before, t) || c != chain[size_t(p)]) {
          journal_->Violation("step {}: slot {} reads row {} of piece {} on page {}: {}", batch.step,
                              seq.slot.value, p, piece, page.value,
                              whole ? "another sequence's or another layer's" : "not written, or torn");
          return;
        }
      }
    }
    journal_->Cover("rows_read", batch.seqs.empty() ? 0 : batch.seqs[0].start);
  }
  if (Planted(Plant::kMissedLayerWait))
    for (const CopyPlan& plan : planned.loads) CopyPages(plan, *device_, *host_, -1);
  Finish(planned, batch, lost, result);
}

// Rows that turn out bad, and the samples.
void SimExecutor::Finish(const ForwardBatch& planned, const ForwardBatch& batch, std::vector<bool>& lost,
                         StepResult* result) {
  for (size_t s = 0; s < batch.seqs.size(); ++s) {
    const bool bad = random_.Chance(faults_.bad_row);
    if (!bad && !lost[s]) continue;
    Lose(batch, batch.seqs[s]);
    lost[s] = true;
    if (bad) {
      result->failed_slots.emplace_back();
      result->failed_slots.back().slot = batch.seqs[s].slot;
      result->failed_slots.back().status = Internal("a computed row holds a NaN");
    }
    journal_->Cover("sequences_failed", bad);
  }
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const SampleRow& sample = batch.samples[i];
    size_t s = 0;
    while (sample.row < batch.seqs[s].row_begin ||
           sample.row >= batch.seqs[s].row_begin + batch.seqs[s].num_rows)
      ++s;
    if (sample.cut) journal_->Cover("drafts_cut");
    if (lost[s]) continue;  // its result is dropped, whatever it is
    if (!verifier_.Wanted(sample, &result->samples[i])) continue;
    LogitsOf(chains_[s][size_t(batch.seqs[s].start + sample.row - batch.seqs[s].row_begin)], &logits_);
    verifier_.Sample(sample, logits_.data(), &result->samples[i]);
  }
  if (drafter_ == nullptr) return;
  row_chains_.assign(size_t(batch.rows()), kLostChain);
  row_tokens_.assign(size_t(batch.rows()), 0);
  for (size_t s = 0; s < batch.seqs.size(); ++s) {
    const BatchSeq& seq = batch.seqs[s];
    for (int32_t r = 0; r < seq.num_rows && !lost[s]; ++r) {
      row_chains_[size_t(seq.row_begin + r)] = chains_[s][size_t(seq.start + r)];
      row_tokens_[size_t(seq.row_begin + r)] = tokens_[s][size_t(seq.start + r)];
    }
  }
  draft_layer_.SetChains(row_chains_);
  const Status status = drafter_->AfterStep(planned, batch, row_tokens_, result);
  SLUICE_CHECK(status.ok(), "{}", Message(status));
}

void SimExecutor::UseRanks(uint64_t seed, double rank_error) {
  ranks_ = std::make_unique<RankedForward>(device_, &rows_, journal_, seed);
  rank_error_ = rank_error;
}

// Starts the forward on the ranks; it goes on at any time before the step is due.
void SimExecutor::BeginOnRanks(const ForwardBatch& batch, StepResult* result) {
  for (const CopyPlan& plan : batch.loads) result->copies_done.push_back(plan.id);
  result->samples.resize(batch.samples.size());
  for (size_t i = 0; i < batch.samples.size(); ++i) result->samples[i].slot = batch.samples[i].slot;
  chains_.resize(std::max(chains_.size(), batch.seqs.size()));
  tokens_.resize(chains_.size());
  lost_.assign(batch.seqs.size(), false);
  loaded_ = -1;
  const auto need_layer = [this, &batch](LogicalLayer layer) {
    for (; loaded_ < layer.value; ++loaded_)
      for (const CopyPlan& plan : batch.loads)
        CopyLayer(plan, LogicalLayer(loaded_ + 1), *device_, *host_, -1);
  };
  need_layer(rows_.layer(0));
  // What each position holds: cached rows say it themselves, the others follow from their tokens.
  std::vector<RankedForward::Sequence> sequences;
  for (size_t s = 0; s < batch.seqs.size(); ++s) {
    const BatchSeq& seq = batch.seqs[s];
    std::vector<uint64_t>& chain = chains_[s];
    std::vector<int32_t>& tokens = tokens_[s];
    chain.resize(size_t(seq.start + seq.num_rows));
    tokens.resize(chain.size());
    for (int64_t p = 0; p < int64_t(chain.size()) && !lost_[s]; ++p) {
      const PageId page = PageOf(batch, seq, p);
      const uint64_t before = p == 0 ? RootOf(page) : chain[size_t(p - 1)];
      int32_t& t = tokens[size_t(p)];
      if (p >= seq.start) {
        t = batch.tokens[size_t(seq.row_begin + p - seq.start)];
        if (t < 0) t = sampler_.LastToken(SlotId(-1 - t));
        lost_[s] = t < 0;
        chain[size_t(p)] = NextInChain(before, t);
        continue;
      }
      const bool whole = rows_.Read(0, page, p % kPageTokens, p, &chain[size_t(p)], &t);
      if (t == kLostToken && chain[size_t(p)] == kLostChain) {
        lost_[s] = true;
      } else if (!whole || chain[size_t(p)] != NextInChain(before, t)) {
        return journal_->Violation("step {}: slot {} has row {} on page {}: {}", batch.step, seq.slot.value,
                                   p, page.value, whole ? "another sequence's" : "not written, or torn");
      }
    }
    sequences.push_back({&chain, &tokens, lost_[s]});
  }
  ranks_->Begin(batch, std::move(sequences), need_layer);
  rank_result_ = result;
  rank_batch_ = &batch;
}

void SimExecutor::FinishOnRanks() {
  if (rank_batch_ == nullptr) return;
  const ForwardBatch& batch = *rank_batch_;
  StepResult* result = rank_result_;
  rank_batch_ = nullptr;
  const bool fails = random_.Chance(rank_error_);
  ranks_->Run(fails ? int64_t(random_.Below(30)) : -1);
  for (const CopyPlan& plan : batch.loads) CopyPages(plan, *device_, *host_, -1);
  if (!fails) return Finish(batch, batch, lost_, result);
  ranks_->Abandon();
  result->status = Unavailable("a rank failed in mid-forward");
  journal_->Cover("ranks_failed");
  for (const BatchSeq& seq : batch.seqs) Lose(batch, seq);
}

}  // namespace sluice::sim
