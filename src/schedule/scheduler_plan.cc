#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/plant.h"
#include "schedule/scheduler.h"

namespace sluice {
namespace {

constexpr int64_t kFutureTokensMax =
    4096;  // output tokens of a sequence that admission keeps room for, at most
constexpr double kReserveDecayPerStep = 1.0 / 600;
constexpr double kReserveFloorShare = 0.14;  // of the starting ratio
constexpr int64_t kBlockedRetrySteps = 16;   // the reserve shrinks with time: look again now and then
constexpr size_t kPrefetchAhead = 16;        // waiting sequences whose prefetch is asked for again
constexpr size_t kPrefixOrderMax = 128;      // waiting sequences that longest-prefix order looks at
constexpr size_t kAdmissionScanMax =
    32;  // sequences that admission may pass over while they wait for storage

}  // namespace

bool Scheduler::Plan(Nanos now, ForwardBatch* batch) {
  batch->Clear();
  ExpireDeadlines(now);
  Step step;
  if (!spare_steps_.empty()) {
    step = std::move(spare_steps_.back());
    spare_steps_.pop_back();
  }
  step.parts.clear();
  step.pins.clear();
  step.loads.clear();
  const bool cut = options_.chunk_tokens > 0;
  int64_t budget =
      cut ? std::min(options_.chunk_tokens, options_.max_prefill_tokens) : options_.max_prefill_tokens;
  PlanDecodes(batch, &step);
  PlanJumps(batch, &step, &budget);
  PlanPrefills(batch, &step, &budget);
  Admit(now, batch, &step, &budget);
  for (const ForkCopy& copy : fork_copies_) {
    batch->page_copies.push_back(copy.copy);
    step.pins.push_back(copy.from);
    step.pins.push_back(copy.to);
  }
  fork_copies_.clear();
  cache_->TakeCopies(&batch->loads, &batch->backups);
  if (batch->empty()) {
    spare_steps_.push_back(std::move(step));
    return false;
  }
  step.id = batch->step = next_step_++;
  for (const CopyPlan& load : batch->loads) step.loads.push_back(load.id);
  cache_->StepSubmitted(step.id);
  TellChunks(step);
  steps_.push_back(std::move(step));
  ++counters_.steps;
  const double start = std::min(1.0, 0.7 * options_.conservativeness);
  reserve_ratio_ = std::max(start * kReserveFloorShare, reserve_ratio_ - start * kReserveDecayPerStep);
  return true;
}

void Scheduler::ExpireDeadlines(Nanos now) {
  if (next_deadline_ == 0 || now < next_deadline_) return;
  next_deadline_ = 0;
  std::vector<int64_t> expired;
  for (const auto& [arrival, group] : groups_) {
    const Nanos deadline = group->request.deadline;
    if (deadline == 0 || group->unfinished == 0) continue;
    if (deadline <= now) {
      expired.push_back(arrival);
    } else if (next_deadline_ == 0 || deadline < next_deadline_) {
      next_deadline_ = deadline;
    }
  }
  std::sort(expired.begin(), expired.end());
  for (const int64_t arrival : expired) {
    EndGroup(groups_.at(arrival).get(), FinishReason::kAbort,
             DeadlineExceeded("the request's deadline passed before it was finished"));
  }
}

SampleRow Scheduler::MakeSampleRow(const Sequence& s, int32_t row, int32_t position) const {
  const SamplingParams& p = s.group->request.sampling;
  SampleRow r;
  r.slot = s.slot;
  r.row = row;
  r.position = position;
  r.temperature = p.temperature;
  r.top_p = p.top_p;
  r.min_p = p.min_p;
  r.top_k = p.top_k;
  r.presence_penalty = p.presence_penalty;
  r.frequency_penalty = p.frequency_penalty;
  r.repetition_penalty = p.repetition_penalty;
  r.seed = p.seed;
  r.choice = s.choice;
  r.top_logprobs = p.top_logprobs;
  r.stop_from = s.group->prompt_len() + p.min_tokens;
  r.suppress_stop = position < r.stop_from;
  r.hash_logits = p.hash_logits;
  // What is asked of the logits of a forced token needs a step that has them; drafts are verified one by one.
  r.jump =
      options_.jump_ahead && p.constraint != nullptr && p.top_logprobs < 0 && !p.hash_logits && !speculates();
  return r;
}

void Scheduler::InitSlot(Sequence* s, ForwardBatch* batch) {
  const SamplingParams& p = s->group->request.sampling;
  SlotInit& init = batch->slot_inits.emplace_back();
  init.slot = s->slot;
  init.logit_bias = p.logit_bias;
  if (p.min_tokens > 0) init.stop_token_ids = s->group->stop_ids;
  init.track_tokens = p.presence_penalty != 0 || p.frequency_penalty != 0 || p.repetition_penalty != 1;
  init.constraint = p.constraint;
  init.tokens_left = s->group->answer_max - s->produced();
  if (!s->first_state.empty()) {
    init.draft_state = std::exchange(s->first_state, {});
    init.draft_slot = s->group->prompt_len();
    init.draft_token = s->tokens[size_t(init.draft_slot)];
  }
  if (!init.track_tokens && init.constraint == nullptr) return;
  if (p.repetition_penalty != 1) init.prompt_tokens = s->group->request.prompt;
  init.output_tokens.assign(s->tokens.begin() + s->group->prompt_len(), s->tokens.end());
}

int32_t Scheduler::DraftNext(const Sequence& s, int32_t verify) const {
  if (!speculates()) return 0;
  // The run may give verify + 1 tokens and the last one is sampled, not drafted.
  const int32_t left = s.group->max_new - (s.length() - s.group->prompt_len());
  return std::clamp(left - verify - 2, 0, draft_control_.drafts());
}

void Scheduler::AppendRows(Sequence* s, int32_t rows, int32_t verify, int32_t draft_next, ForwardBatch* batch,
                           Step* step) {
  const int32_t known = int32_t(s->tokens.size());
  const int32_t start = s->planned;
  // The draft row of the first slot after a hit needs the state before it: the last row of the hit is
  // computed again, for its state alone.
  const int32_t again = std::exchange(s->state_missing, false) ? 1 : 0;
  BatchSeq seq;
  seq.slot = s->slot;
  seq.row_begin = batch->rows();
  seq.num_rows = rows + again;
  seq.start = start - again;
  seq.known = again;
  seq.verify = verify;
  seq.page_begin = int32_t(batch->pages.size());
  seq.cached = int32_t(s->kv.cached);
  seq.decode = s->decoding();
  SLUICE_CHECK(rows > 0 && rows - verify <= s->rows_left(), "rows {} of {}", rows, s->rows_left());
  const int32_t end = start + rows;
  const int32_t end_known = std::min(end, known);
  batch->tokens.insert(batch->tokens.end(), s->tokens.begin() + std::min(seq.start, known),
                       s->tokens.begin() + end_known);
  if (end > known) {
    SLUICE_CHECK(end - verify == s->length() && s->sampled_in_slot, "end {} length {}", end, s->length());
    for (int32_t r = std::max(known, start); r < end; ++r) batch->tokens.push_back(TokenFromSlot(s->slot));
  }
  if (speculates() && end < known) seq.next_token = s->tokens[size_t(end)];
  seq.draft_next = draft_next;
  seq.num_pages = int32_t(CeilDiv(end + draft_next + (seq.next_token >= 0 ? 1 : 0), kPageTokens));
  SLUICE_CHECK(size_t(seq.num_pages) <= s->kv.pages.size(), "pages {} of {}", seq.num_pages,
               s->kv.pages.size());
  // Not insert(): it copies these ids one by one, and long contexts make this list the most of a step's work.
  batch->pages.resize(size_t(seq.page_begin) + size_t(seq.num_pages));
  std::memcpy(batch->pages.data() + seq.page_begin, s->kv.pages.data(),
              size_t(seq.num_pages) * sizeof(PageId));
  if (Planted(Plant::kGlobalPageInverse)) {
    const auto first = std::find(batch->pages.begin(), batch->pages.end(), s->kv.pages[0]);
    seq.page_begin = int32_t(first - batch->pages.begin());
  }
  batch->seqs.push_back(seq);
  (seq.decode ? counters_.decode_rows : counters_.prefill_rows) += rows;

  Part part{s, s->planned, rows};
  RequestGroup* group = s->group;
  if (s->choice == 0 && !group->scored()) {
    const int32_t from = group->request.sampling.prompt_logprobs_from;
    part.score_begin = int32_t(batch->samples.size());
    for (int32_t p = std::max(s->planned, from - 1); p < end && p + 1 < group->prompt_len(); ++p) {
      SampleRow row = MakeSampleRow(*s, seq.row_begin + p - seq.start, p + 1);
      row.sample = false;
      row.hash_logits = false;
      row.logprob_of = s->tokens[size_t(p + 1)];
      batch->samples.push_back(row);
    }
    part.score_count = int32_t(batch->samples.size()) - part.score_begin;
  }
  s->planned = end;
  ++s->in_flight;
  const bool last = end - verify == s->length();
  if (!last || group->max_new == 0) {
    step->parts.push_back(part);
    return;
  }
  part.sample = int32_t(batch->samples.size());
  part.samples = verify + 1;
  SampleRow row;
  for (int32_t left = verify; left >= 0; --left) {
    row = MakeSampleRow(*s, seq.row_begin + seq.num_rows - 1 - left, end - left);
    row.run_left = left;
    row.keep_state = speculates() && s->held;  // another instance goes on from here
    batch->samples.push_back(row);
  }
  s->pending += verify + 1;
  s->drafts = draft_next;
  s->sampled_in_slot = true;
  const size_t at = step->parts.size();
  step->parts.push_back(part);
  if (end == group->prompt_len() && group->spawned < group->choices()) {
    AppendForks(s, row, batch, step);
    step->parts[at].forks = int32_t(step->parts.size() - at - 1);
  }
}

// The other choices of a request sample their first token from the same row. Those that get no slot now wait
// like any sequence and find the prompt in the cache.
void Scheduler::AppendForks(Sequence* s, const SampleRow& row, ForwardBatch* batch, Step* step) {
  RequestGroup* group = s->group;
  while (group->spawned < group->choices()) {
    Sequence* fork = NewSequence(group, group->spawned++);
    if (running() >= options_.max_running || free_slots_.empty()) {
      Insert(&waiting_, fork);
      continue;
    }
    fork->slot = TakeSlot();
    fork->state = SeqState::kForking;
    fork->pending = 1;
    fork->in_flight = 1;
    fork->planned = 0;
    fork->sampled_in_slot = true;
    fork->drafts = 0;
    Insert(&running_, fork);
    InitSlot(fork, batch);
    SampleRow sample = row;
    sample.slot = fork->slot;
    sample.choice = fork->choice;
    Part part{fork};
    part.sample = int32_t(batch->samples.size());
    part.samples = 1;
    batch->samples.push_back(sample);
    step->parts.push_back(part);
  }
}

// False: no page now. Room may be on its way, or the newest sequence was asked to leave (perhaps this one).
bool Scheduler::GrowForDecode(Sequence* s) {
  while (!cache_->Grow(&s->kv, s->planned + 1)) {
    if (!leaving_.empty() || cache_->RoomComing()) return false;  // pages come back with the steps in flight
    Sequence* victim = nullptr;
    for (auto it = running_.rbegin(); it != running_.rend() && victim == nullptr; ++it) {
      if ((*it)->state == SeqState::kRunning) victim = *it;
    }
    SLUICE_CHECK(victim != nullptr, "nobody runs");
    if (victim == s && running_.size() == 1) return false;  // alone: pages are held by copies that will end
    Retract(victim);
    if (victim == s) return false;
  }
  return true;
}

void Scheduler::Retract(Sequence* s) {
  if (s->held) {  // what it sent cannot be taken back
    return EndGroup(
        s->group, FinishReason::kError,
        Exhausted("the prefill instance ran out of KV pages, or lost some; send the request again"));
  }
  ++counters_.retractions;
  reserve_ratio_ = std::min(1.0, std::max(reserve_ratio_ * 1.5, 0.7 * options_.conservativeness));
  Remove(&running_, s);
  s->state = SeqState::kRetracting;
  leaving_.push_back(s);
  if (s->in_flight == 0) LetGo(s);
}

void Scheduler::PlanDecodes(ForwardBatch* batch, Step* step) {
  if (speculates()) {
    draft_control_.BeginStep(running());
    batch->draft_keep = float(draft_control_.keep());
    batch->draft_pass = float(draft_control_.another_pass());
  }
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* s = running_[i];
    if (i + 4 < running_.size()) PrefetchSequence(running_[i + 4]);
    if (i + 2 < running_.size()) PrefetchLists(*running_[i + 2]);
    if (s->state != SeqState::kRunning || !s->decoding()) continue;
    if (s->length() - s->group->prompt_len() >= s->group->max_new)
      continue;  // its last token is being sampled
    if (int64_t(s->kv.pages.size()) * kPageTokens <= s->planned && !GrowForDecode(s)) {
      if (s->state != SeqState::kRunning) --i;  // it took itself off the list
      continue;
    }
    if (std::exchange(s->init_slot, false)) InitSlot(s, batch);
    int32_t verify = 0, next = 0;
    if (speculates()) {
      const int32_t left = s->group->max_new - (s->length() - s->group->prompt_len());
      verify = std::min(s->drafts, left - 1);
      next = DraftNext(*s, verify);
      // Pages for guesses are taken where there are some, and never cost another sequence its own.
      if (verify + next > 0 && !cache_->Grow(&s->kv, s->planned + 1 + verify + next)) {
        next = 0;
        const int64_t room = int64_t(s->kv.pages.size()) * kPageTokens - s->planned - 1;
        verify = int32_t(std::min<int64_t>(verify, room));
      }
    }
    AppendRows(s, 1 + verify, verify, next, batch, step);
  }
}

