#include "exec/drafter.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace sluice {
namespace {

bool Draws(const SampleRow& row) { return row.temperature != 0 && row.top_k != 1; }

}  // namespace

Drafter::Drafter(int64_t hidden, DraftLayer* layer, Sampler* sampler, int32_t num_slots, int32_t max_tokens,
                 int64_t max_rows, int64_t max_logits_rows, bool share_selection)
    : layer_(layer),
      sampler_(sampler),
      max_tokens_(max_tokens),
      depth_(int32_t(kPageTokens) + max_tokens + 2),
      width_(hidden),
      max_rows_(max_rows),
      max_logits_rows_(max_logits_rows),
      share_selection_(share_selection),
      slots_(size_t(num_slots)),
      hidden_(new float[size_t(num_slots) * size_t(depth_) * size_t(width_)]),
      tokens_(size_t(num_slots) * size_t(depth_)),
      drafted_(size_t(num_slots) * size_t(max_tokens)),
      shares_(drafted_.size()) {}

int64_t Drafter::SlotBytes(int64_t hidden, int32_t num_slots, int32_t max_tokens) {
  return int64_t(num_slots) * (kPageTokens + max_tokens + 2) * hidden * int64_t(sizeof(float));
}

void Drafter::InitSlot(const SlotInit& init) {
  Slot& slot = slots_[size_t(init.slot.value)];
  slot = Slot();
  if (init.draft_state.empty()) return;
  SLUICE_CHECK(int64_t(init.draft_state.size()) == width_ && init.draft_slot > 0,
               "slot {}: a state of {} before position {}, {} are due", init.slot.value,
               init.draft_state.size(), init.draft_slot, width_);
  std::memcpy(Hidden(init.slot, 0), init.draft_state.data(), size_t(width_) * sizeof(float));
  *Token(init.slot, 0) = init.draft_token;
  slot.position = slot.first = init.draft_slot;
  slot.count = 1;
}

const ForwardBatch& Drafter::Resolve(const ForwardBatch& batch) {
  resolved_.step = batch.step;
  resolved_.tokens = batch.tokens;
  resolved_.seqs = batch.seqs;
  resolved_.pages = batch.pages;
  resolved_.samples = batch.samples;
  size_t at = 0;  // samples follow the order of the rows
  int32_t rows = 0;
  for (size_t s = 0; s < resolved_.seqs.size(); ++s) {
    const BatchSeq& planned = batch.seqs[s];
    BatchSeq& seq = resolved_.seqs[s];
    Slot& slot = slots_[size_t(seq.slot.value)];
    int32_t shift = 0;
    if (seq.decode && slot.position >= 0) {
      shift = seq.start - slot.position;
      SLUICE_CHECK(shift >= 0, "slot {}: planned at {}, is at {}", seq.slot.value, seq.start, slot.position);
      seq.start = slot.position;
    }
    // A slot whose last step failed has nothing to verify: its sequence has ended.
    seq.verify = std::min(seq.verify, slot.drafted);
    seq.num_rows -= planned.verify - seq.verify;
    seq.row_begin = rows;
    rows += seq.num_rows;
    const int32_t first = planned.num_rows - planned.verify;  // of the drafts
    std::copy_n(batch.tokens.begin() + planned.row_begin, first, resolved_.tokens.begin() + seq.row_begin);
    std::copy_n(Drafted(seq.slot, 0), seq.verify, resolved_.tokens.begin() + seq.row_begin + first);
    seq.num_pages = int32_t(CeilDiv(int64_t(seq.start) + seq.num_rows, kPageTokens));
    ResolveSamples(planned, seq, shift, &at);
  }
  resolved_.tokens.resize(size_t(rows));
  return resolved_;
}

void Drafter::ResolveSamples(const BatchSeq& planned, const BatchSeq& seq, int32_t shift, size_t* at) {
  const int32_t last = seq.row_begin + seq.num_rows - 1;
  for (; *at < resolved_.samples.size(); ++*at) {
    SampleRow& sample = resolved_.samples[*at];
    if (sample.row >= planned.row_begin + planned.num_rows) return;
    sample.position -= shift;
    if (shift > 0) sample.suppress_stop = sample.position < sample.stop_from;
    sample.row += seq.row_begin - planned.row_begin;
    sample.cut = sample.row > last;
    sample.row = std::min(sample.row, last);
    // The last row before cut ones ends the run, whatever it gives: no token is -1.
    if (sample.run_left > 0)
      sample.expected = sample.row < last ? resolved_.tokens[size_t(sample.row + 1)] : -1;
  }
}

