// Which pages of one tier are free, leased, cached or waiting, per lane. Numbers only; the memory is
// elsewhere.
//
//   free --Take--> leased --Cache--> cached --Free--> free
//                  leased --Free--> free,  leased --Defer--> deferred --Undefer--> free
//
// Every transition is checked, so a double free or a page in two places stops the process where it happens.
// Page p lives on lane p % lanes; the first `skip` local pages of each lane (scratch) are never handed out.
#pragma once

#include <cstdint>
#include <vector>

#include "base/check.h"
#include "radix/radix_node.h"

namespace sluice {

class PagePool {
 public:
  enum class State : uint8_t { kScratch, kFree, kLeased, kCached, kDeferred };

  PagePool(int32_t lanes, int64_t pages_per_lane, int32_t skip)
      : lanes_(lanes),
        per_lane_(pages_per_lane),
        state_(size_t(lanes * (pages_per_lane + skip)), State::kScratch) {
    free_.resize(size_t(lanes));
    for (int32_t lane = 0; lane < lanes; ++lane) {
      free_[size_t(lane)].reserve(size_t(pages_per_lane));
      for (int64_t local = pages_per_lane + skip - 1; local >= skip;
           --local) {  // lowest on top: runs of neighbours
        const auto page = int32_t(local * lanes + lane);
        free_[size_t(lane)].push_back(page);
        state_[size_t(page)] = State::kFree;
      }
    }
  }

  int32_t lanes() const { return lanes_; }
  int32_t lane(int32_t page) const { return page % lanes_; }
  int64_t per_lane() const { return per_lane_; }
  int64_t all() const { return per_lane_ * lanes_; }
  int64_t free(int32_t lane) const { return int64_t(free_[size_t(lane)].size()); }
  int64_t free_total() const {
    int64_t n = 0;
    for (const auto& f : free_) n += int64_t(f.size());
    return n;
  }
  int64_t leased() const { return leased_; }
  int64_t cached() const { return cached_; }
  int64_t deferred() const { return deferred_; }
  State state(int32_t page) const { return state_[size_t(page)]; }
  size_t slots() const { return state_.size(); }

  // REQUIRES free(lane) > 0.
  int32_t Take(int32_t lane) {
    auto& f = free_[size_t(lane)];
    SLUICE_CHECK(!f.empty(), "lane {} has no free page", lane);
    const int32_t page = f.back();
    f.pop_back();
    Move(page, State::kFree, State::kLeased);
    ++leased_;
    return page;
  }
  void Cache(int32_t page) {
    Move(page, State::kLeased, State::kCached);
    --leased_;
    ++cached_;
  }
  void FreeLeased(int32_t page) {
    Move(page, State::kLeased, State::kFree);
    --leased_;
    free_[size_t(lane(page))].push_back(page);
  }
  void FreeCached(int32_t page) {
    Move(page, State::kCached, State::kFree);
    --cached_;
    free_[size_t(lane(page))].push_back(page);
  }
  void Defer(int32_t page) {
    Move(page, State::kLeased, State::kDeferred);
    --leased_;
    ++deferred_;
  }
  void Undefer(int32_t page) {
    Move(page, State::kDeferred, State::kFree);
    --deferred_;
    free_[size_t(lane(page))].push_back(page);
  }

 private:
  void Move(int32_t page, State from, State to) {
    State& s = state_[size_t(page)];
    SLUICE_CHECK(s == from, "page {} is in state {}, expected {} on the way to {}", page, int(s), int(from),
                 int(to));
    s = to;
  }

  int32_t lanes_;
  int64_t per_lane_;
  std::vector<State> state_;
  std::vector<std::vector<int32_t>> free_;
  int64_t leased_ = 0, cached_ = 0, deferred_ = 0;
};

}  // namespace sluice
