#include "radix/radix_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int32_t kPage = 4;

// Tokens of pages: page value v becomes (v, v, v, v).
std::vector<int32_t> Pages(std::initializer_list<int32_t> values) {
  std::vector<int32_t> t;
  for (int32_t v : values) t.insert(t.end(), kPage, v);
  return t;
}

RadixKey Key(const std::vector<int32_t>& tokens) { return RadixKey(tokens, kPage); }

class RadixTreeTest : public ::testing::Test {
 protected:
  RadixTreeTest() : tree({.page_tokens = kPage, .lanes = 2}), root(tree.GetRoot("ns")) {}
  ~RadixTreeTest() override { EXPECT_THAT(tree.Audit(), IsEmpty()); }

  RadixNode* Add(RadixNode* parent, const std::vector<int32_t>& tokens) {
    RadixNode* n = tree.AddChild(parent, Key(tokens));
    std::vector<int32_t> slots(size_t(n->pages));
    std::iota(slots.begin(), slots.end(), next_slot);
    next_slot += n->pages;
    tree.AddResident(n, Tier::kDevice, slots);
    return n;
  }
  void Drop(RadixNode* n, int32_t pages) {
    RadixNode* parent = n->parent;
    if (!tree.DropResident(n, Tier::kDevice, pages, [&](int32_t s) { freed.push_back(s); }))
      tree.Reap(parent, Freed());
  }
  std::function<void(Tier, int32_t)> Freed() {
    return [&](Tier, int32_t s) { freed.push_back(s); };
  }

  RadixTree tree;
  RadixNode* root;
  int32_t next_slot = 0;
  std::vector<int32_t> freed;
};

TEST_F(RadixTreeTest, MatchEndsAtWholePagesOnly) {
  const auto cached = Pages({1, 2, 3});
  RadixNode* n = Add(root, cached);
  auto ask = Pages({1, 2, 3, 4});
  EXPECT_EQ(tree.Walk(root, Key(ask)).pages, 3);
  ask = Pages({1, 2, 3});
  ask.pop_back();
  const auto m = tree.Walk(root, Key(ask));
  EXPECT_EQ(m.pages, 2);
  EXPECT_EQ(m.node, n);
  EXPECT_EQ(m.in_node, 2);
  ask = Pages({1, 2, 3});
  ask[5] = 99;
  EXPECT_EQ(tree.Walk(root, Key(ask)).pages, 1);
  ask[0] = 99;
  EXPECT_EQ(tree.Walk(root, Key(ask)).pages, 0);
  EXPECT_EQ(tree.Walk(root, RadixKey()).pages, 0);
}

TEST_F(RadixTreeTest, NamespacesShareNothing) {
  const auto t = Pages({1, 2});
  Add(root, t);
  EXPECT_EQ(tree.FindRoot("other"), nullptr);
  RadixNode* other = tree.GetRoot("other");
  EXPECT_EQ(tree.Walk(other, Key(t)).pages, 0);
  Add(other, t);
  EXPECT_EQ(tree.Walk(other, Key(t)).pages, 2);
  EXPECT_EQ(tree.nodes(), 2);
  EXPECT_NE(root->root_digest, other->root_digest);
}

TEST_F(RadixTreeTest, SplitKeepsIdentityHoldsAndSlotsOfTheLowerPart) {
  const auto t = Pages({1, 2, 3, 4, 5});
  RadixNode* n = Add(root, t);
  tree.Lock(n);
  EXPECT_EQ(tree.evictable(Tier::kDevice, 0) + tree.evictable(Tier::kDevice, 1), 0);
  RadixNode* up = tree.Split(n, 2);
  EXPECT_EQ(up->parent, root);
  EXPECT_EQ(n->parent, up);
  EXPECT_EQ(n->lock, 1);
  EXPECT_EQ(up->lock, 0);
  EXPECT_THAT(std::vector<int32_t>(up->slots[0], up->slots[0] + 2), ElementsAre(0, 1));
  EXPECT_THAT(std::vector<int32_t>(n->slots[0], n->slots[0] + 3), ElementsAre(2, 3, 4));
  EXPECT_FALSE(tree.Evictable(up, Tier::kDevice));
  EXPECT_EQ(tree.evictable(Tier::kDevice, 0) + tree.evictable(Tier::kDevice, 1), 0);
  EXPECT_EQ(tree.Walk(root, Key(t)).node, n);
  tree.Unlock(n);
  EXPECT_EQ(tree.evictable(Tier::kDevice, 0), 3);
  EXPECT_EQ(tree.evictable(Tier::kDevice, 1), 2);
}

TEST_F(RadixTreeTest, CursorWalksOnlyWhatIsNew) {
  const auto t = Pages({1, 2, 3});
  RadixNode* n = Add(root, t);
  tree.Lock(n);
  const auto more = Pages({4, 5});
  Add(n, more);
  const auto m = tree.Walk(n, Key(Pages({4, 9})));
  EXPECT_EQ(m.pages, 1);
  EXPECT_EQ(m.in_node, 1);
  tree.Unlock(n);
}

