// The product's cache with a witness in front: notes which pages belong to whom, checks the partition at the
// interface, and tells the executor which namespace a new page is for.
#pragma once

#include <functional>
#include <map>
#include <set>

#include "cache/kv_cache.h"
#include "sim/report.h"
#include "sim/sim_executor.h"

namespace sluice::sim {

class WatchedCache final : public KvCache {
 public:
  // `model` goes into every root: another model's rows are foreign whatever their tokens.
  WatchedCache(std::unique_ptr<KvCache> cache, SimExecutor* executor, uint64_t model, Journal* journal)
      : cache_(std::move(cache)), executor_(executor), model_(model), journal_(journal) {}

  uint64_t Root(std::string_view name_space) const { return Mix(NamespaceRoot(name_space), model_); }

  BeginResult Begin(SequenceKv* seq, std::string_view ns, std::span<const int32_t> tokens,
                    Nanos now) override {
    const BeginResult r = cache_->Begin(seq, ns, tokens, now);
    if (r != BeginResult::kReady) {
      if (seq->active || !seq->pages.empty()) journal_->Violation("Begin without success holds pages");
      journal_->Cover(r == BeginResult::kNoRoom ? "begin_no_room" : "begin_waits_for_storage");
      return r;
    }
    active_.insert(seq);
    const int64_t hit = seq->hit.total();
    if (hit >= int64_t(tokens.size()) || hit % kPageTokens != 0 || hit != seq->computed ||
        int64_t(seq->pages.size()) != hit / kPageTokens)
      journal_->Violation("a hit of {} tokens of {}, {} computed, {} pages", hit, tokens.size(),
                          seq->computed, seq->pages.size());
    journal_->Cover("hit_tokens_device", seq->hit.device);
    journal_->Cover("hit_tokens_host", seq->hit.host);
    journal_->Cover("hit_tokens_storage", seq->hit.storage);
    for (size_t i = 0; i < seq->pages.size(); ++i) {
      // Pages of the device tier carry the namespace they were written for; loaded ones get it now.
      if (int64_t(i) * kPageTokens >= seq->hit.device)
        executor_->SetRoot(seq->pages[i], Root(ns));
      else if (executor_->RootOf(seq->pages[i]) != Root(ns))
        journal_->Violation("page {} of another namespace is a hit", seq->pages[i].value);
    }
    return r;
  }
  bool Grow(SequenceKv* seq, int64_t num_tokens) override {
    const size_t had = seq->pages.size();
    if (!cache_->Grow(seq, num_tokens)) {
      if (seq->pages.size() != had) journal_->Violation("Grow without success changed the pages");
      journal_->Cover("grow_no_room");
      return false;
    }
    for (size_t i = had; i < seq->pages.size(); ++i) executor_->SetRoot(seq->pages[i], Root(seq->name_space));
    return true;
  }
  void Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed, int32_t priority) override {
    cache_->Commit(seq, tokens, computed, priority);
    for (const PageId page : seq->pages)
      if (executor_->RootOf(page) != Root(seq->name_space))
        journal_->Violation("Commit swapped in page {} of another namespace", page.value);
  }
  void Release(SequenceKv* seq, std::span<const int32_t> tokens, bool keep) override {
    cache_->Release(seq, tokens, keep);
    if (seq->active) journal_->Violation("a released sequence is active");
    active_.erase(seq);
  }
  void Prefetch(SequenceKv* seq, std::string_view ns, std::span<const int32_t> tokens, Nanos now) override {
    cache_->Prefetch(seq, ns, tokens, now);
  }
  void StepSubmitted(int64_t step) override { cache_->StepSubmitted(step); }
  void StepRetired(int64_t step) override { cache_->StepRetired(step); }
  bool RoomComing() const override { return cache_->RoomComing(); }
  PageId TakePage(SequenceKv* seq) override {
    const PageId page = cache_->TakePage(seq);
    if (page.valid()) executor_->SetRoot(page, Root(seq->name_space));
    return page;
  }
  CachedTokens Peek(std::string_view ns, std::span<const int32_t> tokens) const override {
    return cache_->Peek(ns, tokens);
  }
  void TakeCopies(std::vector<CopyPlan>* loads, std::vector<CopyPlan>* backups) override {
    cache_->TakeCopies(loads, backups);
  }
  void OnCopiesDone(std::span<const int64_t> ids, std::span<const int64_t> failed) override {
    cache_->OnCopiesDone(ids, failed);
  }
  bool Lost(const SequenceKv& seq) const override { return cache_->Lost(seq); }
  bool TakeVerification(VerifyJob* job) override { return cache_->TakeVerification(job); }
  bool Poll(Nanos now) override { return cache_->Poll(now); }
  int64_t AvailablePages() const override { return cache_->AvailablePages(); }
  int64_t total_pages() const override { return cache_->total_pages(); }
  bool Flush() override {
    const bool flushed = cache_->Flush();
    if (flushed != active_.empty())
      journal_->Violation("flush said {} with {} active sequences", flushed, active_.size());
    return flushed;
  }
  bool DropDevice() override { return cache_->DropDevice(); }
  CacheStats Stats() const override { return cache_->Stats(); }
  // The cache's own walk, and the partition as the outside sees it.
  std::vector<std::string> Audit() const override {
    std::vector<std::string> wrong = cache_->Audit();
    const CacheStats s = cache_->Stats();
    for (const TierCounts& t : {s.device, s.host})
      if (t.free + t.leased + t.cached != t.all || t.free < 0 || t.leased < 0 || t.cached < 0)
        wrong.push_back(
            fmt::format("{} free + {} leased + {} cached != {}", t.free, t.leased, t.cached, t.all));
    int64_t own = 0;
    std::map<int32_t, bool> owned;  // page > by one alone
    for (const SequenceKv* seq : active_) {
      for (size_t i = 0; i < seq->pages.size(); ++i) {
        const bool mine = int64_t(i) * kPageTokens >= seq->cached;
        own += mine;
        const auto [it, fresh] = owned.insert({seq->pages[i].value, mine});
        if (!fresh && (mine || it->second))
          wrong.push_back(fmt::format("page {} has two owners", seq->pages[i].value));
      }
    }
    if (s.device.leased != own + s.deferred_pages)
      wrong.push_back(fmt::format("{} pages leased, sequences own {} and {} are deferred", s.device.leased,
                                  own, s.deferred_pages));
    return wrong;
  }

 private:
  std::unique_ptr<KvCache> cache_;
  SimExecutor* executor_;
  const uint64_t model_;
  Journal* journal_;
  std::set<const SequenceKv*> active_;
};

}  // namespace sluice::sim
