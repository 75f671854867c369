// What tests of the cache share: prompts, a sequence with its tokens, and an executor that only acknowledges
// copies.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <numeric>

#include "cache/kv_cache_impl.h"
#include "kv/layout_fixture.h"

namespace sluice::testing {

// n tokens that differ in every page when `salt` does.
inline std::vector<int32_t> Prompt(int64_t n, int32_t salt = 0) {
  std::vector<int32_t> t(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) t[size_t(i)] = int32_t(i * 7 + salt * int64_t{100003});
  return t;
}

inline std::vector<int32_t> Concat(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Seq {
  SequenceKv kv;
  std::vector<int32_t> tokens;
};

struct CacheWorld {
  explicit CacheWorld(CacheOptions options, HostPool* host = nullptr, StorageBackend* storage = nullptr)
      : layout(MakeLayout(Small())), cache(options, layout, host, storage) {}

  // Begin and Grow for the whole prompt; fails the test when there is no room.
  Seq Start(std::vector<int32_t> tokens, const std::string& ns = "") {
    Seq s;
    s.tokens = std::move(tokens);
    EXPECT_EQ(cache.Begin(&s.kv, ns, s.tokens, now), BeginResult::kReady);
    EXPECT_TRUE(cache.Grow(&s.kv, int64_t(s.tokens.size())));
    return s;
  }
  void Compute(Seq& s, int64_t upto = -1) {
    cache.Commit(&s.kv, s.tokens, upto < 0 ? int64_t(s.tokens.size()) : upto, 0);
  }
  void End(Seq& s, bool keep = true) { cache.Release(&s.kv, s.tokens, keep); }
  // A whole turn: prompt in, computed, released. Returns the hit.
  CachedTokens Run(std::vector<int32_t> tokens, const std::string& ns = "") {
    Seq s = Start(std::move(tokens), ns);
    const CachedTokens hit = s.kv.hit;
    Pump();
    Compute(s);
    End(s);
    Pump();
    return hit;
  }
  // Takes all planned copies and reports them done until nothing is left.
  int64_t Pump() {
    int64_t pages = 0;
    for (;;) {
      std::vector<CopyPlan> loads, backups;
      cache.TakeCopies(&loads, &backups);
      if (loads.empty() && backups.empty()) return pages;
      std::vector<int64_t> ids;
      for (const auto* list : {&loads, &backups}) {
        for (const CopyPlan& p : *list) {
          ids.push_back(p.id);
          pages += int64_t(p.pages.size());
        }
      }
      cache.OnCopiesDone(ids, {});
    }
  }
  void CheckAudit() {
    for (const std::string& m : cache.Audit()) ADD_FAILURE() << m;
  }
  ~CacheWorld() { CheckAudit(); }

  KvLayout layout;
  KvCacheImpl cache;
  Nanos now = 0;
};

}  // namespace sluice::testing