TEST_F(RadixTreeTest, ExtendGrowsALeafInPlace) {
  RadixNode* n = Add(root, Pages({1}));
  for (int32_t v = 2; v < 40; ++v) {
    const auto page = Pages({v});
    tree.Extend(n, Key(page));
    const int32_t slot = 100 + v;
    tree.AddResident(n, Tier::kDevice, std::span(&slot, 1));
  }
  EXPECT_EQ(tree.nodes(), 1);
  EXPECT_EQ(n->pages, 39);
  EXPECT_EQ(tree.Walk(root, Key(Pages({1, 2, 3, 4, 5, 6, 7, 8}))).pages, 8);
}

TEST_F(RadixTreeTest, EvictionTakesTailsOfLeavesInOrderAndFreesParentsAfterChildren) {
  RadixNode* a = Add(root, Pages({1, 2}));
  RadixNode* b = Add(a, Pages({3, 4}));
  RadixNode* c = Add(a, Pages({5}));
  tree.TouchPath(b);
  tree.TouchPath(c);
  tree.TouchPath(b);
  EXPECT_EQ(tree.Victim(Tier::kDevice), c);
  Drop(c, 1);
  EXPECT_EQ(tree.Victim(Tier::kDevice), b);
  Drop(b, 1);
  EXPECT_EQ(b->pages, 1);
  EXPECT_EQ(tree.Walk(root, Key(Pages({1, 2, 3, 4}))).pages, 3);
  Drop(b, 1);
  EXPECT_EQ(tree.Victim(Tier::kDevice), a);
  Drop(a, 2);
  EXPECT_EQ(tree.Victim(Tier::kDevice), nullptr);
  EXPECT_EQ(tree.nodes(), 0);
  EXPECT_EQ(tree.roots(), 0);
  EXPECT_THAT(freed, ElementsAre(4, 3, 2, 1, 0));
}

TEST_F(RadixTreeTest, HeldNodesAreNoVictimsAndComeBackInTrueOrder) {
  RadixNode* a = Add(root, Pages({1}));
  RadixNode* b = Add(root, Pages({2}));
  RadixNode* c = Add(root, Pages({3}));
  for (RadixNode* n : {a, b, c}) tree.Touch(n);
  tree.Lock(a);
  tree.Touch(a);
  EXPECT_EQ(tree.Victim(Tier::kDevice), b);
  tree.Unlock(a);
  Drop(b, 1);
  EXPECT_EQ(tree.Victim(Tier::kDevice), c);
  Drop(c, 1);
  EXPECT_EQ(tree.Victim(Tier::kDevice), a);
}

TEST_F(RadixTreeTest, HostCopyKeepsThePageWhenTheDeviceCopyGoes) {
  RadixNode* a = Add(root, Pages({1, 2, 3}));
  const int32_t host[] = {7, 8};
  tree.AddResident(a, Tier::kHost, host);
  Drop(a, 2);  // page 2 had no host copy: gone; page 1 stays on the host
  EXPECT_EQ(a->pages, 2);
  EXPECT_EQ(a->resident[0], 1);
  Drop(a, 1);
  EXPECT_EQ(a->pages, 2);
  EXPECT_EQ(tree.Walk(root, Key(Pages({1, 2, 3}))).pages, 2);
  EXPECT_TRUE(tree.Evictable(a, Tier::kHost));
  EXPECT_FALSE(tree.Evictable(a, Tier::kDevice));
}

// Lanes of pages on the host alone are counted from the host's pages, whatever lanes the device's lie on.
TEST_F(RadixTreeTest, PagesToLoadAreCountedByTheHostCopysLaneWhereTheDeviceUsesOthers) {
  RadixNode* a = Add(root, Pages({1, 2, 3, 4}));  // slots 1, 2, 3, 4: lanes 1, 0, 1, 0
  const int32_t host[] = {2, 4, 5, 7};            // lanes 0, 0, 1, 1
  using Lanes = std::array<int32_t, kMaxLanes>;
  tree.AddResident(a, Tier::kHost, host);
  EXPECT_EQ(a->host_only, Lanes{});
  Drop(a, 2);
  EXPECT_EQ(a->host_only, (Lanes{0, 2}));
  Drop(a, 1);
  EXPECT_EQ(a->host_only, (Lanes{1, 2}));
  RadixNode* up = tree.Split(a, 2);
  EXPECT_EQ(up->host_only, (Lanes{1, 0}));
  EXPECT_EQ(a->host_only, (Lanes{0, 2}));
  const int32_t again[] = {9};
  tree.AddResident(up, Tier::kDevice, again);
  EXPECT_EQ(up->host_only, Lanes{});
  tree.DropResident(a, Tier::kHost, 1, [](int32_t) {});
  EXPECT_EQ(a->host_only, (Lanes{0, 1}));
}