// Rows of forced tokens: as many as there is room for, and at least one, like any decode.
void Scheduler::PlanJumps(ForwardBatch* batch, Step* step, int64_t* budget) {
  if (counters_.forced_tokens == 0) return;  // no answer was ever bound: nothing to look for
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* s = running_[i];
    if (s->state != SeqState::kRunning || !s->sampled_in_slot || s->rows_left() <= 1) continue;
    if (int64_t(s->kv.pages.size()) * kPageTokens <= s->planned && !GrowForDecode(s)) {
      if (s->state != SeqState::kRunning) --i;
      continue;
    }
    int64_t rows = std::min<int64_t>(s->rows_left(), 1 + std::max<int64_t>(0, *budget));
    if (!cache_->Grow(&s->kv, s->planned + rows))
      rows = std::min(rows, int64_t(s->kv.pages.size()) * kPageTokens - s->planned);
    if (std::exchange(s->init_slot, false)) InitSlot(s, batch);
    if (!s->untold.empty()) {
      SlotInit& told = batch->slot_inits.emplace_back();
      told.slot = s->slot;
      told.more = true;
      told.output_tokens.swap(s->untold);
    }
    *budget -= rows - 1;
    AppendRows(s, int32_t(rows), 0, 0, batch, step);
  }
}

