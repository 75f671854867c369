// The radix tree under random operations, beside a map from prefixes to slots that cannot be wrong.
#include <algorithm>
#include <map>
#include <set>

#include "base/random.h"
#include "radix/radix_tree.h"
#include "sim/report.h"

namespace sluice::sim {
namespace {

constexpr int32_t kPage = 4;
using Tokens = std::vector<int32_t>;
using Prefix = std::pair<std::string, Tokens>;

Tokens Head(const Tokens& t, int64_t pages) { return Tokens(t.begin(), t.begin() + pages * kPage); }

class RadixWorld {
 public:
  RadixWorld(uint64_t seed, bool trace)
      : journal_(trace),
        random_(seed),
        tree_({.page_tokens = kPage,
               .lanes = 1 + int32_t(random_.Below(3)),
               .policy = EvictionPolicy(random_.Below(5))}) {}

  SeedReport Run() {
    const int64_t operations = 60 + int64_t(random_.Below(140));
    for (int64_t i = 0; i < operations && !journal_.failed(); ++i) {
      const std::string ns = random_.Chance(0.7) ? "a" : "b";
      const Tokens t = RandomTokens();
      switch (random_.Below(8)) {
        case 0:
        case 1:
        case 2:
          Insert(ns, t);
          break;
        case 3:
          Evict();
          break;
        case 4:
          ToggleLock(ns, t);
          break;
        case 5:
          FollowCursor();
          break;
        case 6:
          CheckDigests(ns, t);
          break;
        default:
          Look(ns, t);
      }
      Check();
      journal_.CountEvent();
    }
    while (!locked_.empty()) Unlock(locked_.size() - 1);
    while (!slots_.empty() && !journal_.failed()) {
      const size_t before = slots_.size();
      Evict();
      if (slots_.size() == before) journal_.Violation("{} pages are left and nothing is evictable", before);
    }
    Check();
    if (tree_.nodes() != 0) journal_.Violation("an emptied tree has {} nodes", tree_.nodes());
    return std::move(journal_.report());
  }

 private:
  Tokens RandomTokens() {
    Tokens t;
    const auto pages = int64_t(random_.Below(9));
    // Pages differ in their first token or only in their last one.
    for (int64_t i = 0; i < pages; ++i) {
      const auto branch = int32_t(random_.Below(3));
      t.insert(t.end(), {branch == 2 ? 1 : 0, int32_t(i / 4), 7, branch == 1 ? 1 : 0});
    }
    for (uint64_t tail = random_.Below(kPage); tail > 0; --tail) t.push_back(1);
    return t;
  }
  int64_t ModelMatch(const std::string& ns, const Tokens& t) const {
    int64_t pages = 0;
    while (int64_t(t.size()) >= (pages + 1) * kPage && slots_.contains({ns, Head(t, pages + 1)})) ++pages;
    return pages;
  }
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

  // The walk's answer, checked against the map; null when the namespace is unknown.
  RadixTree::Match Look(const std::string& ns, const Tokens& t) {
    const RadixNode* root = tree_.FindRoot(ns);
    const int64_t want = ModelMatch(ns, t);
    if (root == nullptr) {
      if (want != 0) journal_.Violation("namespace {} is gone with {} pages matching", ns, want);
      return {};
    }
    const RadixTree::Match m = tree_.Walk(const_cast<RadixNode*>(root), RadixKey(t, kPage));
    if (m.pages != want) {
      journal_.Violation("a key of {} tokens matches {} pages, the map says {}", t.size(), m.pages, want);
      return {};
    }
    // The slots along the path are the ones that were put in.
    const RadixNode* n = m.node;
    int64_t at = m.pages;
    int32_t in_node = m.in_node;
    while (n != nullptr && !n->is_root()) {
      for (int32_t i = in_node; i-- > 0; --at) {
        const int32_t slot = n->slots[0][i];
        if (slot != slots_.at({ns, Head(t, at)}))
          journal_.Violation("page {} has slot {} of another prefix", at - 1, slot);
      }
      n = n->parent;
      if (n != nullptr) in_node = n->pages;
    }
    journal_.Cover("radix_match_pages", m.pages);
    return m;
  }

  void Insert(const std::string& ns, const Tokens& t) {
    const RadixKey key(t, kPage);
    RadixNode* root = tree_.GetRoot(ns);
    Look(ns, t);
    RadixTree::Match m = tree_.Walk(root, key);
    if (m.pages != ModelMatch(ns, t)) return;
    if (m.in_node < m.node->pages && m.in_node > 0) {
      m.node = tree_.Split(m.node, m.in_node);
      journal_.Cover("radix_splits");
    }
    if (m.pages < key.pages()) {
      const RadixKey rest = key.From(m.pages);
      std::vector<int32_t> slots;
      for (int64_t at = m.pages + 1; at <= key.pages(); ++at) {
        slots.push_back(next_slot_);
        slots_[{ns, Head(t, at)}] = next_slot_++;
      }
      const bool in_place =
          !m.node->is_root() && m.node->children == 0 && m.node->lock == 0 && random_.Chance(0.5);
      if (in_place)
        tree_.Extend(m.node, rest);
      else
        m.node = tree_.AddChild(m.node, rest);
      tree_.AddResident(m.node, Tier::kDevice, slots);
      m.node->priority = std::max(m.node->priority, int32_t(random_.Below(3)));
    }
    if (!m.node->is_root()) tree_.TouchPath(m.node);
    tree_.Reap(root, [](Tier, int32_t) {});
  }