Status Drafter::AfterStep(const ForwardBatch& batch, const ForwardBatch& resolved,
                          std::span<const int32_t> tokens, StepResult* result) {
  LearnTrust(resolved, *result);
  KeepStates(resolved, result);
  RETURN_IF_ERROR(FillExtends(resolved, tokens));
  RETURN_IF_ERROR(FillPending(batch));
  return Draft(batch, resolved, &result->work);
}

void Drafter::LearnTrust(const ForwardBatch& resolved, const StepResult& result) {
  size_t at = 0;
  for (const BatchSeq& seq : resolved.seqs) {
    if (seq.verify == 0) continue;
    while (at < resolved.samples.size() && resolved.samples[at].slot != seq.slot) ++at;
    SLUICE_CHECK(at + size_t(seq.verify) < resolved.samples.size(), "slot {}: no samples", seq.slot.value);
    bool stood = true;
    for (int32_t i = 0; i < seq.verify && stood; ++i) {
      const SampleRow& row = resolved.samples[at + size_t(i)];
      const int32_t token = result.samples[at + size_t(i)].token;
      if (token < 0) break;
      stood = token == row.expected;
      trust_.Observe(Draws(row), i, *Share(seq.slot, i), stood);
    }
  }
}

// The state behind every token that was drawn becomes the pending row of the token's slot.
void Drafter::KeepStates(const ForwardBatch& resolved, StepResult* result) {
  rows_.clear();
  const auto drawn = [&](size_t i) { return resolved.samples[i].sample && result->samples[i].token >= 0; };
  for (size_t i = 0; i < resolved.samples.size(); ++i)
    if (drawn(i)) rows_.push_back(resolved.samples[i].row);
  if (rows_.empty()) return;
  states_.resize(std::max(states_.size(), rows_.size() * size_t(width_)));
  layer_->FinalHidden(rows_, states_.data());
  size_t at = 0;
  for (size_t i = 0; i < resolved.samples.size(); ++i) {
    const SampleRow& sample = resolved.samples[i];
    if (!sample.sample) continue;
    Slot& slot = slots_[size_t(sample.slot.value)];
    if (!drawn(i)) {
      if (!result->samples[i].status.ok()) slot = Slot();
      continue;
    }
    if (slot.count == 0) slot.first = sample.position;
    SLUICE_CHECK(slot.first + slot.count == sample.position && slot.count < depth_,
                 "slot {}: pending rows [{}, {}), token at {}", sample.slot.value, slot.first,
                 slot.first + slot.count, sample.position);
    const float* state = &states_[at++ * size_t(width_)];
    if (sample.keep_state) result->samples[i].state.assign(state, state + width_);
    std::memcpy(Hidden(sample.slot, slot.count), state, size_t(width_) * sizeof(float));
    *Token(sample.slot, slot.count) = result->samples[i].token;
    ++slot.count;
    slot.position = sample.position;
  }
}

Status Drafter::FillExtends(const ForwardBatch& resolved, std::span<const int32_t> tokens) {
  bool any = false;
  next_token_.assign(tokens.size(), -1);
  for (const BatchSeq& seq : resolved.seqs) {
    if (seq.decode) continue;
    const int32_t end = seq.row_begin + seq.num_rows;
    for (int32_t r = seq.row_begin; r + 1 < end; ++r) next_token_[size_t(r)] = tokens[size_t(r + 1)];
    next_token_[size_t(end - 1)] = seq.next_token;
    any |= seq.num_rows > 1 || seq.next_token >= 0;
  }
  return any ? layer_->FillDraft(resolved, next_token_) : OkStatus();
}

