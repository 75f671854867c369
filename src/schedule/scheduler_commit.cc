#include <algorithm>
#include <utility>

#include "base/check.h"
#include "schedule/scheduler.h"

namespace sluice {

void Scheduler::Commit(const StepResult& result) {
  SLUICE_CHECK(!steps_.empty() && steps_.front().id == result.step, "step {} is not the oldest in flight",
               result.step);
  Step step = std::move(steps_.front());
  steps_.pop_front();
  cache_->StepRetired(result.step);
  cache_->OnCopiesDone(result.copies_done, result.copies_failed);
  if (!result.copies_done.empty()) blocked_ = false;
  const bool load_failed = std::any_of(step.loads.begin(), step.loads.end(), [&](int64_t id) {
    return std::find(result.copies_failed.begin(), result.copies_failed.end(), id) !=
           result.copies_failed.end();
  });
  draft_control_.ObserveWork(result.work);
  if (result.status.ok() && !load_failed) {
    for (size_t i = 0; i < step.parts.size(); ++i) {
      const Part& part = step.parts[i];
      if (i + 4 < step.parts.size()) PrefetchSequence(step.parts[i + 4].seq);
      if (i + 2 < step.parts.size()) PrefetchLists(*step.parts[i + 2].seq);
      ++part.seq->in_flight;  // its pages stay until its forks have looked at them
      CommitPart(part, result);
      for (int32_t f = 0; f < part.forks; ++f) CommitFork(part.seq, step.parts[++i], result);
      Settle(part.seq);
    }
  } else if (result.status.ok()) {
    LoadFailed(step);
  } else {
    StepFailed(step, result.status);
  }
  if (load_failed) RetractLost();
  for (Sequence* s : step.pins) Settle(s);
  spare_steps_.push_back(std::move(step));
}

// One reference less; at the last one a sequence that is on its way out gives everything back (and may be
// gone after).
void Scheduler::Settle(Sequence* s) {
  Unref(s);
  if (s->in_flight == 0 && (s->ended() || s->state == SeqState::kRetracting)) LetGo(s);
}

// The step's tokens are no longer being sampled, and of its drafted rows none counts.
bool Scheduler::Withdraw(const Part& part) {
  if (part.sample >= 0 && part.seq->echoes > 0) {
    --part.seq->echoes;
    return true;
  }
  part.seq->pending -= part.samples;
  if (part.samples > 1) part.seq->planned -= part.samples - 1;
  return false;
}

void Scheduler::StepFailed(const Step& step, const Status& status) {
  for (const Part& part : step.parts) {
    Withdraw(part);
    part.seq->failed = true;
    if (!part.seq->ended()) EndGroup(part.seq->group, FinishReason::kError, status);
  }
  for (const Part& part : step.parts) Settle(part.seq);
}

void Scheduler::LoadFailed(const Step& step) {
  for (const Part& part : step.parts) {
    Sequence* s = part.seq;
    Withdraw(part);
    s->failed = true;
    if (s->state == SeqState::kRunning || s->state == SeqState::kForking) Retract(s);
  }
  for (const Part& part : step.parts) Settle(part.seq);
}

void Scheduler::RetractLost() {
  for (size_t i = 0; i < running_.size();) {
    Sequence* s = running_[i];
    if (!cache_->Lost(s->kv)) {
      ++i;
      continue;
    }
    s->failed = true;
    Retract(s);  // off the list, perhaps with others of its group
    i = 0;
  }
  for (Sequence* s : leaving_) s->failed |= cache_->Lost(s->kv);
}

void Scheduler::TellCache(Sequence* s) {
  if (s->held) return;  // a page that the tree has already would be swapped under the reader of ours
  if (s->computed / kPageTokens == s->committed / kPageTokens) return;  // no page has become full
  cache_->Commit(&s->kv, s->tokens, s->computed, s->group->request.priority);
  s->committed = s->computed;
}

void Scheduler::KeepScores(const Part& part, const StepResult& result) {
  RequestGroup* group = part.seq->group;
  for (int32_t i = 0; i < part.score_count; ++i) {
    const SampledToken& score = result.samples[size_t(part.score_begin + i)];
    const size_t position =
        size_t(group->request.sampling.prompt_logprobs_from) + group->prompt_logprobs.size();
    TokenOut& out = group->prompt_logprobs.emplace_back();
    out.token = part.seq->tokens[position];
    out.logprob = score.logprob;
    for (const TopLogprob& t : score.top) out.top.push_back({t.token, t.logprob});
  }
}

void Scheduler::CommitPart(const Part& part, const StepResult& result) {
  Sequence* s = part.seq;
  const bool echo = Withdraw(part);
  Status failed;
  for (const FailedSlot& f : result.failed_slots) {
    if (f.slot == s->slot) failed = f.status;
  }
  for (int32_t i = 0; i < part.score_count && failed.ok(); ++i) {
    failed = result.samples[size_t(part.score_begin + i)].status;
  }
  if (part.sample >= 0 && failed.ok()) failed = result.samples[size_t(part.sample)].status;
  if (s->state == SeqState::kRetracting && s->failed) {
    counters_.dropped_tokens += part.sample >= 0 ? 1 : 0;  // computed on rows that never arrived
  } else if (s->ended()) {
    counters_.dropped_tokens += part.sample >= 0 ? 1 : 0;
    s->failed |= !failed.ok();
    // A row that was computed from the token that ended the sequence is as final as any other.
    // (Where it lies is not known here when drafts may have been rejected.)
    if (!speculates())
      s->computed = std::max(s->computed, std::min(part.start + part.rows, int32_t(s->tokens.size())));
  } else if (!failed.ok()) {
    s->failed = true;
    if (s->group->spawned < s->group->choices() || part.forks > 0) {
      EndGroup(s->group, FinishReason::kError, failed);  // all choices stand on the rows that failed
    } else {
      OutputEvent event;
      event.finish = FinishReason::kError;
      event.error = failed;
      End(s, std::move(event));
    }
  } else if (part.samples > 1 || part.start != s->computed) {
    KeepRun(s, part, result);
  } else {
    SLUICE_CHECK(part.start == s->computed, "rows from {} computed {}", part.start, s->computed);
    s->computed = part.start + part.rows;
    KeepScores(part, result);
    TellCache(s);
    if (echo) {
      const int32_t token = result.samples[size_t(part.sample)].token;
      SLUICE_CHECK(token == s->tokens[size_t(part.start + part.rows)],
                   "token {} was forced at {}, sampled {}", s->tokens[size_t(part.start + part.rows)],
                   part.start + part.rows, token);
    } else if (part.sample >= 0) {
      const SampledToken& sampled = result.samples[size_t(part.sample)];
      if (!sampled.state.empty() && s->held)
        remote_->FirstState(s->group->request.remote.room, sampled.state);
      KeepToken(s, sampled);
      Jump(s, sampled);
    } else if (s->group->max_new == 0 && s->computed == s->group->prompt_len()) {
      EndGroup(s->group, FinishReason::kLength, OkStatus());
    }
  }
  Settle(s);
}

void Scheduler::CommitFork(Sequence* parent, const Part& part, const StepResult& result) {
  Sequence* fork = part.seq;
  fork->pending = 0;
  if (fork->ended() || fork->state == SeqState::kRetracting) {
    ++counters_.dropped_tokens;
    return Settle(fork);
  }
  if (parent->failed) {
    // The parent's rows never arrived: a load of an earlier step failed after this one was planned. Its
    // sample means nothing; the fork computes the prompt itself.
    ++counters_.dropped_tokens;
    fork->failed = true;
    Retract(fork);
    return Settle(fork);
  }
  const SampledToken& sampled = result.samples[size_t(part.sample)];
  if (sampled.status.ok()) {
    KeepToken(fork, sampled);
  } else {
    OutputEvent event;
    event.finish = FinishReason::kError;
    event.error = sampled.status;
    End(fork, std::move(event));
  }
  if (fork->ended()) return Settle(fork);
  if (AttachPages(parent, fork)) {
    fork->state = SeqState::kRunning;
  } else {
    // No room for its own pages: it computes the prompt again when there is, like a retracted sequence.
    Remove(&running_, fork);
    fork->state = SeqState::kRetracting;
    leaving_.push_back(fork);
  }
  Settle(fork);
}

// Full pages of the prompt are the tree's; the rest (the partial tail, or all without a tree) is copied from
// the parent.
bool Scheduler::AttachPages(Sequence* parent, Sequence* fork) {
  const int32_t prompt = fork->group->prompt_len();
  if (!parent->kv.active) return false;
  if (options_.label_kv) fork->kv.label = fork->group->request.rid;
  if (cache_->Begin(&fork->kv, fork->group->name_space, fork->group->request.prompt, 0) !=
      BeginResult::kReady)
    return false;
  const size_t pages = size_t(CeilDiv(prompt, kPageTokens));
  while (fork->kv.pages.size() < pages) {
    const PageId page = cache_->TakePage(&fork->kv);
    if (!page.valid()) {
      std::erase_if(fork_copies_, [&](const ForkCopy& c) {
        if (c.to != fork) return false;
        Unref(c.from);
        Unref(c.to);
        return true;
      });
      return false;
    }
    const PageId source = parent->kv.pages[fork->kv.pages.size()];
    fork->kv.pages.push_back(page);
    fork_copies_.push_back({parent, fork, PageCopy{source, page}});
    ++parent->in_flight;
    ++fork->in_flight;
  }
  fork->planned = fork->computed = prompt;
  fork->committed = int32_t(fork->kv.computed);
  return true;
}

// Rows [computed, computed + drawn) are final: one for the token before the run, one for each draft that
// stood.
void Scheduler::KeepRun(Sequence* s, const Part& part, const StepResult& result) {
  SLUICE_CHECK(speculates() && part.start >= s->computed && part.rows == part.samples,
               "rows from {} computed {}, {} rows, {} samples", part.start, s->computed, part.rows,
               part.samples);
  const std::span<const SampledToken> run =
      std::span(result.samples).subspan(size_t(part.sample), size_t(part.samples));
  int32_t drawn = 0;
  while (drawn < part.samples && run[size_t(drawn)].token >= 0) ++drawn;
  SLUICE_CHECK(drawn > 0, "sequence {}:{}: nothing was drawn", s->group->arrival, s->choice);
  const int32_t from = s->computed, planned = part.samples - 1;
  const auto is_cut = [](const SampledToken& t) { return t.cut; };
  const int32_t drafts = planned - int32_t(std::count_if(run.begin(), run.end(), is_cut));
  if (drafts > 0) {
    ++s->spec_runs;
    s->spec_proposed += drafts;
    s->spec_first_accepted += drawn > 1;
  }
  int32_t kept = 0;
  while (kept < drawn && !s->ended()) {
    s->computed = from + kept + 1;
    TellCache(s);
    if (kept > 0) ++s->spec_accepted;
    if (kept > 0) ++s->planned;
    KeepToken(s, run[size_t(kept++)]);
  }
  if (drafts > 0) counters_.drafts.Add(drafts, drawn - 1, kept - 1);
  if (planned > 0) draft_control_.Observe(planned, drafts, drawn - 1);
  if (s->ended()) {
    s->computed = std::min(from + drawn, int32_t(s->tokens.size()));
    s->planned = std::max(s->planned, s->computed);
  } else if (drawn < part.samples && !run[size_t(drawn)].status.ok()) {
    s->failed = true;
    OutputEvent event;
    event.finish = FinishReason::kError;
    event.error = run[size_t(drawn)].status;
    End(s, std::move(event));
  }
}

void Scheduler::Jump(Sequence* s, const SampledToken& sampled) {
  // One of them may be under way already; with it alone nothing is gained.
  if (s->ended() || s->state != SeqState::kRunning || int32_t(sampled.forced.size()) <= s->pending) return;
  SLUICE_CHECK(s->echoes == 0 && s->untold.empty() && !speculates(), "echoes {}", s->echoes);
  s->echoes = std::exchange(s->pending, 0);
  s->untold.assign(sampled.forced.begin() + s->echoes, sampled.forced.end());
  SampledToken forced;
  for (const int32_t token : sampled.forced) {
    forced.token = token;
    ++counters_.forced_tokens;
    KeepToken(s, forced);
    if (s->ended()) return;
  }
}

void Scheduler::KeepToken(Sequence* s, const SampledToken& sampled) {
  RequestGroup* group = s->group;
  s->tokens.push_back(sampled.token);
  counters_.generation_tokens += group->verification() ? 0 : 1;
  if (group->request.sampling.hash_logits)
    s->logits_hash = JoinLogitsHash(s->logits_hash, sampled.logits_hash);
  OutputEvent event;
  event.choice = s->choice;
  event.cached = group->cached;
  TokenOut& out = event.tokens.emplace_back();
  out.token = sampled.token;
  out.logprob = sampled.logprob;
  out.top.reserve(sampled.top.size());
  for (const TopLogprob& t : sampled.top) out.top.push_back({t.token, t.logprob});
  const bool stop_allowed = s->produced() > group->request.sampling.min_tokens;
  if (stop_allowed && std::binary_search(group->stop_ids.begin(), group->stop_ids.end(), sampled.token)) {
    event.finish = FinishReason::kStop;
    event.matched_stop_token = sampled.token;
  } else if (s->produced() >= group->max_new) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish != FinishReason::kNone) return End(s, std::move(event));
  if (!s->first_event_sent) FillFirst(group, &event);
  s->first_event_sent = true;
  if (group->request.output != nullptr) group->request.output->Push(std::move(event));
}

}  // namespace sluice
