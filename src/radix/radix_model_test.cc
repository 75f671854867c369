// Random operations on the tree beside a slow model: a map from token prefixes to slots.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/random.h"
#include "radix/radix_tree.h"

namespace sluice {
namespace {

constexpr int32_t kPage = 4;
using Tokens = std::vector<int32_t>;

// (namespace, page-aligned prefix) -> slot of its last page. Prefix-closed by construction.
struct Model {
  std::map<std::pair<std::string, Tokens>, int32_t> slots;

  int64_t Match(const std::string& ns, const Tokens& t) const {
    int64_t pages = 0;
    while (int64_t(t.size()) >= (pages + 1) * kPage &&
           slots.count({ns, Tokens(t.begin(), t.begin() + (pages + 1) * kPage)}) > 0) {
      ++pages;
    }
    return pages;
  }
};

struct World {
  explicit World(uint64_t seed, EvictionPolicy policy, int32_t lanes)
      : tree({.page_tokens = kPage, .lanes = lanes, .policy = policy}), random(seed) {}

  Tokens RandomTokens() {
    Tokens t;
    const int64_t pages = int64_t(random.Below(9));
    for (int64_t i = 0; i < pages * kPage; ++i)
      t.push_back(i % kPage == 0 ? int32_t(random.Below(3)) : int32_t(i / 16));
    for (uint64_t tail = random.Below(kPage); tail > 0; --tail) t.push_back(1);
    return t;
  }
  // The tokens of the whole path to the end of a node.
  static Tokens PathOf(const RadixNode* n) {
    Tokens t;
    for (; !n->is_root(); n = n->parent)
      t.insert(t.begin(), n->tokens, n->tokens + int64_t(n->pages) * kPage);
    return t;
  }
  static std::string NameOf(const RadixNode* n) {
    while (!n->is_root()) n = n->parent;
    return *n->name_space;
  }

  void Insert(const std::string& ns, const Tokens& t) {
    const RadixKey key(t, kPage);
    RadixNode* root = tree.GetRoot(ns);
    RadixTree::Match m = tree.Walk(root, key);
    ASSERT_EQ(m.pages, model.Match(ns, t));
    if (m.in_node < m.node->pages && m.in_node > 0) m.node = tree.Split(m.node, m.in_node);
    if (m.pages < key.pages()) {
      const RadixKey rest = key.From(m.pages);
      int64_t at = m.pages;
      std::vector<int32_t> slots;
      for (int64_t i = 0; i < rest.pages(); ++i) {
        const int32_t slot = next_slot++;
        slots.push_back(slot);
        ++at;
        model.slots[{ns, Tokens(t.begin(), t.begin() + at * kPage)}] = slot;
      }
      const bool in_place =
          !m.node->is_root() && m.node->children == 0 && m.node->lock == 0 && random.Chance(0.5);
      RadixNode* n = m.node;
      if (in_place) {
        tree.Extend(n, rest);
      } else {
        n = tree.AddChild(m.node, rest);
      }
      tree.AddResident(n, Tier::kDevice, slots);
      m.node = n;
    }
    if (!m.node->is_root()) tree.TouchPath(m.node);
    tree.Reap(root, [](Tier, int32_t) {});
  }

  void Evict() {
    RadixNode* v = tree.Victim(Tier::kDevice);
    if (v == nullptr) return;
    const Tokens path = PathOf(v);
    const std::string ns = NameOf(v);
    const int32_t n = 1 + int32_t(random.Below(uint64_t(v->pages)));
    int64_t at = int64_t(path.size()) / kPage;
    RadixNode* parent = v->parent;
    const bool alive = tree.DropResident(v, Tier::kDevice, n, [&](int32_t slot) {
      const auto it = model.slots.find({ns, Tokens(path.begin(), path.begin() + at * kPage)});
      ASSERT_NE(it, model.slots.end());
      EXPECT_EQ(it->second, slot);
      model.slots.erase(it);
      --at;
    });
    if (!alive) tree.Reap(parent, [](Tier, int32_t) {});
  }

  void ToggleLock(const std::string& ns, const Tokens& t) {
    if (!locked.empty() && random.Chance(0.5)) {
      const size_t i = random.Below(locked.size());
      tree.Unlock(locked[i].first);
      locked.erase(locked.begin() + int64_t(i));
      return;
    }
    RadixNode* root = tree.FindRoot(ns);
    if (root == nullptr) return;
    RadixTree::Match m = tree.Walk(root, RadixKey(t, kPage));
    if (m.pages == 0) return;
    if (m.in_node < m.node->pages) m.node = tree.Split(m.node, m.in_node);
    tree.Lock(m.node);
    locked.emplace_back(m.node, std::make_pair(ns, Tokens(t.begin(), t.begin() + m.pages * kPage)));
  }

  void Check() {
    for (const std::string& m : tree.Audit()) ADD_FAILURE() << m;
    int64_t cached = 0, evictable = 0;
    for (int32_t lane = 0; lane < tree.options().lanes; ++lane) {
      cached += tree.cached(Tier::kDevice, lane);
      evictable += tree.evictable(Tier::kDevice, lane);
    }
    EXPECT_EQ(cached, int64_t(model.slots.size()));
    std::set<std::pair<std::string, Tokens>> kept;
    for (const auto& [node, path] : locked) {
      EXPECT_EQ(PathOf(node), path.second);
      for (size_t n = kPage; n <= path.second.size(); n += kPage) {
        kept.insert({path.first, Tokens(path.second.begin(), path.second.begin() + int64_t(n))});
      }
    }
    EXPECT_EQ(cached - evictable, int64_t(kept.size()));
  }

  RadixTree tree;
  SeededStream random;
  Model model;
  std::vector<std::pair<RadixNode*, std::pair<std::string, Tokens>>> locked;
  int32_t next_slot = 0;
};

class RadixModel : public ::testing::TestWithParam<EvictionPolicy> {};

TEST_P(RadixModel, TreeAgreesWithTheMapAfterEveryOperation) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    World w(seed, GetParam(), 1 + int32_t(seed % 3));
    for (int op = 0; op < 250 && !::testing::Test::HasFailure(); ++op) {
      const std::string ns = w.random.Chance(0.7) ? "a" : "b";
      const Tokens t = w.RandomTokens();
      switch (w.random.Below(5)) {
        case 0:
        case 1:
          w.Insert(ns, t);
          break;
        case 2:
          w.Evict();
          break;
        case 3:
          w.ToggleLock(ns, t);
          break;
        default: {
          RadixNode* root = w.tree.FindRoot(ns);
          EXPECT_EQ(root == nullptr ? 0 : w.tree.Walk(root, RadixKey(t, kPage)).pages, w.model.Match(ns, t));
        }
      }
      w.Check();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RadixModel,
                         ::testing::Values(EvictionPolicy::kLru, EvictionPolicy::kLfu, EvictionPolicy::kFifo,
                                           EvictionPolicy::kMru, EvictionPolicy::kPriority));

}  // namespace
}  // namespace sluice