int64_t Scheduler::RowsThisStep(const Sequence& s, int64_t budget, bool first) const {
  const int64_t left = s.rows_left();
  if (options_.chunk_tokens > 0) return std::min(left, budget);
  return left <= budget || first ? left : 0;
}

void Scheduler::AppendPrefill(Sequence* s, int32_t rows, ForwardBatch* batch, Step* step) {
  int32_t next = 0;
  if (rows == s->rows_left()) {  // it samples: drafting may begin
    next = DraftNext(*s, 0);
    if (next > 0 && !cache_->Grow(&s->kv, s->length() + next)) next = 0;
  }
  AppendRows(s, rows, 0, next, batch, step);
}

void Scheduler::PlanPrefills(ForwardBatch* batch, Step* step, int64_t* budget) {
  // Uncut, one prompt may be longer than the budget, if nothing was taken from it.
  bool first = options_.chunk_tokens > 0 || *budget == options_.max_prefill_tokens;
  for (size_t i = 0; i < running_.size() && *budget > 0; ++i) {
    Sequence* s = running_[i];
    if (s->state != SeqState::kRunning || s->rows_left() == 0 || s->decoding() || s->sampled_in_slot)
      continue;
    const int64_t rows = RowsThisStep(*s, *budget, first);
    if (rows == 0) continue;
    AppendPrefill(s, int32_t(rows), batch, step);
    *budget -= rows;
    first = false;
  }
}