// All pending rows but the newest, of slots that draft now or whose oldest pending page is full.
Status Drafter::FillPending(const ForwardBatch& batch) {
  seqs_.clear();
  row_tokens_.clear();
  states_.clear();
  for (const BatchSeq& seq : batch.seqs) {
    Slot& slot = slots_[size_t(seq.slot.value)];
    const int32_t rows = slot.count - 1;
    if (rows < 1) continue;
    const bool page_full = slot.first / int32_t(kPageTokens) < slot.position / int32_t(kPageTokens);
    if (seq.draft_next == 0 && !page_full) continue;
    for (int32_t done = 0; done < rows;) {
      if (int64_t(row_tokens_.size()) == max_rows_) RETURN_IF_ERROR(FlushRows(batch.pages));
      BatchSeq d = seq;
      d.decode = true;
      d.known = 0;
      d.start = slot.first + done;
      d.num_rows = int32_t(std::min<int64_t>(rows - done, max_rows_ - int64_t(row_tokens_.size())));
      d.row_begin = int32_t(row_tokens_.size());
      d.num_pages = int32_t(CeilDiv(int64_t(d.start) + d.num_rows, kPageTokens));
      SLUICE_CHECK(d.num_pages <= seq.num_pages, "slot {}: {} pages, {} needed", seq.slot.value,
                   seq.num_pages, d.num_pages);
      seqs_.push_back(d);
      const int32_t* tokens = Token(seq.slot, done);
      const float* states = Hidden(seq.slot, done);
      row_tokens_.insert(row_tokens_.end(), tokens, tokens + d.num_rows);
      states_.insert(states_.end(), states, states + int64_t(d.num_rows) * width_);
      done += d.num_rows;
    }
    std::memcpy(Hidden(seq.slot, 0), Hidden(seq.slot, rows), size_t(width_) * sizeof(float));
    *Token(seq.slot, 0) = *Token(seq.slot, rows);
    slot.first = slot.position;
    slot.count = 1;
  }
  return FlushRows(batch.pages);
}

Status Drafter::FlushRows(std::span<const PageId> pages) {
  if (seqs_.empty()) return OkStatus();
  RETURN_IF_ERROR(
      layer_->DraftRows(seqs_, pages, row_tokens_, StatesOf(row_tokens_.size()), /*kv_only=*/true));
  seqs_.clear();
  row_tokens_.clear();
  states_.clear();
  return OkStatus();
}

// Of drafts that seem not worth it one is tried now and then: what is never tried is never known better.
bool Drafter::TriesAnyway() { return ++tries_ % kTryEvery == 0; }

void Drafter::Weigh(const ForwardBatch& batch, const SampleRow& row, int32_t place, float share) {
  Slot& slot = slots_[size_t(row.slot.value)];
  *Share(row.slot, place) = share;
  if (batch.draft_keep <= 0) return;
  const bool drawn = Draws(row);
  const double keep = double(batch.draft_keep);
  slot.chance *= trust_.Chance(drawn, place, share);
  if (place > 0)
    trust_.ObserveGain(drawn, place - 1, *Share(row.slot, place - 1), std::max(0.0, slot.chance - keep));
  if (slot.chance < keep && !TriesAnyway()) {
    slot.drafted = place;
  } else if (trust_.Gain(drawn, place, share) < double(batch.draft_pass) && place + 1 < slot.drafted &&
             !TriesAnyway()) {
    slot.drafted = place + 1;
  }
}

// Asks about proposals [begin, begin + n) at rows_; false: whole rows are needed.
bool Drafter::AskReduced(size_t begin, size_t n) {
  if (!layer_->Reduces()) return false;
  requests_.clear();
  for (size_t i = 0; i < n; ++i) {
    const SampleRow& p = proposals_[begin + i];
    if (!sampler_->TakesReduced(p)) return false;
    RowRequest& r = requests_.emplace_back(sampler_->RequestFor(p));
    r.place = int32_t(i);
    r.hash = false;
    r.near = true;
  }
  answers_ = layer_->ReduceDraft(rows_, requests_);
  return true;
}