TEST_F(RadixTreeTest, DeadNodesMatchNothingAndGoWithTheirLastHold) {
  RadixNode* a = Add(root, Pages({1, 2}));
  RadixNode* b = Add(a, Pages({3}));
  RadixNode* c = Add(a, Pages({4}));
  tree.Lock(b);
  tree.Kill(a, Freed());
  EXPECT_THAT(freed, ElementsAre(c == nullptr ? -1 : 3));  // c goes at once, a and b stay for the lock
  EXPECT_EQ(tree.Walk(root, Key(Pages({1, 2}))).pages, 0);
  Add(root, Pages({1, 2}));
  EXPECT_EQ(tree.Walk(root, Key(Pages({1, 2, 3}))).pages, 2);
  EXPECT_THAT(tree.Audit(), IsEmpty());
  tree.Unlock(b);
  tree.Reap(b, Freed());
  EXPECT_EQ(tree.total_nodes(), 1);
}

TEST_F(RadixTreeTest, ManyChildrenAreFoundByTheirFirstPage) {
  for (int32_t v = 0; v < 5000; ++v) Add(root, Pages({v, 7}));
  for (int32_t v = 0; v < 5000; ++v) EXPECT_EQ(tree.Walk(root, Key(Pages({v, 7, 8}))).pages, 2);
  for (int32_t v = 5000; v < 6000; ++v) EXPECT_EQ(tree.Walk(root, Key(Pages({v, 7}))).pages, 0);
  for (int i = 0; i < 4000; ++i) Drop(tree.Victim(Tier::kDevice), 2);
  int64_t found = 0;
  for (int32_t v = 0; v < 5000; ++v) found += tree.Walk(root, Key(Pages({v, 7}))).pages;
  EXPECT_EQ(found, 2000);
}

TEST_F(RadixTreeTest, DigestsChainFromTheNamespaceAndSurviveSplits) {
  const auto t = Pages({1, 2, 3, 4});
  RadixNode* n = Add(root, t);
  Digest256 want = RadixTree::RootDigest({}, "ns");
  std::vector<Digest256> chain;
  for (int i = 0; i < 4; ++i) {
    want = PageDigest(want, std::span(t).subspan(size_t(i) * kPage, kPage));
    chain.push_back(want);
  }
  EXPECT_EQ(tree.Digest(n, 1), chain[1]);
  RadixNode* up = tree.Split(n, 1);
  EXPECT_EQ(tree.Digest(n, 2), chain[3]);
  EXPECT_EQ(tree.Digest(up, 0), chain[0]);
  EXPECT_NE(RadixTree::RootDigest({}, "a"), RadixTree::RootDigest({}, "b"));
  Digest256 other{};
  other[0] = 1;
  EXPECT_NE(RadixTree::RootDigest({}, "a"), RadixTree::RootDigest(other, "a"));
}

TEST(RadixPolicy, EachPolicyGivesUpItsOwnFirst) {
  struct Case {
    EvictionPolicy policy;
    std::vector<int32_t> order;  // of first pages
  };
  // Created 1, 2, 3; touched 2, 3, 1; hits 5, 1, 9; priority 1, 7, 3.
  for (const Case& c : {Case{EvictionPolicy::kLru, {2, 3, 1}}, Case{EvictionPolicy::kMru, {1, 3, 2}},
                        Case{EvictionPolicy::kFifo, {1, 2, 3}}, Case{EvictionPolicy::kLfu, {2, 1, 3}},
                        Case{EvictionPolicy::kPriority, {1, 3, 2}}}) {
    RadixTree tree({.page_tokens = kPage, .policy = c.policy});
    RadixNode* root = tree.GetRoot("");
    RadixNode* n[4];
    for (int32_t v = 1; v <= 3; ++v) {
      const auto page = Pages({v});
      n[v] = tree.AddChild(root, Key(page));
      tree.Lock(n[v]);
      tree.AddResident(n[v], Tier::kDevice, std::span(&v, 1));
    }
    n[1]->hits = 5, n[2]->hits = 1, n[3]->hits = 9;
    n[1]->priority = 1, n[2]->priority = 7, n[3]->priority = 3;
    for (int v : {2, 3, 1}) tree.Touch(n[v]);
    for (int v : {3, 1, 2}) tree.Unlock(n[v]);
    for (int32_t want : c.order) {
      RadixNode* v = tree.Victim(Tier::kDevice);
      ASSERT_NE(v, nullptr);
      EXPECT_EQ(v->tokens[0], want) << "policy " << int(c.policy);
      tree.DropResident(v, Tier::kDevice, 1, [](int32_t) {});
    }
  }
}

}  // namespace
}  // namespace sluice
