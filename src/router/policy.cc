#include "router/policy.h"

#include <algorithm>

namespace sluice::router {
namespace {

// Of the least loaded, any.
size_t LeastLoaded(const std::vector<Candidate>& candidates, SeededStream& random) {
  int64_t least = candidates[0].load;
  for (const Candidate& c : candidates) least = std::min(least, c.load);
  size_t count = 0, picked = 0;
  for (size_t i = 0; i < candidates.size(); ++i)
    if (candidates[i].load == least && random.Below(++count) == 0) picked = i;
  return picked;
}

class RandomPolicy final : public Policy {
 public:
  explicit RandomPolicy(uint64_t seed) : random_(seed) {}
  size_t Pick(const std::vector<Candidate>& c, std::string_view) override {
    return size_t(random_.Below(c.size()));
  }

 private:
  SeededStream random_;
};

class RoundRobin final : public Policy {
 public:
  size_t Pick(const std::vector<Candidate>& c, std::string_view) override {
    // By the worker, not by the place in the list, which changes when one falls ill.
    size_t best = 0;
    for (size_t i = 0; i < c.size(); ++i) {
      const bool after = c[i].worker > last_, best_after = c[best].worker > last_;
      if (after != best_after ? after : c[i].worker < c[best].worker) best = i;
    }
    last_ = c[best].worker;
    return best;
  }

 private:
  int last_ = -1;
};

class PowerOfTwo final : public Policy {
 public:
  explicit PowerOfTwo(uint64_t seed) : random_(seed) {}
  size_t Pick(const std::vector<Candidate>& c, std::string_view) override {
    if (c.size() == 1) return 0;
    const size_t a = size_t(random_.Below(c.size()));
    size_t b = size_t(random_.Below(c.size() - 1));
    if (b >= a) ++b;
    if (c[a].load == c[b].load) return random_.Below(2) == 0 ? a : b;
    return c[a].load < c[b].load ? a : b;
  }

 private:
  SeededStream random_;
};

// The worker that has seen most of the request, unless it has far more to do than another.
class CacheAware final : public Policy {
 public:
  explicit CacheAware(uint64_t seed) : random_(seed) {}
  size_t Pick(const std::vector<Candidate>& c, std::string_view key) override {
    std::vector<int> workers;
    int64_t least = c[0].load, most = c[0].load;
    for (const Candidate& w : c) {
      workers.push_back(w.worker);
      least = std::min(least, w.load);
      most = std::max(most, w.load);
    }
    size_t picked = LeastLoaded(c, random_);
    const bool balanced = most - least <= kLoadGap || double(most) <= kLoadRatio * double(least);
    if (balanced) {
      const std::vector<size_t> seen = index_.Match(key, workers);
      const size_t longest = *std::max_element(seen.begin(), seen.end());
      if (longest > 0) {
        std::vector<Candidate> best;
        std::vector<size_t> at;
        for (size_t i = 0; i < c.size(); ++i) {
          if (seen[i] != longest) continue;
          best.push_back(c[i]);
          at.push_back(i);
        }
        picked = at[LeastLoaded(best, random_)];
      }
    }
    index_.Insert(key, c[picked].worker);
    return picked;
  }
  void Forget(int worker) override { index_.Forget(worker); }

 private:
  static constexpr int64_t kLoadGap = 16;
  static constexpr double kLoadRatio = 1.5;
  SeededStream random_;
  PrefixIndex index_;
};

}  // namespace

StatusOr<std::unique_ptr<Policy>> MakePolicy(const std::string& name, uint64_t seed) {
  if (name == "random") return std::make_unique<RandomPolicy>(seed);
  if (name == "round_robin") return std::make_unique<RoundRobin>();
  if (name == "power_of_two") return std::make_unique<PowerOfTwo>(seed);
  if (name == "cache_aware") return std::make_unique<CacheAware>(seed);
  return Invalid("policy {}: use cache_aware, power_of_two, round_robin or random", name);
}

}  // namespace sluice::router