// One row a slot and pass: the first makes the newest token's final row, the others stand on guesses.
Status Drafter::Draft(const ForwardBatch& batch, const ForwardBatch& resolved, StepWork* work) {
  seqs_.clear();
  proposals_.clear();
  row_tokens_.clear();
  states_.clear();
  size_t at = 0;
  int32_t most = 0;
  for (const BatchSeq& seq : batch.seqs) {
    Slot& slot = slots_[size_t(seq.slot.value)];
    slot.drafted = 0;
    if (seq.draft_next == 0) continue;
    while (at < resolved.samples.size() && resolved.samples[at].slot != seq.slot) ++at;
    if (slot.count != 1) continue;
    slot.drafted = seq.draft_next;
    slot.chance = 1;
    SLUICE_CHECK(seq.draft_next <= max_tokens_ && at < resolved.samples.size(), "slot {}: {} drafts of {}",
                 seq.slot.value, seq.draft_next, max_tokens_);
    BatchSeq d = seq;
    d.decode = true;
    d.known = 0;
    d.start = slot.first;
    d.num_rows = 1;
    d.row_begin = int32_t(seqs_.size());
    seqs_.push_back(d);
    row_tokens_.push_back(*Token(seq.slot, 0));
    states_.insert(states_.end(), Hidden(seq.slot, 0), Hidden(seq.slot, 0) + width_);
    SampleRow& p = proposals_.emplace_back(resolved.samples[at]);
    p.position = slot.position;
    p.top_logprobs = -1;
    slot.count = 0;
    most = std::max(most, seq.draft_next);
  }
  rows_.clear();
  carried_.clear();
  for (int32_t pass = 0; pass < most; ++pass) {
    RETURN_IF_ERROR(layer_->DraftRows(seqs_, batch.pages, row_tokens_, StatesOf(row_tokens_.size()),
                                      /*kv_only=*/false, carried_));
    if (pass == 0) {
      work->drafting = int32_t(seqs_.size());
      work->draft_most = most;
    }
    ++work->draft_passes;
    work->draft_rows += int32_t(seqs_.size());
    for (size_t begin = 0; begin < seqs_.size(); begin += size_t(max_logits_rows_)) {
      const size_t n = std::min(seqs_.size() - begin, size_t(max_logits_rows_));
      rows_.resize(n);
      for (size_t i = 0; i < n; ++i) rows_[i] = int32_t(begin + i);
      for (size_t i = 0; i < n; ++i) {
        SampleRow& p = proposals_[begin + i];
        ++p.position;
        p.suppress_stop = p.position < p.stop_from;
      }
      const bool reduced = AskReduced(begin, n);
      const float* logits = reduced ? nullptr : layer_->DraftLogits(rows_);
      for (size_t i = 0; i < n; ++i) {
        const SampleRow& p = proposals_[begin + i];
        float share = 0;
        int32_t token = -1;
        if (!reduced) {
          token = sampler_->Propose(p, logits + int64_t(i) * sampler_->vocab_size(), &share);
        } else if (!sampler_->ProposeReduced(p, answers_.reduced[i],
                                             answers_.candidates + i * size_t(kMostCandidates), &token,
                                             &share)) {
          token = sampler_->Propose(p, layer_->FetchLogits(int32_t(i)), &share);
        }
        row_tokens_[begin + i] = std::max(0, token);
        *Drafted(seqs_[begin + i].slot, pass) = row_tokens_[begin + i];
        Weigh(batch, p, pass, share);
      }
    }
    const auto goes_on = [&](const BatchSeq& s) { return slots_[size_t(s.slot.value)].drafted > pass + 1; };
    if (std::none_of(seqs_.begin(), seqs_.end(), goes_on)) break;
    rows_.resize(seqs_.size());
    for (size_t i = 0; i < rows_.size(); ++i) rows_[i] = int32_t(i);
    layer_->DraftHidden(rows_, states_.data());
    // Slots that want fewer tokens leave; the others move up.
    size_t kept = 0;
    carried_.clear();
    for (size_t i = 0; i < seqs_.size(); ++i) {
      if (!goes_on(seqs_[i])) continue;
      if (share_selection_) carried_.push_back(int32_t(i));
      seqs_[kept] = seqs_[i];
      seqs_[kept].row_begin = int32_t(kept);
      ++seqs_[kept].start;
      proposals_[kept] = proposals_[i];
      row_tokens_[kept] = row_tokens_[i];
      if (kept != i)
        std::memcpy(&states_[kept * size_t(width_)], &states_[i * size_t(width_)],
                    size_t(width_) * sizeof(float));
      ++kept;
    }
    seqs_.resize(kept);
    proposals_.resize(kept);
    row_tokens_.resize(kept);
    states_.resize(kept * size_t(width_));
  }
  return OkStatus();
}

}  // namespace sluice