  void Evict() {
    RadixNode* v = tree_.Victim(Tier::kDevice);
    if (v == nullptr) return;
    const Tokens path = PathOf(v);
    const std::string ns = NameOf(v);
    for (const auto& [node, prefix] : locked_)
      if (prefix.first == ns && prefix.second.size() >= path.size() &&
          Head(prefix.second, int64_t(path.size()) / kPage) == path)
        journal_.Violation("the victim of {} pages lies on a locked path", path.size() / kPage);
    const auto n = 1 + int32_t(random_.Below(uint64_t(v->pages)));
    int64_t at = int64_t(path.size()) / kPage;
    RadixNode* parent = v->parent;
    const bool alive = tree_.DropResident(v, Tier::kDevice, n, [&](int32_t slot) {
      const auto it = slots_.find({ns, Head(path, at)});
      if (it == slots_.end() || it->second != slot)
        journal_.Violation("freed slot {} is not that of page {}", slot, at - 1);
      if (it != slots_.end()) slots_.erase(it);
      --at;
    });
    if (!alive) tree_.Reap(parent, [](Tier, int32_t) {});
    journal_.Cover("radix_evicted_pages", n);
  }

  void ToggleLock(const std::string& ns, const Tokens& t) {
    if (!locked_.empty() && random_.Chance(0.5)) return Unlock(random_.Below(locked_.size()));
    RadixNode* root = tree_.FindRoot(ns);
    if (root == nullptr) return;
    RadixTree::Match m = tree_.Walk(root, RadixKey(t, kPage));
    if (m.pages == 0) return;
    if (m.in_node < m.node->pages) m.node = tree_.Split(m.node, m.in_node);
    tree_.Lock(m.node);
    locked_.emplace_back(m.node, Prefix(ns, Head(t, m.pages)));
    journal_.Cover("radix_locks");
  }
  void Unlock(size_t i) {
    RadixNode* node = locked_[i].first;
    tree_.Unlock(node);
    locked_.erase(locked_.begin() + long(i));
  }

  // A locked node is a cursor: what lies behind it is found without walking again from the root.
  void FollowCursor() {
    if (locked_.empty()) return;
    const auto& [node, prefix] = locked_[random_.Below(locked_.size())];
    Tokens t = prefix.second;
    const Tokens more = RandomTokens();
    t.insert(t.end(), more.begin(), more.end());
    const int64_t head = int64_t(prefix.second.size()) / kPage;
    const int64_t tail = tree_.Walk(node, RadixKey(t, kPage).From(head)).pages;
    if (head + tail != ModelMatch(prefix.first, t))
      journal_.Violation("cursor at {} pages finds {} more, the map says {}", head, tail,
                         ModelMatch(prefix.first, t) - head);
    journal_.Cover("radix_cursor_walks");
  }

  // The digest of a page is a function of namespace and tokens alone, however the tree was cut.
  void CheckDigests(const std::string& ns, const Tokens& t) {
    RadixNode* root = tree_.FindRoot(ns);
    if (root == nullptr) return;
    const RadixTree::Match m = tree_.Walk(root, RadixKey(t, kPage));
    if (m.pages == 0) return;
    Digest256 d = RadixTree::RootDigest(tree_.options().fingerprint, ns);
    for (int64_t p = 0; p < m.pages; ++p) d = PageDigest(d, std::span(t).subspan(size_t(p * kPage), kPage));
    if (tree_.Digest(m.node, m.in_node - 1) != d) journal_.Violation("wrong digest of page {}", m.pages - 1);
    journal_.Cover("radix_digests");
  }

  void Check() {
    for (const std::string& m : tree_.Audit()) journal_.Violation("audit: {}", m);
    int64_t cached = 0, evictable = 0;
    for (int32_t lane = 0; lane < tree_.options().lanes; ++lane) {
      cached += tree_.cached(Tier::kDevice, lane);
      evictable += tree_.evictable(Tier::kDevice, lane);
    }
    if (cached != int64_t(slots_.size()))
      journal_.Violation("{} pages cached, the map has {}", cached, slots_.size());
    std::set<Prefix> kept;
    for (const auto& [node, prefix] : locked_) {
      if (PathOf(node) != prefix.second) journal_.Violation("a locked node moved to another path");
      for (int64_t n = 1; n <= int64_t(prefix.second.size()) / kPage; ++n)
        kept.insert({prefix.first, Head(prefix.second, n)});
    }
    if (cached - evictable != int64_t(kept.size()))
      journal_.Violation("{} pages are protected, the locks protect {}", cached - evictable, kept.size());
  }

  Journal journal_;
  SeededStream random_;
  RadixTree tree_;
  std::map<Prefix, int32_t> slots_;  // page-aligned prefix > slot of its last page
  std::vector<std::pair<RadixNode*, Prefix>> locked_;
  int32_t next_slot_ = 0;
};

}  // namespace

SeedReport RunRadixSeed(uint64_t seed, bool trace) { return RadixWorld(seed, trace).Run(); }

}  // namespace sluice::sim
