// A KvCache without a tree: a counted pool of pages, no sharing. `on_free` lets a test poison a page the
// moment it is free.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cache/kv_cache.h"

namespace sluice {

class FlatCache final : public KvCache {
 public:
  FlatCache(int64_t pages, std::function<void(PageId)> on_free);

  BeginResult Begin(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                    Nanos now) override;
  bool Grow(SequenceKv* seq, int64_t num_tokens) override;
  void Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed, int32_t priority) override;
  void Release(SequenceKv* seq, std::span<const int32_t> tokens, bool keep) override;
  PageId TakePage(SequenceKv* seq) override;
  CachedTokens Peek(std::string_view, std::span<const int32_t>) const override { return {}; }
  void TakeCopies(std::vector<CopyPlan>*, std::vector<CopyPlan>*) override {}
  void OnCopiesDone(std::span<const int64_t>, std::span<const int64_t>) override {}
  bool Poll(Nanos) override { return false; }
  int64_t AvailablePages() const override { return int64_t(free_.size()); }
  int64_t total_pages() const override { return pages_; }
  bool Flush() override { return active_ == 0; }
  bool DropDevice() override { return false; }
  CacheStats Stats() const override;
  std::vector<std::string> Audit() const override;

 private:
  const int64_t pages_;
  const std::function<void(PageId)> on_free_;
  std::vector<PageId> free_;
  std::set<PageId> taken_;
  int64_t active_ = 0;
};

}  // namespace sluice
