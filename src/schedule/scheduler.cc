#include "schedule/scheduler.h"

#include <algorithm>
#include <functional>

#include "base/check.h"

namespace sluice {

Scheduler::Scheduler(const SchedulerOptions& options, KvCache* cache)
    : options_(options),
      cache_(cache),
      token_limit_(std::min(options.context_length, cache->total_pages() * kPageTokens)),
      reserve_ratio_(std::min(1.0, 0.7 * options.conservativeness)),
      draft_control_(options.draft_tokens, options.adaptive_drafts, options.draft_cost) {
  SLUICE_CHECK(options.max_running > 0 && options.context_length > 0, "max_running {} context {}",
               options.max_running, options.context_length);
  for (int32_t i = 0; i < num_slots(); ++i) GiveSlot(SlotId(i));
}

Scheduler::~Scheduler() = default;

int64_t MaxStepRows(const SchedulerOptions& options) {
  const int64_t prefill = options.chunk_tokens > 0
                              ? std::min(options.chunk_tokens, options.context_length)
                              : std::max(options.context_length, options.max_prefill_tokens);
  // With speculation every decode may verify, and every admission computes one row again for its state.
  return prefill + options.max_running * (options.draft_tokens > 0 ? options.draft_tokens + 2 : 1);
}

Status Scheduler::Check(const Request& request) const {
  const int64_t prompt = int64_t(request.prompt.size());
  if (prompt == 0) return Invalid("prompt: it has no tokens; send at least one");
  if (request.sampling.n < 1)
    return Invalid("n: {} is below 1; ask for at least one choice", request.sampling.n);
  if (request.remote.active && options_.remote == RemoteRole::kNone)
    return Invalid(
        "bootstrap_room: this server prefills and decodes by itself; leave the field out or start it with "
        "--disaggregation-mode prefill or decode");
  const int64_t needed = prompt + (request.sampling.max_tokens > 0 ? 1 : 0);
  if (needed > options_.context_length) {
    return Invalid("prompt: {} tokens leave no room in the context of {} tokens; shorten it", prompt,
                   options_.context_length);
  }
  if (needed > token_limit_) {
    return Invalid(
        "prompt: {} tokens do not fit the cache of {} tokens; shorten it or raise --max-total-tokens", prompt,
        token_limit_);
  }
  return OkStatus();
}

bool Scheduler::Before(const Sequence& a, const Sequence& b) const {
  if (options_.use_priority && a.group->request.priority != b.group->request.priority) {
    return a.group->request.priority > b.group->request.priority;
  }
  if (a.group->arrival != b.group->arrival) return a.group->arrival < b.group->arrival;
  return a.choice < b.choice;
}

void Scheduler::Insert(std::vector<Sequence*>* list, Sequence* s) {
  const auto at = std::upper_bound(list->begin(), list->end(), s,
                                   [this](const Sequence* a, const Sequence* b) { return Before(*a, *b); });
  list->insert(at, s);
  if (list == &waiting_ && !s->group->admitted_once) ++waiting_new_;
}

void Scheduler::Remove(std::vector<Sequence*>* list, Sequence* s) {
  const auto at = std::find(list->begin(), list->end(), s);
  SLUICE_CHECK(at != list->end(), "sequence {}:{}", s->group->arrival, s->choice);
  list->erase(at);
  if (list == &waiting_ && !s->group->admitted_once) --waiting_new_;
}

Sequence* Scheduler::NewSequence(RequestGroup* group, int32_t choice) {
  auto owned = std::make_unique<Sequence>();
  Sequence* s = owned.get();
  s->group = group;
  s->choice = choice;
  s->tokens.reserve(group->request.prompt.size() + size_t(std::min(group->max_new, 4096)));
  s->tokens = group->request.prompt;
  group->sequences.push_back(s);
  sequences_.emplace(s, std::move(owned));
  return s;
}

void Scheduler::Enqueue(Request request, Nanos now) {
  const Status ok = Check(request);
  SLUICE_CHECK(ok.ok(), "{}", Message(ok));
  auto owned = std::make_unique<RequestGroup>();
  RequestGroup* group = owned.get();
  group->request = std::move(request);
  const SamplingParams& sampling = group->request.sampling;
  group->name_space = group->verification() ? *group->request.verify_name_space
                                            : NamespaceKey(group->request.cache_salt, group->request.adapter);
  group->arrival = next_arrival_++;
  group->unfinished = sampling.n;
  group->max_new =
      int32_t(std::clamp<int64_t>(token_limit_ - group->prompt_len(), 0, std::max(0, sampling.max_tokens)));
  group->stop_ids = sampling.stop_token_ids;
  if (!sampling.ignore_eos) {
    group->stop_ids.insert(group->stop_ids.end(), options_.eos_token_ids.begin(),
                           options_.eos_token_ids.end());
  }
  std::sort(group->stop_ids.begin(), group->stop_ids.end());
  group->stop_ids.erase(std::unique(group->stop_ids.begin(), group->stop_ids.end()), group->stop_ids.end());
  groups_.emplace(group->arrival, std::move(owned));
  by_rid_.emplace(group->request.rid, group);
  const bool remote = group->request.remote.active;
  group->answer_max = group->max_new;
  if (remote && options_.remote == RemoteRole::kPrefill) group->max_new = std::min(group->max_new, 1);
  if (remote && !rooms_.emplace(group->request.remote.room, group).second) {
    group->request.remote.active = false;
    group->spawned = 0;
    return EndGroup(group, FinishReason::kError,
                    absl::AlreadyExistsError(fmt::format("bootstrap_room: {} is in use; rooms are unique",
                                                         group->request.remote.room)));
  }
  if (group->max_new == 0 && group->scored()) {  // nothing to compute
    group->spawned = 0;
    EndGroup(group, FinishReason::kLength, OkStatus());
    return;
  }
  const Nanos deadline = group->request.deadline;
  if (deadline > 0 && (next_deadline_ == 0 || deadline < next_deadline_)) next_deadline_ = deadline;
  Sequence* s = NewSequence(group, 0);
  s->wait_room = remote && options_.remote == RemoteRole::kPrefill;
  Insert(&waiting_, s);
  if (options_.label_kv) s->kv.label = group->request.rid;
  if (group->scored() && !group->verification()) cache_->Prefetch(&s->kv, group->name_space, s->tokens, now);
  blocked_ = blocked_ && waiting_.front()->group != group;
}

bool Scheduler::Abort(std::string_view rid, const Status& reason) {
  std::vector<RequestGroup*> found;
  const auto [begin, end] = by_rid_.equal_range(std::string(rid));
  for (auto it = begin; it != end; ++it) found.push_back(it->second);
  for (RequestGroup* group : found) EndGroup(group, FinishReason::kAbort, reason);
  return !found.empty();
}

int64_t Scheduler::AbortAll(const Status& reason) {
  std::vector<int64_t> arrivals;
  for (const auto& [arrival, group] : groups_) {
    if (group->unfinished > 0) arrivals.push_back(arrival);
  }
  std::sort(arrivals.begin(), arrivals.end());
  for (const int64_t arrival : arrivals) EndGroup(groups_.at(arrival).get(), FinishReason::kAbort, reason);
  return int64_t(arrivals.size());
}

bool Scheduler::Finish(std::string_view rid, int32_t choice) {
  const auto [begin, end] = by_rid_.equal_range(std::string(rid));
  for (auto it = begin; it != end; ++it) {
    for (Sequence* s : it->second->sequences) {
      if (s->choice != choice || s->ended()) continue;
      OutputEvent event;
      event.finish = FinishReason::kStop;
      End(s, std::move(event));
      return true;
    }
  }
  return false;
}

void Scheduler::FillFirst(RequestGroup* group, OutputEvent* event) const {
  if (group->wants_prompt_logprobs()) event->prompt_logprobs = group->prompt_logprobs;
}

void Scheduler::SendFinal(RequestGroup* group, int32_t choice, Sequence* s, OutputEvent event) {
  SLUICE_CHECK(group->unfinished > 0 && event.finish != FinishReason::kNone, "choice {}", choice);
  event.choice = choice;
  event.cached = group->cached;
  if (s == nullptr || !s->first_event_sent) FillFirst(group, &event);
  if (s != nullptr) {
    s->first_event_sent = true;
    event.logits_hash = s->logits_hash;
    event.spec_steps = s->spec_runs;
    event.spec_proposed = s->spec_proposed;
    event.spec_accepted = s->spec_accepted;
    event.spec_first_accepted = s->spec_first_accepted;
  }
  group->worst = std::max(group->worst, event.finish);
  if (group->request.output != nullptr) group->request.output->Push(std::move(event));
  if (--group->unfinished > 0) return;
  if (group->verification()) {
    // Nobody asked for it.
  } else if (group->worst == FinishReason::kError) {
    ++counters_.failed;
  } else if (group->worst == FinishReason::kAbort) {
    ++counters_.aborted;
  } else {
    ++counters_.finished;
  }
  const auto [begin, end] = by_rid_.equal_range(group->request.rid);
  for (auto it = begin; it != end; ++it) {
    if (it->second == group) {
      by_rid_.erase(it);
      break;
    }
  }
}

void Scheduler::End(Sequence* s, OutputEvent event) {
  SLUICE_CHECK(!s->ended(), "sequence {}:{} ends twice", s->group->arrival, s->choice);
  switch (s->state) {
    case SeqState::kWaiting:
      Remove(&waiting_, s);
      leaving_.push_back(s);
      break;
    case SeqState::kReceiving:
      s->failed = true;  // rows of another instance that may never come
      [[fallthrough]];
    case SeqState::kRunning:
    case SeqState::kForking:
      Remove(&running_, s);
      leaving_.push_back(s);
      break;
    case SeqState::kRetracting:
    case SeqState::kLeaving:
      break;  // in leaving_ already
  }
  s->state = SeqState::kLeaving;
  SendFinal(s->group, s->choice, s, std::move(event));
  if (s->in_flight == 0) LetGo(s);
}

void Scheduler::EndGroup(RequestGroup* group, FinishReason reason, const Status& status) {
  const std::vector<Sequence*> live = group->sequences;
  while (group->spawned < group->choices()) {
    OutputEvent event;
    event.finish = reason;
    event.error = status;
    SendFinal(group, group->spawned++, nullptr, std::move(event));
  }
  if (live.empty()) return DropGroupIfDone(group);
  for (Sequence* s : live) {  // the last one that lets go takes the group with it
    if (s->ended()) continue;
    OutputEvent event;
    event.finish = reason;
    event.error = status;
    // A sequence that dies of an error may hold rows of a failed step.
    if (reason == FinishReason::kError) s->failed = true;
    End(s, std::move(event));
  }
}

void Scheduler::LetGo(Sequence* s) {
  SLUICE_CHECK(s->in_flight == 0, "in flight {}", s->in_flight);
  if (s->kv.active) {
    if (!s->failed) TellCache(s);
    cache_->Release(&s->kv, s->tokens, !s->failed);
    blocked_ = false;
  } else if (s->kv.prefetch > 0) {
    cache_->Release(&s->kv, s->tokens, false);  // ends its storage prefetch
  }
  s->kv = SequenceKv();
  if (s->slot.valid()) GiveSlot(s->slot);
  s->slot = SlotId();
  Remove(&leaving_, s);
  if (s->state == SeqState::kRetracting) {
    s->state = SeqState::kWaiting;
    s->planned = s->computed = s->committed = s->pending = s->drafts = 0;
    s->untold.clear();
    s->sampled_in_slot = s->state_missing = s->init_slot = false;
    s->first_state.clear();
    s->wait_storage = false;
    s->failed = false;
    Insert(&waiting_, s);
    return;
  }
  RequestGroup* group = s->group;
  std::erase(group->sequences, s);
  sequences_.erase(s);
  DropGroupIfDone(group);
}

void Scheduler::DropGroupIfDone(RequestGroup* group) {
  if (group->unfinished > 0 || !group->sequences.empty()) return;
  if (group->request.remote.active) rooms_.erase(group->request.remote.room);
  groups_.erase(group->arrival);
}

SlotId Scheduler::TakeSlot() {
  std::pop_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
  const SlotId slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void Scheduler::GiveSlot(SlotId slot) {
  free_slots_.push_back(slot);
  std::push_heap(free_slots_.begin(), free_slots_.end(), std::greater<>());
}

void Scheduler::Unref(Sequence* s) {
  SLUICE_CHECK(s->in_flight > 0, "sequence {}:{}", s->group->arrival, s->choice);
  --s->in_flight;
}

std::vector<std::string> Scheduler::Audit() const {
  std::vector<std::string> wrong;
  std::unordered_map<const Sequence*, int32_t> references;
  for (const Step& step : steps_) {
    for (const Part& part : step.parts) ++references[part.seq];
    for (const Sequence* s : step.pins) ++references[s];
  }
  for (const ForkCopy& copy : fork_copies_) {
    ++references[copy.from];
    ++references[copy.to];
  }
  for (const auto& [s, owned] : sequences_) references[s] += s->held ? 1 : 0;
  std::vector<int32_t> slot_users(size_t(num_slots()), 0);
  for (const SlotId slot : free_slots_) ++slot_users[size_t(slot.value)];
  int64_t fresh = 0;
  for (const auto& [s, owned] : sequences_) {
    const std::string name = fmt::format("sequence {}:{}", s->group->arrival, s->choice);
    if (s->slot.valid()) ++slot_users[size_t(s->slot.value)];
    if (s->in_flight != references[s]) {
      wrong.push_back(fmt::format("{}: in_flight {}, references {}", name, s->in_flight, references[s]));
    }
    const auto in = [s](const std::vector<Sequence*>& list) {
      return std::count(list.begin(), list.end(), s);
    };
    const bool waits = s->state == SeqState::kWaiting;
    const bool runs =
        s->state == SeqState::kRunning || s->state == SeqState::kForking || s->state == SeqState::kReceiving;
    if (in(waiting_) != int(waits) || in(running_) != int(runs) || in(leaving_) != int(!waits && !runs)) {
      wrong.push_back(fmt::format("{}: state {} and lists disagree", name, int(s->state)));
    }
    if (waits && (s->slot.valid() || s->in_flight > 0)) wrong.push_back(name + ": waits and holds a slot");
    if (waits && !s->group->admitted_once) ++fresh;
    if (s->computed > s->planned || s->planned > s->length()) {
      wrong.push_back(
          fmt::format("{}: computed {} planned {} length {}", name, s->computed, s->planned, s->length()));
    }
  }
  if (fresh != waiting_new_) wrong.push_back(fmt::format("waiting_new {}, counted {}", waiting_new_, fresh));
  for (size_t i = 0; i < slot_users.size(); ++i) {
    if (slot_users[i] != 1) wrong.push_back(fmt::format("slot {} has {} users", i, slot_users[i]));
  }
  for (const auto& [arrival, group] : groups_) {
    if (group->unfinished == 0 && group->sequences.empty())
      wrong.push_back(fmt::format("group {} is done", arrival));
    if (group->unfinished > 0 && group->sequences.empty())
      wrong.push_back(fmt::format("group {} is lost", arrival));
  }
  return wrong;
}

}  // namespace sluice
