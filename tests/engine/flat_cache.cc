#include "flat_cache.h"

#include "base/check.h"

namespace sluice {

FlatCache::FlatCache(int64_t pages, std::function<void(PageId)> on_free)
    : pages_(pages), on_free_(std::move(on_free)) {
  for (int64_t i = pages; i >= 1; --i) free_.push_back(PageId(int32_t(i)));
}

BeginResult FlatCache::Begin(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                             Nanos) {
  SLUICE_CHECK(!seq->active && !tokens.empty());
  seq->name_space = name_space;
  seq->active = true;
  ++active_;
  return BeginResult::kReady;
}

PageId FlatCache::TakePage(SequenceKv* seq) {
  SLUICE_CHECK(seq->active);
  if (free_.empty()) return PageId();
  const PageId page = free_.back();
  free_.pop_back();
  SLUICE_CHECK(taken_.insert(page).second);
  return page;
}

bool FlatCache::Grow(SequenceKv* seq, int64_t num_tokens) {
  const int64_t wanted = CeilDiv(num_tokens, kPageTokens) - int64_t(seq->pages.size());
  if (wanted > int64_t(free_.size())) return false;
  for (int64_t i = 0; i < wanted; ++i) seq->pages.push_back(TakePage(seq));
  return true;
}

void FlatCache::Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed, int32_t) {
  SLUICE_CHECK(seq->active && computed <= int64_t(tokens.size()) && computed >= seq->computed);
  SLUICE_CHECK(computed <= int64_t(seq->pages.size()) * kPageTokens);
  seq->computed = computed;
}

void FlatCache::Release(SequenceKv* seq, std::span<const int32_t>, bool) {
  SLUICE_CHECK(seq->active);
  for (const PageId page : seq->pages) {
    SLUICE_CHECK(taken_.erase(page) == 1);
    if (on_free_) on_free_(page);
    free_.push_back(page);
  }
  *seq = SequenceKv();
  --active_;
}

CacheStats FlatCache::Stats() const {
  CacheStats stats;
  stats.device = {pages_, int64_t(free_.size()), int64_t(taken_.size()), 0};
  return stats;
}

std::vector<std::string> FlatCache::Audit() const {
  std::vector<std::string> wrong;
  if (int64_t(free_.size() + taken_.size()) != pages_) wrong.push_back("pages lost");
  if (active_ == 0 && !taken_.empty()) wrong.push_back(fmt::format("{} pages leaked", taken_.size()));
  return wrong;
}

}  // namespace sluice