int64_t Scheduler::FutureTokens(const Sequence& s) const {
  const int64_t left = s.group->max_new - (s.length() - s.group->prompt_len());
  const int64_t expected =
      int64_t(std::ceil(double(std::clamp<int64_t>(left, 0, kFutureTokensMax)) * reserve_ratio_));
  return AwaitsPages(s) ? std::max(expected, std::min(left, options_.reserved_decode_tokens)) : expected;
}

// Pages that the sequence lacks for what it has and `future_tokens` more.
int64_t Scheduler::PagesFor(const Sequence& s, int64_t future_tokens) const {
  const int64_t tokens = std::min<int64_t>(s.length() + future_tokens, token_limit_);
  return std::max<int64_t>(0, CeilDiv(tokens, kPageTokens) - int64_t(s.kv.pages.size()));
}

void Scheduler::OrderByPrefix() {
  const size_t n = std::min(waiting_.size(), kPrefixOrderMax);
  prefix_order_.clear();
  for (size_t i = 0; i < n; ++i) {
    Sequence* s = waiting_[i];
    prefix_order_.push_back({cache_->Peek(s->group->name_space, s->tokens).total(), s});
  }
  std::stable_sort(prefix_order_.begin(), prefix_order_.end(), [this](const auto& a, const auto& b) {
    if (options_.use_priority && a.second->group->request.priority != b.second->group->request.priority) {
      return a.second->group->request.priority > b.second->group->request.priority;
    }
    return a.first > b.first;
  });
}

Scheduler::Admission Scheduler::TryAdmit(Sequence* s, Nanos now) {
  RequestGroup* group = s->group;
  const bool remote = AwaitsPages(*s);
  const int64_t length = s->length(), future = FutureTokens(*s);
  // The last token is never a hit: with one more the whole prompt may be.
  struct OneMoreToken {
    std::vector<int32_t>* tokens;
    ~OneMoreToken() {
      if (tokens != nullptr) tokens->pop_back();
    }
  } one_more{remote ? &s->tokens : nullptr};
  if (remote) s->tokens.push_back(0);
  std::span<const int32_t> hit_span(s->tokens);
  // Rows whose logits score a prompt token must be computed: the hit ends before them.
  if (!remote && s->choice == 0 && !group->scored()) {
    group->prompt_logprobs.clear();
    if (group->request.sampling.prompt_logprobs_from == 0)
      group->prompt_logprobs.push_back({s->tokens[0], 0.0f, {}});
    hit_span = hit_span.first(size_t(std::max(1, group->request.sampling.prompt_logprobs_from)));
  }
  int64_t reserve = 0;
  for (const Sequence* other : running_) {
    if (other->state == SeqState::kForking) {
      reserve += 1 + CeilDiv(FutureTokens(*other), kPageTokens);
    } else {
      reserve += PagesFor(*other, FutureTokens(*other));
    }
  }
  const int64_t forks = group->choices() - group->spawned;
  const int64_t own = CeilDiv(std::min<int64_t>(length + future, token_limit_), kPageTokens) +
                      forks * (1 + CeilDiv(future, kPageTokens));
  const bool alone = running_.empty() && leaving_.empty();
  // The hit is not known to be free of charge before it is locked; this is the least that must be there.
  if (!alone) {
    const int64_t hit = cache_->Peek(group->name_space, hit_span).device / kPageTokens;
    if (own - hit + reserve > cache_->AvailablePages()) return Admission::kBlocked;
  }
  s->kv.fresh = group->verification();
  if (options_.label_kv) s->kv.label = group->request.rid;
  switch (cache_->Begin(&s->kv, group->name_space, hit_span, now)) {
    case BeginResult::kReady:
      break;
    case BeginResult::kWaitStorage:
      s->wait_storage = true;
      return Admission::kTryNext;
    case BeginResult::kNoRoom:
      return Admission::kBlocked;
  }
  s->wait_storage = false;
  const bool room = alone || own - int64_t(s->kv.pages.size()) + reserve <= cache_->AvailablePages();
  if (!room || !cache_->Grow(&s->kv, length)) {
    cache_->Release(&s->kv, s->tokens, true);
    const int64_t prefetch = s->kv.prefetch;  // what storage had is in the host tier now: not asked for again
    s->kv = SequenceKv();
    s->kv.prefetch = prefetch;
    return Admission::kBlocked;
  }
  return Admission::kAdmitted;
}

// The queue's head moves on, and with it what is fetched from storage for the next ones.
void Scheduler::PrefetchAhead(Nanos now) {
  for (size_t i = 0; i < std::min(waiting_.size(), kPrefetchAhead); ++i) {
    Sequence* s = waiting_[i];
    if (!s->kv.prefetch_put_off) continue;
    cache_->Prefetch(&s->kv, s->group->name_space, s->tokens, now);
    if (s->kv.prefetch_put_off) return;
  }
}

void Scheduler::Admit(Nanos now, ForwardBatch* batch, Step* step, int64_t* budget) {
  PrefetchAhead(now);
  const auto may_admit = [&] {
    return *budget > 0 && running() < options_.max_running && !free_slots_.empty() && !waiting_.empty();
  };
  if (!may_admit()) return;
  if (blocked_ && !running_.empty() && cache_->AvailablePages() <= blocked_available_ &&
      next_step_ < blocked_step_ + kBlockedRetrySteps && !storage_progress_) {
    return;
  }
  blocked_ = false;
  bool first = step->parts.empty() || batch->rows() == int32_t(batch->seqs.size());
  const bool by_prefix = options_.policy == SchedulePolicy::kLongestPrefix && waiting_.size() > 1;
  if (by_prefix) OrderByPrefix();
  size_t at = 0, passed = 0;
  // Every waiter asks again, also one that this pass does not reach.
  if (std::exchange(storage_progress_, false))
    for (Sequence* s : waiting_) s->wait_storage = false;
  while (may_admit() && passed < kAdmissionScanMax) {
    Sequence* s = nullptr;
    if (by_prefix) {
      if (at >= prefix_order_.size()) break;
      s = prefix_order_[at++].second;
    } else {
      if (at >= waiting_.size()) break;
      s = waiting_[at];
    }
    if (s->wait_room) {
      if (!by_prefix) ++at;
      continue;
    }
    if (s->wait_storage) {
      ++passed;
      if (!by_prefix) ++at;
      continue;
    }
    if (options_.chunk_tokens <= 0 && !first && s->length() > *budget) break;  // waits for a step of its own
    const Admission admission = TryAdmit(s, now);
    if (admission == Admission::kTryNext) {
      ++passed;
      if (!by_prefix) ++at;
      continue;
    }
    if (admission == Admission::kBlocked) {
      blocked_ = true;
      blocked_available_ = cache_->AvailablePages();
      blocked_step_ = next_step_;
      break;
    }
    Remove(&waiting_, s);
    RequestGroup* group = s->group;
    if (!group->admitted_once) {
      group->admitted_once = true;
      group->cached = s->kv.hit;
      if (!group->verification()) {
        counters_.prompt_tokens += group->prompt_len();
        counters_.cached_tokens += s->kv.hit.total();
      }
    }
    s->state = SeqState::kRunning;
    s->planned = s->computed = s->committed = int32_t(s->kv.computed);
    s->state_missing = speculates() && s->planned > 0;
    s->drafts = 0;
    s->slot = TakeSlot();
    Insert(&running_, s);
    if (AwaitsPages(*s)) {
      Receive(s);
      continue;
    }
    if (group->request.remote.active && options_.remote == RemoteRole::kPrefill && s->choice == 0) Hold(s);
    InitSlot(s, batch);
    const int64_t rows = RowsThisStep(*s, *budget, true);
    AppendPrefill(s, int32_t(rows), batch, step);
    *budget -= rows;
    first = false;
  }
}

}  // namespace sluice
